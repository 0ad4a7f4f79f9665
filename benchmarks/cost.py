"""The alpha-beta cost model of every way to reduce gradients, as formulas; ``benchmarks.model`` writes their results.

A collective costs ``alpha`` for each message that a rank sends one after the other, and ``bytes / beta`` for what it
sends, inside its node and between nodes separately; the two are added, as if nothing overlapped. Then the owner of a
shard reads and writes memory to form the moments. ``docs/SCALING.md`` says where each formula comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIRE = 2  # bytes of a gradient in bf16
MOMENTS = 8  # bytes of a mean and a centred sum of squares in fp32
BUCKET = 2**25  # elements of an exchanged bucket at most
BUFFERS = 5  # three to send and two to receive


@dataclass(frozen=True)
class Link:
    """A link between two ranks: ``alpha`` seconds per message, ``beta`` bytes per second."""

    alpha: float
    beta: float

    def seconds(self, messages: float, size: float) -> float:
        """Return the seconds of so many messages in a row and so many bytes together."""
        return messages * self.alpha + size / self.beta


@dataclass(frozen=True)
class Machine:
    """GPUs in nodes.

    Attributes:
        per_node: GPUs of a node.
        inside: by collective, between the GPUs of a node.
        between: between two nodes, for each GPU.
        memory: bytes a second that the moments' kernel reads and writes.
    """

    per_node: int
    inside: dict[str, Link]
    between: Link
    memory: float


@dataclass(frozen=True)
class Traffic:
    """The messages and bytes that one rank sends in one call of ``collective``."""

    collective: str
    inside_messages: float
    inside_bytes: float
    between_messages: float = 0.0
    between_bytes: float = 0.0

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of a call on a machine."""
        inside = machine.inside[self.collective].seconds(self.inside_messages, self.inside_bytes)
        return inside + machine.between.seconds(self.between_messages, self.between_bytes)

    def times(self, factor: int) -> Traffic:
        """Return the call, so many times."""
        return Traffic(
            self.collective,
            self.inside_messages * factor,
            self.inside_bytes * factor,
            self.between_messages * factor,
            self.between_bytes * factor,
        )


@dataclass(frozen=True)
class Cost:
    """The cost of the reduction of one step's gradients, on each rank.

    Attributes:
        calls: what is sent.
        memory_bytes: read and written for the moments.
        held_bytes: memory beyond DeepSpeed's own while a step's gradients are collected.
    """

    calls: tuple[Traffic, ...]
    memory_bytes: float = 0.0
    held_bytes: float = 0.0

    def seconds(self, machine: Machine) -> float:
        """Return the seconds on a machine, with nothing overlapping."""
        return sum(call.seconds(machine) for call in self.calls) + self.memory_bytes / machine.memory

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.calls + other.calls,
            self.memory_bytes + other.memory_bytes,
            self.held_bytes + other.held_bytes,
        )


def nodes(ranks: int, per_node: int) -> tuple[int, int]:
    """Return the number of nodes, and of ranks in each.

    Raises:
        ValueError: the ranks do not fill whole nodes.
    """
    within = min(ranks, per_node)
    if ranks % within:
        raise ValueError(f"{ranks} ranks do not fill nodes of {per_node}")
    return ranks // within, within


def all_reduce(size: float, ranks: int, per_node: int) -> Traffic:
    """Return an all-reduce of ``size`` bytes: scattered sums in a node, reduced among nodes, gathered in the node."""
    n, g = nodes(ranks, per_node)
    return Traffic("all-reduce", 2 * (g - 1), 2 * (g - 1) / g * size, 2 * (n - 1), 2 * (n - 1) / n * size / g)


def reduce_scatter(size: float, ranks: int, per_node: int) -> Traffic:
    """Return the first half of an all-reduce."""
    n, g = nodes(ranks, per_node)
    return Traffic("reduce-scatter", g - 1, (g - 1) / g * size, n - 1, (n - 1) / n * size / g)


def all_to_all(size: float, ranks: int, per_node: int) -> Traffic:
    """Return an all-to-all of ``size`` bytes on each rank: an equal part to each of the others, wherever it is."""
    _, g = nodes(ranks, per_node)
    return Traffic("all-to-all", g - 1, (g - 1) / ranks * size, ranks - g, (ranks - g) / ranks * size)


