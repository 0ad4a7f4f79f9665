"""Checks before weights are updated: whole layers, enough chunks, ranks that agree, and gradients that are finite."""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ds_vrgd.moments import ChunkNorms, gathered, is_dtensor
from ds_vrgd.optim import options, world
from ds_vrgd.optim.observer import BadGradient

# Differences between ranks, layers of one chunk, and chunks that a message names; a NaN in the loss is in every layer.
MOST_DIFFERENCES = 4
MOST_LAYERS = 3
MOST_CHUNKS = 8

# -- whole layers -----------------------------------------------------------------------------------------------------


def require_whole_layers(optimizer: str, group: dict[str, Any], *, stepping: bool = False) -> None:
    """Require that every parameter of a group, whose update sums over layers, is one whole layer of real numbers.

    ``stepping`` is a step without an engine, which would know how the parameters are cut.

    Raises:
        ValueError: naming the parameter, how it is sharded, and what to use instead.
    """
    names = group.get("param_names") or [f"parameter {index}" for index in range(len(group["params"]))]
    for name, param in zip(names, group["params"], strict=True):
        if param.is_complex():
            raise ValueError(
                f"{optimizer}: '{name}' is complex ({param.dtype}), and {optimizer} has no rule for complex numbers. "
                "Train torch.view_as_real(...) of it, which holds the same numbers"
            )
        if is_dtensor(param):
            if stepping and group["gamma"] < 1.0:
                raise ValueError(
                    f"{optimizer}: '{name}' is a DTensor, and nobody has seen the ranks' gradients of it before they "
                    "were reduced. Call ds_vrgd.attach(model, optimizer) after fully_shard(model) and before the first "
                    "backward pass, or set gamma=1.0, which needs no chunks"
                )
        elif (sharded := _sharding(param, stepping)) is not None:
            raise ValueError(
                f"{optimizer}: '{name}' is {sharded}. {optimizer} sums over whole layers, and these sums would "
                "silently be wrong. Use DistributedDataParallel, FSDP2 (fully_shard, then ds_vrgd.attach), or "
                "DeepSpeed ZeRO stage 0 to 3. With gamma=1, VRSGD, VRMomentum, VRAdam and VRAdamW need no such sums, "
                "and train as torch's optimizers do"
            )


def _sharding(param: Tensor, stepping: bool) -> str | None:
    """Return what the parameter is instead of a whole layer, in words; None if it is one."""
    # FSDP marks its flat parameter, and with use_orig_params the views into it.
    if getattr(param, "_fsdp_flattened", False):
        return "in the flat parameter of FullyShardedDataParallel (FSDP): it joins layers, and is cut over the ranks"
    if stepping and getattr(param, "tensor_model_parallel", False):
        megatron = sys.modules.get("megatron.core.parallel_state")
        with suppress(AssertionError):  # imported by somebody, and not initialized
            if megatron is not None and megatron.get_tensor_model_parallel_world_size() == 1:
                return None
        return "cut over Megatron's tensor-parallel ranks"
    return None


# -- chunks ------------------------------------------------------------------------------------------------------------


def require_chunks(optimizer: str, in_window: int, *, always_one: bool) -> None:
    """Require chunks, and the two that a variance needs in at least one of the first two windows.

    ``in_window`` are those of this window; ``always_one`` says that it and all before it, some, had one.

    Raises:
        RuntimeError: saying how many there were, and what to do.
    """
    if in_window == 0:
        raise RuntimeError(
            f"{optimizer} saw k = 0 chunk gradients since the last step: no backward() has run. Gradients that are set "
            "by hand, or come from torch.func or torch.autograd.grad, have no chunks to take a variance of, and "
            "neither has a second step() in a row. Run backward() once for each chunk before step(), or set gamma=1.0 "
            "for the base optimizer, which takes any gradient."
        )
    if always_one:
        raise RuntimeError(
            f"{optimizer} saw k = 1 chunk in this window and in every window before it, and needs at least 2 for a "
            "variance (a chunk is one micro-batch on one data-parallel rank). Accumulate the gradients of more "
            "micro-batches before step() (gradient_accumulation_steps), or use more ranks, or set gamma=1.0 for the "
            "base optimizer."
        )


