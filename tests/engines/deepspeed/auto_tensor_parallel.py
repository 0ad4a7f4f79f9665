"""Drive DeepSpeed's AutoTP beside the dense float64 reference.

AutoTP cuts a Hugging Face model by itself, and not always evenly: of 83 rows of the head one rank gets 42. The
reference's chunk gradients are the engine's own, as autograd hands them out, put together to those of the whole model,
and held against those of a whole copy of it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from ds_vrgd.doctor.chunks import chunk_gradients, difference, norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from tests.support.model import VOCABULARY, batches, param_groups
from tests.support.trajectory import DTYPES, Case, reference_groups, relative_error

TP = 2


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


class Seen:
    """The gradients that autograd has produced since the last look, one per micro-batch."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.chunks: list[dict[str, Tensor]] = [{}]
        for name, param in module.named_parameters():
            param.register_hook(lambda grad, name=name: self.chunks[-1].update({name: grad.detach().cpu().double()}))

    def take(self) -> list[dict[str, Tensor]]:
        chunks, self.chunks = [chunk for chunk in self.chunks if chunk], [{}]
        return chunks


def whole(parts: Sequence[Mapping[str, Tensor]], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Put together what the tensor-parallel ranks hold, and assert that copies are the same, bit for bit."""
    found = {}
    for name, shape in shapes.items():
        mine = [part[name] for part in parts]
        if mine[0].shape == shape:
            assert all(torch.equal(part, mine[0]) for part in mine), f"{name} differs between tensor-parallel ranks"
            found[name] = mine[0]
        else:
            (dim,) = [dim for dim, size in enumerate(shape) if mine[0].shape[dim] != size]
            found[name] = torch.cat(mine, dim)
    return found


def gathered(mine: Any) -> list[list[Any]]:
    """Return the values by data-parallel rank, then by tensor-parallel rank. A collective."""
    world = torch.distributed.get_world_size()
    everyone: list[Any] = [None] * world
    torch.distributed.all_gather_object(everyone, mine)
    return [everyone[first : first + TP] for first in range(0, world, TP)]


def run_case(case: Case) -> dict[str, Any]:
    """Train, and return the errors, which are the same on all ranks."""
    model = make_model()
    plain = copy.deepcopy(model).to(DTYPES[case.dtype])
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    rank, dp = torch.distributed.get_rank() // TP, torch.distributed.get_world_size() // TP
    config = case.config(dp) | {"tensor_parallel": {"autotp_size": TP}}
    del config["train_batch_size"]  # DeepSpeed takes all ranks for data-parallel there
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=param_groups(model, **case.without_decay()), config=config
    )
    seen = Seen(engine.module)
    start = {name: weight.detach().double() for name, weight in plain.named_parameters()}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    apart = 0.0
    for step in range(case.steps):
        micro_batches = batches(step, case.accumulation * dp)
        with whole_weights(engine) as weights:
            parts = gathered({name: weight.detach().clone() for name, weight in weights.items()})
        plain.load_state_dict(whole(parts[0], shapes), strict=False)
        for index in range(case.accumulation):
            tokens = micro_batches[index * dp + rank]
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            seen.chunks.append({})
            engine.step()
        chunks = [
            {name: grad * case.accumulation for name, grad in whole(parts, shapes).items()}
            for of_ranks in zip(*(zip(*row, strict=True) for row in gathered(seen.take())), strict=True)
            for parts in of_ranks
        ]
        plainly = chunk_gradients(plain, [{"input_ids": tokens, "labels": tokens} for tokens in micro_batches], 1.0)
        apart = max(apart, difference(chunks, plainly))
        reference.step(chunks, clip=case.clip)
    assert (engine.global_steps, engine.skipped_steps) == (case.steps, 0)
    local = {name: param.ds_shape if hasattr(param, "ds_shape") else param.shape
             for name, param in engine.module.named_parameters()}  # fmt: skip
    parts = gathered({name: master.view(local[name]) for name, master in master_weights(engine).items()})
    masters = [whole(row, shapes) for row in parts]
    wrapper = type(engine.optimizer).__name__
    engine.destroy()
    groups.mpu = None
    moved = norm_of([reference.params[name] - start[name] for name in start])
    return {
        "of_weights": [
            relative_error({name: weight.flatten() for name, weight in of_row.items()}, reference) for of_row in masters
        ],
        "moved": moved / norm_of(list(reference.params.values())),
        "apart": apart,
        "wrapper": wrapper,
    }