def deepspeed(stage: int, parameters: int, ranks: int, per_node: int, accumulation: int) -> Cost:
    """Return DeepSpeed's own reduction: ZeRO-1 waits for the last micro-batch, ZeRO-2 and -3 reduce every one."""
    collective = reduce_scatter if stage == 3 else all_reduce
    calls = 1 if stage == 1 else accumulation
    return Cost((collective(WIRE * parameters, ranks, per_node).times(calls),))


def one_level(parameters: int, ranks: int, per_node: int, accumulation: int) -> Cost:
    """Return our exchange among all ranks, per micro-batch, in buckets."""
    call = all_to_all(WIRE * parameters, ranks, per_node)
    return Cost(
        (_in_buckets(call, parameters).times(accumulation),),
        _merged_bytes(parameters, ranks, ranks, accumulation),
        MOMENTS * parameters / ranks + _buffers(parameters),
    )


def two_levels(parameters: int, ranks: int, per_node: int, accumulation: int) -> Cost:
    """Return our exchange inside each node, per micro-batch, and once per step the moments between the nodes."""
    n, g = nodes(ranks, per_node)
    if n == 1 or g == 1:
        return one_level(parameters, ranks, per_node, accumulation)
    inside = all_to_all(WIRE * parameters, g, g)
    # The two moments travel in a message each.
    moments = Traffic("all-to-all", 0, 0, 2 * (n - 1), (n - 1) / n * MOMENTS * parameters / g)
    return Cost(
        (_in_buckets(inside, parameters).times(accumulation), _in_buckets(moments, parameters)),
        _merged_bytes(parameters, g, g, accumulation) + MOMENTS * parameters / g + MOMENTS * parameters / ranks,
        MOMENTS * parameters / g + MOMENTS * parameters / ranks + _buffers(parameters),
    )


def _buckets(parameters: int) -> int:
    return math.ceil(parameters / BUCKET)


def _buffers(parameters: int) -> float:
    return BUFFERS * min(BUCKET, parameters) * WIRE


def _in_buckets(call: Traffic, parameters: int) -> Traffic:
    """Return the same bytes in more messages."""
    count = _buckets(parameters)
    return Traffic(
        call.collective,
        call.inside_messages * count,
        call.inside_bytes,
        call.between_messages * count,
        call.between_bytes,
    )


def _merged_bytes(parameters: int, sources: int, owners: int, accumulation: int) -> float:
    """Return the bytes of merging: gradients are read; moments are written, and read from the second micro-batch on."""
    owned = parameters / owners
    return accumulation * sources * owned * WIRE + (2 * accumulation - 1) * MOMENTS * owned


def fit(points: Sequence[tuple[float, float, float]]) -> Link:
    """Return the link whose relative errors have the least sum of squares.

    Args:
        points: (messages, bytes, seconds) of measured calls; at least two sizes, or alpha is 0.

    Raises:
        ValueError: no point.
    """
    if not points:
        raise ValueError("no measured collective to fit a link to")
    rows = [(messages / seconds, size / seconds) for messages, size, seconds in points]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        alpha, per_byte = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if alpha > 0 and per_byte > 0:
            return Link(alpha, 1 / per_byte)
    return Link(0.0, bb / b)


COLLECTIVES = {"all-reduce": all_reduce, "reduce-scatter": reduce_scatter, "all-to-all": all_to_all}


def fitted(rows: Sequence[dict[str, Any]]) -> dict[str, Link]:
    """Return the links inside a node, by collective, from the ``collectives`` of a run on one node."""
    links = {}
    for name, traffic in COLLECTIVES.items():
        points = []
        for row in rows:
            if row["name"] == name:
                call = traffic(WIRE * row["elements"], row["ranks"], row["ranks"])
                points.append((call.inside_messages, call.inside_bytes, row["seconds"]["median"]))
        links[name] = fit(points)
    return links


def merge_speed(rows: Sequence[dict[str, Any]]) -> float:
    """Return bytes per second of the moments' kernel, from an all-to-all with and without it; or infinity."""
    alone, merged = (
        max((row for row in rows if row["name"] == name), key=lambda row: int(row["elements"]))
        for name in ("all-to-all", "all-to-all and moments")
    )
    difference = merged["seconds"]["median"] - alone["seconds"]["median"]
    moved = _merged_bytes(merged["elements"], merged["ranks"], merged["ranks"], 1)
    return moved / difference if difference > 0 else math.inf