def require_off(optimizer: str, groups: Mapping[int, Mapping[str, Any]]) -> None:
    """Require that gamma is still 1 in param groups, given by their index, whose chunks are not observed.

    Raises:
        RuntimeError: naming the param group and its gamma.
    """
    for index, group in groups.items():
        if group["gamma"] < 1.0:
            raise RuntimeError(
                f"{optimizer}: gamma of param group {index} was 1.0, which turns GSNR off, and is now "
                f"{group['gamma']}; the chunks of its parameters have not been observed. Begin with a gamma below 1: "
                "0.999 leaves r within 0.1 % of 1, and may be lowered at any step."
            )


# -- ranks that agree -------------------------------------------------------------------------------------------------


def require_agreement(mine: Mapping[str, str], remark: str = "", *, replicas: Sequence[int] | None = None) -> None:
    """Compare a table with those of other ranks. A collective of all ranks: digests first, tables if these differ.

    Args:
        mine: what is compared, by what it is called; the order counts.
        remark: what else the message says about the way out.
        replicas: the ranks, this one among them, whose tables must be alike; None for all.

    Raises:
        RuntimeError: on every rank, whichever ranks differ, naming what differs, its values and their ranks.
    """
    ranks_of_world = torch.distributed.get_world_size()
    if ranks_of_world == 1:
        return
    alike = tuple(range(ranks_of_world)) if replicas is None else tuple(sorted(replicas))
    digest = hashlib.sha256(repr(list(mine.items())).encode()).hexdigest()
    digests = gathered((alike, digest), world.group())
    if all(digests[rank][1] == digests[ranks[0]][1] for ranks, _ in digests for rank in ranks):
        return
    tables = gathered(dict(mine), world.group())
    differences = [
        difference
        for ranks in dict.fromkeys(ranks for ranks, _ in digests)
        if len({digests[rank][1] for rank in ranks}) > 1
        for difference in _differences({rank: tables[rank] for rank in ranks})
    ]
    more = f"; and {len(differences) - MOST_DIFFERENCES} more" if len(differences) > MOST_DIFFERENCES else ""
    raise RuntimeError(
        f"the ranks differ in what they train: {'; '.join(differences[:MOST_DIFFERENCES])}{more}. Build the same model "
        f"and optimizer, with the same arguments, on every rank{'; ' if remark else ''}{remark}."
    )


def require_everyone(device: torch.device) -> None:
    """Require that all ranks are in ``step()``. A collective, and the first of a step.

    Inside DDP's ``join()`` a rank that has run out of data sums one float, 0, with the ranks that still train. The sum
    here, on a device where the ranks can talk, is the same collective to it; any other would abort the process in gloo
    or hang it in NCCL.

    Raises:
        RuntimeError: on the ranks that are in ``step()``, where others are not.
    """
    stepping = torch.ones(1, device=device)
    torch.distributed.all_reduce(stepping)
    ranks, present = torch.distributed.get_world_size(), round(float(stepping))
    if present != ranks:
        raise RuntimeError(
            f"{present} of {ranks} ranks are in step(): the others have run out of data inside DDP's join(), or wait "
            "for another collective. A variance needs the chunks of every rank. Give all ranks the same number of "
            "micro-batches (DistributedSampler with drop_last=True does), or set gamma=1.0, which needs no collective."
        )


def _differences(tables: Mapping[int, Mapping[str, str]]) -> Iterable[str]:
    def listed(ranks: list[int]) -> str:
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"

    for name in {name: None for table in tables.values() for name in table}:
        ranks: dict[str, list[int]] = {}
        for rank, table in tables.items():
            ranks.setdefault(table.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            yield f"{name} is " + ", ".join(f"{value} on {listed(where)}" for value, where in ranks.items())
    if len({frozenset(table.items()) for table in tables.values()}) == 1:
        yield "the order of the parameters"


def table_of_params(named: Iterable[tuple[str, Tensor]], *, shapes: bool = True) -> dict[str, str]:
    """Return name, dtype, shape of parameters, and whether they are trained.

    Where an engine has cut a parameter and left its whole shape in ``ds_shape``, as DeepSpeed ZeRO-3 does, that counts.
    """
    return {
        f"'{name}'": str(param.dtype).removeprefix("torch.")
        + (f" {tuple(getattr(param, 'ds_shape', param.shape))}" if shapes else f" of {param.dim()} dimensions")
        + ("" if param.requires_grad else ", frozen")
        for name, param in named
    }


def table_of_arguments(optimizer: Optimizer, *, groups: bool = True) -> dict[str, str]:
    """Return class, arguments and, with ``groups``, the options of the param groups, without their parameters."""
    table = {"the optimizer": type(optimizer).__name__}
    table |= {name: _spelt(getattr(optimizer, name)) for name in options.WHOLE}
    table |= {"the number of param groups": str(len(optimizer.param_groups))} if groups else {}
    for index, group in enumerate(optimizer.param_groups if groups else ()):
        table |= {f"{name} of param group {index}": _plain(group[name]) for name in optimizer.defaults if name in group}
    return table


def table_of_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], *, shapes: bool = True) -> dict[str, str]:
    """Return :func:`table_of_arguments` and the parameters, numbered where ``names`` and the group lack their name."""
    table = table_of_arguments(optimizer)
    for group_index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [names.get(param) for param in group["params"]]
        for index, (name, param) in enumerate(zip(given, group["params"], strict=True)):
            label = name or f"parameter {index} of param group {group_index}"
            ((label, value),) = table_of_params([(label, param)], shapes=shapes).items()
            table[label] = f"{value}, number {index} of param group {group_index}"
    return table


