"""Do all ranks train the same parameters with the same arguments? Asked once, at the start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_vrgd.optim.arguments import OF_THE_WHOLE

if TYPE_CHECKING:
    from ds_vrgd.optim.base import VROptimizer

# Differences that a message lists.
MOST_DIFFERENCES = 4


def require_agreement(mine: Mapping[str, str], remark: str = "", *, replicas: Sequence[int] | None = None) -> None:
    """Compare a table with those of other ranks. A collective of all ranks: one digest a rank, tables if these differ.

    Args:
        mine: what is compared, by what it is called; the order counts.
        remark: what else the message says about the way out.
        replicas: the ranks, this one among them, whose tables must be alike; None for all.

    Raises:
        RuntimeError: on every rank, whichever ranks differ, naming what differs, its values and their ranks.
    """
    world = torch.distributed.get_world_size()
    if world == 1:
        return
    alike = tuple(range(world)) if replicas is None else tuple(sorted(replicas))
    digest = hashlib.sha256(repr(list(mine.items())).encode()).hexdigest()
    digests: list[Any] = [None] * world
    torch.distributed.all_gather_object(digests, (alike, digest))
    if all(digests[rank][1] == digests[ranks[0]][1] for ranks, _ in digests for rank in ranks):
        return
    tables: list[Any] = [None] * world
    torch.distributed.all_gather_object(tables, dict(mine))
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


def _differences(tables: Mapping[int, Mapping[str, str]]) -> Iterable[str]:
    names = {name: None for table in tables.values() for name in table}
    for name in names:
        ranks: dict[str, list[int]] = {}
        for rank, table in tables.items():
            ranks.setdefault(table.get(name, "missing"), []).append(rank)
        if len(ranks) > 1:
            yield f"{name} is " + ", ".join(f"{value} on {_listed(where)}" for value, where in ranks.items())
    first, *others = tables.values()
    if all(dict(table) == first for table in others):
        yield "the order of the parameters"


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def table_of_params(named: Iterable[tuple[str, Tensor]], *, shapes: bool = True) -> dict[str, str]:
    """Name, dtype, shape of parameters, and whether they are trained; whole, where ZeRO-3 has cut them."""
    return {
        f"'{name}'": str(param.dtype).removeprefix("torch.")
        + (f" {tuple(getattr(param, 'ds_shape', param.shape))}" if shapes else f" of {param.dim()} dimensions")
        + ("" if param.requires_grad else ", frozen")
        for name, param in named
    }


def table_of_arguments(optimizer: VROptimizer, *, groups: bool = True) -> dict[str, str]:
    """Class, arguments and, with ``groups``, param groups, without their parameters, whatever a rank holds of these."""
    table = {"the optimizer": type(optimizer).__name__} | {
        name: repr(getattr(optimizer, name)) for name in OF_THE_WHOLE
    }
    if not groups:
        return table
    table["the number of param groups"] = str(len(optimizer.param_groups))
    for index, group in enumerate(optimizer.param_groups):
        table |= {f"{name} of param group {index}": _plain(group[name]) for name in optimizer.defaults if name in group}
    return table


def table_of_optimizer(optimizer: VROptimizer, names: Mapping[Tensor, str], *, shapes: bool = True) -> dict[str, str]:
    """As :func:`table_of_arguments`, with the parameters; those that ``names`` and the group lack go by number."""
    table = table_of_arguments(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        given = group.get("param_names") or [names.get(param) for param in group["params"]]
        for place, (name, param) in enumerate(zip(given, group["params"], strict=True)):
            label = name or f"parameter {place} of param group {index}"
            ((label, value),) = table_of_params([(label, param)], shapes=shapes).items()
            table[label] = f"{value}, number {place} of param group {index}"
    return table


def _plain(value: Any) -> str:
    """One spelling for what means the same: lists and tuples, dtypes and their names, numbers and scalar tensors."""
    if isinstance(value, Tensor):
        value = value.item()
    if isinstance(value, (list, tuple)):
        return repr(tuple(float(entry) for entry in value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    return str(value).removeprefix("torch.")
