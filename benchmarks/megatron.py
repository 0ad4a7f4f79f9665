"""Step time inside Megatron-Core's distributed optimizer: ``python -m benchmarks.megatron --ranks 2``.

A GPT of Megatron-Core's own classes, with its layers that need no Transformer Engine, in bf16, on data-parallel ranks
alone, with ``overlap_grad_reduce``, ``overlap_param_gather`` and clipping. All contenders have their model at the same
time and take blocks of steps in turns, so that none has the warmer card. The ratio of a round is that of the blocks'
median steps.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import ds_vrgd.megatron
from benchmarks.checks import interval
from benchmarks.command import command_line
from benchmarks.contenders import LEARNING_RATE, WEIGHT_DECAY
from benchmarks.ranks import Rank, run_on_ranks
from benchmarks.record import Record, environment, file_name
from benchmarks.report import MEGATRON
from benchmarks.steps import StepTimer
from benchmarks.timing import Clock, Spread
from benchmarks.training import CLIPPING, allocated

WARMUP_STEPS, STEPS = 4, 4
REFERENCE = "megatron-adamw"


@dataclass(frozen=True)
class Network:
    """A GPT, and the sequences of one backward pass on one rank."""

    layers: int
    hidden: int
    heads: int
    length: int
    vocabulary: int
    micro_batch: int

    def batches(self, count: int, rank: Rank) -> list[dict[str, Tensor]]:
        """Return ``count`` micro-batches of random tokens."""
        drawn = torch.Generator().manual_seed(1 + rank.index)
        shape = (count, self.micro_batch, self.length + 1)
        tokens = torch.randint(self.vocabulary, shape, generator=drawn).to(rank.device)
        return [{"tokens": micro_batch} for micro_batch in tokens]


NETWORKS = {"gpt-350m": Network(24, 1024, 16, 1024, 50304, 8), "tiny": Network(2, 16, 2, 16, 64, 2)}


class MegatronTraining:
    """A model in Megatron-Core's DistributedDataParallel with one of the contenders.

    The reference is the AdamW of torch that Megatron-Core takes without Transformer Engine and apex, made fused.
    """

    def __init__(self, network: Network, contender: str, rank: Rank) -> None:
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=network.layers, hidden_size=network.hidden, num_attention_heads=network.heads, bf16=True,
            params_dtype=torch.bfloat16, attention_dropout=0.0, hidden_dropout=0.0, masked_softmax_fusion=False,
            gradient_accumulation_fusion=False, use_cpu_initialization=rank.device.type == "cpu",
        )  # fmt: skip
        spec = get_gpt_layer_local_spec(normalization="LayerNorm")
        gpt = GPTModel(
            config, spec, network.vocabulary, network.length, position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        )  # fmt: skip
        overlap = {"use_distributed_optimizer": True, "overlap_param_gather": True}
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, **overlap)
        self._model = DistributedDataParallel(config, ddp_config, Float16Module(config, gpt.to(rank.device)))
        options = OptimizerConfig(
            lr=LEARNING_RATE, min_lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, bf16=True, clip_grad=CLIPPING, **overlap
        )
        if contender == REFERENCE:
            self._optimizer: Any = get_megatron_optimizer(options, [self._model])
            assert type(self._optimizer.optimizer) is torch.optim.AdamW, "Transformer Engine or apex is installed"
            for group in self._optimizer.optimizer.param_groups:
                group["fused"] = True
        else:
            name = MEGATRON[contender]
            self._optimizer = ds_vrgd.megatron.get_optimizer(options, [self._model], optimizer=name)
        self._positions = torch.arange(network.length, device=rank.device).expand(network.micro_batch, -1)
        self._hidden = torch.ones(1, 1, network.length, network.length, device=rank.device).tril() < 0.5
        self.accumulation, self._micro_batches = 1, 0
        self.parameters = sum(param.numel() for param in gpt.parameters())

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["tokens"]
        self._micro_batches += 1
        losses: Tensor = self._model(tokens[:, :-1], self._positions, self._hidden, labels=tokens[:, 1:])
        return losses.mean()

    @property
    def _is_last(self) -> bool:
        return self._micro_batches % self.accumulation == 0

    def backward(self, loss: Tensor) -> None:
        with nullcontext() if self._is_last else self._model.no_sync():
            (loss / self.accumulation).backward()

    def step(self) -> None:
        if self._is_last:
            finalize_model_grads([self._model])
            self._optimizer.step()
            self._model.zero_grad_buffer()
            self._optimizer.zero_grad()

    def close(self) -> None:
        """Nothing: the process ends."""


def measure(
    trainings: dict[str, MegatronTraining], network: Network, accumulation: int, rounds: int, rank: Rank
) -> dict[str, dict[str, Any]]:
    """Time rounds of blocks, one a contender; a collective of all ranks.

    Returns:
        By contender, ``seconds`` (a spread of each part; of the slowest rank), ``ratios`` to the reference, one a
        round, and ``loss``.
    """
    timers = {}
    for name, training in trainings.items():
        training.accumulation = accumulation
        timers[name] = StepTimer(training, network.batches(accumulation, rank), Clock(rank.device))
        timers[name].run(WARMUP_STEPS)
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in timers}
    medians: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            block = {part: rank.slowest(values) for part, values in timers[name].run(STEPS).items()}
            medians[name].append(median(block["total"]))
            for part, values in block.items():
                seconds[name].setdefault(part, []).extend(values)
    return {
        name: {
            "seconds": {part: Spread.of(values).to_json() for part, values in seconds[name].items()},
            "ratios": [own / other for own, other in zip(medians[name], medians[REFERENCE], strict=True)],
            "loss": timers[name].loss,
        }
        for name in names
    }


def run(rank: Rank, chosen: argparse.Namespace, record: Record) -> None:
    """Measure on this rank, with the others; every row is recorded and logged as it is done."""
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    network = NETWORKS[chosen.model]
    trainings, held = {}, {}
    for name in MEGATRON:
        before = allocated(rank.device)
        trainings[name] = MegatronTraining(network, name, rank)
        StepTimer(trainings[name], network.batches(1, rank), Clock(rank.device)).run(1)
        held[name] = allocated(rank.device) - before
    for accumulation in chosen.accumulations:
        for name, found in measure(trainings, network, accumulation, chosen.rounds, rank).items():
            row = {"model": chosen.model, "parameters": trainings[name].parameters, "contender": name,
                   "accumulation": accumulation, "micro_batch": network.micro_batch, "length": network.length,
                   "held_bytes": max(rank.gather(held[name])), "interval": interval(found["ratios"]),
                   **found}  # fmt: skip
            record.add("megatron", row)
            low, high = row["interval"]
            rank.log(
                f"{name}, accumulation {accumulation}: {row['seconds']['total']['median'] * 1e3:.2f} ms, ratio "
                f"{median(row['ratios']):.4f} ({low:.4f} to {high:.4f}), loss {row['loss']:.3f}"
            )


def run_and_record(rank: Rank, chosen: argparse.Namespace, command: str, path: Path) -> None:
    """Measure; the first rank writes the file."""
    run(rank, chosen, Record(path if rank.is_first else None, environment(command, rank.count, rank.device)))


def main(arguments: list[str]) -> int:
    """Measure and say where the results are."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser("python -m benchmarks.megatron", description=__doc__)
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--model", choices=NETWORKS, default="gpt-350m")
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=6, help=f"of a block of {STEPS} steps of every contender")
    chosen = parser.parse_args(arguments)
    path = chosen.output / file_name()
    return run_on_ranks(chosen.ranks, run_and_record, chosen, command_line(arguments, "benchmarks.megatron"), path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