def _spelt(value: Any) -> str:
    """Return how an argument of the whole optimizer is written; a function's own spelling differs between ranks."""
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else repr(value)


def _plain(value: Any) -> str:
    """Return one spelling for equal values: lists and tuples, dtypes and their names, numbers and scalar tensors."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return repr(tuple(float(entry) for entry in value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return str(value).removeprefix("torch.")


# -- gradients that are finite ----------------------------------------------------------------------------------------


def any_rank_has_bad(norms: ChunkNorms, grads: Sequence[Tensor], group: Any | None, device: torch.device) -> Tensor:
    """Return whether a chunk, or the gradient made of the chunks, is not finite on any rank: a scalar. A collective.

    ``grads`` are what ``step()`` was given, without padding: not the chunks' mean if the caller has changed it.
    ``group`` has all ranks that step together, which can talk to each other on ``device``; None for one process.
    """
    given = ChunkNorms()
    given.note(0, [(grad, grad) for grad in grads])
    flag = (norms.any_bad(device) | given.any_bad(device)).to(torch.uint8)
    if group is not None:
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
    return flag


def gather_bad(norms: ChunkNorms | None, name_of: Callable[[Tensor], str], group: Any | None) -> list[BadGradient]:
    """Return all ranks' bad gradients, on every rank, by rank and in the order of the backward pass. A collective."""
    rank = 0 if group is None else torch.distributed.get_rank()
    mine = [BadGradient(rank, index, name_of(param), kind) for param, index, kind in (norms.bad() if norms else ())]
    return [bad for of_rank in gathered(mine, group) for bad in of_rank]


def report_bad(optimizer: str, policy: str, found: Iterable[BadGradient]) -> FloatingPointError | None:
    """Name the bad gradients of a window that is left out: in the first rank's log, or in the returned error."""
    chunks = _named(found)
    if policy == "error":
        return FloatingPointError(
            f'the gradient of this step is not finite ({chunks}). nonfinite="error" stops before any weight is '
            'updated; "skip" would leave out this step and continue.'
        )
    if world.is_first():
        logging.getLogger("ds_vrgd").warning("%s skips a step whose gradient is not finite: %s", optimizer, chunks)
    return None


def _named(found: Iterable[BadGradient]) -> str:
    """Return the chunks and layers in words."""
    chunks: dict[tuple[int, int], list[str]] = {}
    for bad in found:
        chunks.setdefault((bad.rank, bad.micro_batch), []).append(f"{bad.kind} in '{bad.layer}'")
    lines = []
    for (rank, micro_batch), layers in list(chunks.items())[:MOST_CHUNKS]:
        rest = len(layers) - MOST_LAYERS
        more = f" and {rest} more layer{'s' if rest > 1 else ''}" if rest > 0 else ""
        named = ", ".join(layers[:MOST_LAYERS])
        lines.append(f"rank {rank}, micro-batch {micro_batch + 1} of the window: {named}{more}")
    if len(chunks) > MOST_CHUNKS:
        lines.append(f"{len(chunks) - MOST_CHUNKS} more chunks")
    return "; ".join(lines) or (
        "every observed chunk is finite, so the NaN or infinity is in a layer with gamma=1, or arose in the sum of the "
        "chunks or after backward()"
    )
