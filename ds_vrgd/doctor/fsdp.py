"""Train under PyTorch's FSDP2, follow with the dense reference, and compare."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ds_vrgd.doctor.chunks import chunk_gradients, loss_of, norm_of
from ds_vrgd.doctor.model import load_model, on_device
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.report import EXACT, NOT_EXACT, OF_WEIGHTS, REFUSED, VISIBLE, Outcome, Row
from ds_vrgd.engines import attach
from ds_vrgd.optim import OPTIMIZERS

SAMPLES, MICRO_BATCHES, RATE = 4, 2, 1e-2


def require_optimizer(flag: str, name: str) -> str:
    """Return the name of an optimizer, given with a flag; ValueError if there is none."""
    if name not in OPTIMIZERS:
        raise ValueError(f"{flag} {name}: not an optimizer of ds_vrgd. Give one of {', '.join(OPTIMIZERS)}")
    return name


def examine_fsdp(optimizer: str, named: str | None, steps: int) -> Outcome:
    """Train in fp32 and in bf16, and compare. A collective of all ranks: the status is the same on each.

    The optimizer, given by its class's name, has default arguments. For ``named`` see :func:`load_model`.
    """
    return in_both_dtypes(_examine, optimizer, named, steps)


def in_both_dtypes(examine: Callable[[str, str, str | None, int], Outcome], optimizer: str, *given: Any) -> Outcome:
    """Return what an examination finds in fp32 and in bf16, and the worse status."""
    outcomes = [examine(optimizer, dtype, *given) for dtype in ("float32", "bfloat16")]
    return Outcome([row for outcome in outcomes for row in outcome.rows], max(outcome.status for outcome in outcomes))


def _examine(optimizer: str, dtype: str, named: str | None, steps: int) -> Outcome:
    """Train with fp32 weights; ``dtype`` is that of computation and reduction."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = torch.device("cuda" if torch.distributed.get_backend() == "nccl" else "cpu")
    computed = getattr(torch, dtype)
    try:
        model, batches = load_model(named, SAMPLES)
        plain = copy.deepcopy(model).to(device, computed)
        trained = shard(model.to(device), init_device_mesh(device.type, (world,)), computed)
        made = OPTIMIZERS[optimizer](trained.parameters(), lr=RATE)
        attach(trained, made)
    except (ValueError, RuntimeError) as refusal:
        return Outcome([("refused", str(refusal))], REFUSED)
    start = {name: weight.double() for name, weight in whole(trained).items()}
    reference = DenseOptimizer(optimizer, start, lr=RATE)
    for step in range(steps):
        micro_batches = [on_device(batches(step, index), device) for index in range(MICRO_BATCHES * world)]
        plain.load_state_dict(whole(trained), strict=False)
        reference.step(chunk_gradients(plain, micro_batches, 1.0 / MICRO_BATCHES, 7919 * step))
        for index in range(rank, len(micro_batches), world):
            torch.manual_seed(7919 * step + index)
            (loss_of(trained, micro_batches[index]) / MICRO_BATCHES).backward()
        made.step()
        made.zero_grad()
    rows: list[Row] = [
        ("FSDP2", f"{dtype}, {world} ranks"),
        ("k", f"{world * MICRO_BATCHES} = {world} ranks x {MICRO_BATCHES} micro-batches"),
    ]
    return compare(rows, whole(trained), start, reference, steps)


def compare(
    rows: Sequence[Row],
    weights: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    reference: DenseOptimizer,
    steps: int,
) -> Outcome:
    """Return what there is to say about a training, after ``rows``, which say what was trained.

    The weights are those after and before ``steps`` steps, which the reference has taken, too.
    """
    size = norm_of(list(reference.params.values()))
    error = norm_of([weights[name].double() - weight for name, weight in reference.params.items()]) / size
    moved = norm_of([weight - start[name] for name, weight in reference.params.items()]) / size
    faults = [] if error <= OF_WEIGHTS else [f"the error {error:.1e} is above {OF_WEIGHTS:.1e}"]
    if not moved >= VISIBLE:
        faults.append(f"the weights moved by {moved:.1e} of their norm, too little to show anything")
    found: list[Row] = [
        *rows,
        ("layers", str(len(start))),
        ("steps", f"{steps}; the weights moved by {moved:.1e} of their norm"),
        ("error", f"{error:.1e} of the weights' norm, at most {OF_WEIGHTS:.1e}"),
    ]
    found += [("NOT EXACT", fault) for fault in faults] or [("verdict", "exact")]
    return Outcome(found, NOT_EXACT if faults else EXACT)


def shard(model: nn.Module, mesh: Any, dtype: torch.dtype) -> nn.Module:
    """Shard a model, and by themselves the blocks of its lists of modules; without any, its linear layers."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, cast_forward_inputs=False)
    blocks = [block for blocks in model.modules() if isinstance(blocks, nn.ModuleList) for block in blocks]
    holders = Counter(param for module in model.modules() for param in module.parameters(recurse=False))
    for block in blocks or [child for child in model.children() if isinstance(child, nn.Linear)]:
        if all(holders[param] == 1 for param in block.parameters()):  # FSDP2 wants tied weights in one call
            fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights, whole, on the CPU; a collective."""
    trained: dict[str, Any] = {name: param for name, param in model.named_parameters() if param.requires_grad}
    return {name: param.detach().full_tensor().cpu() for name, param in trained.items()}
