"""The doctor's findings, their verdict, and the table for a bug report."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ds_vrgd.optim.optimizer import FEW_CHUNKS

EXACT, NOT_EXACT, REFUSED = 0, 1, 2

#: |theta - theta_ref| / |theta_ref|: of fp32 weights, and of fp32 masters given half-precision chunks.
OF_WEIGHTS = 8e-7
#: |theta - theta_ref| / |theta_ref - theta_0|, where DeepSpeed's rounding of the mean, or of the average, is inherited.
OF_DISTANCE = 5e-3
#: Weights that moved less than this, relative to their norm, show little: an error of a thousandth would hide.
VISIBLE = 1e-3
#: Largest difference between a chunk gradient and a plain model's, relative to its norm, by dtype: DeepSpeed's own
#: backward passes (the linear layers of stage 3) sum in another order, and stage 3 gathers autocast weights in half
#: precision.
ROUNDING = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}

Row = tuple[str, str]


@dataclass
class Outcome:
    """The rows of the table, the command's exit status, and the numbers in the rows, if any were found."""

    rows: list[Row]
    status: int
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Findings:
    """The findings of one run; complete on rank 0."""

    stage: int
    dtype: str  # of the model's weights in the engine
    wrapper: str  # DeepSpeed's class around the optimizer
    mode: str  # fused, observe or off
    why: str  # what decided on the mode
    ranks: int
    micro_batches: int  # of a rank in a step; k is their number times ranks
    clip: float  # DeepSpeed's limit of the gradient's norm; 0 for none
    layers: int
    reduced: int | None  # layers that have GSNR
    trusted: int | None  # layers that have a trust ratio; None: the optimizer has none
    steps: int = 0  # taken
    skipped: int = 0  # left out because a gradient was not finite
    raised: int = 0  # steps among those taken whose learning rate was raised until the weights moved visibly
    error: float = float("nan")  # of the weights after the last step, norm-wise
    moved: float = float("nan")  # the distance that the reference's weights moved, relative to their norm
    worst: tuple[str, float] = ("", float("nan"))  # the layer with the largest part in the error, and that part
    apart: float = 0.0  # largest difference between the engine's gradient of a chunk and the plain model's, by norm
    rounding: float = 0.0  # limit of ``apart``, given the dtype that both compute in
    repeats: bool = False  # whether the plain model gave the same gradients for the same batch twice
    follows: bool = False  # whether the model's weights are the rounded masters
    coarse: str | None = None  # why the error is held to OF_DISTANCE of the distance; None if to OF_WEIGHTS
    state: dict[str, float] = field(default_factory=dict)  # bytes for each element of this rank's shards, by state key
    moments: tuple[float, float] = (0.0, 0.0)  # bytes for each element of the shards: before a step, and between steps
    buffers: int = 0  # bytes of exchange buffers on this rank
    sent: tuple[int, int] = (0, 0)  # bytes that this rank sends for moments: per micro-batch, once more per step

    @property
    def numbers(self) -> dict[str, Any]:
        """Return the attributes, and the limit of the error; None for what is not a number."""
        found = dataclasses.asdict(self) | {"tolerance": self.tolerance}
        return {name: None if value != value else value for name, value in found.items()}

    @property
    def tolerance(self) -> float:
        """Return the limit of ``error``."""
        return OF_WEIGHTS if self.coarse is None else OF_DISTANCE * self.moved

    @property
    def faults(self) -> list[str]:
        """Return why this is not exact; empty if it is."""
        found = []
        if not self.moved >= VISIBLE:  # NaN is not visible either
            found.append(f"the weights moved by {self.moved:.1e} of their norm, too little to show anything")
        if not self.error <= self.tolerance:
            found.append(f"the error {self.error:.1e} is above {self.tolerance:.1e}, most of it in {self.worst[0]}")
        if not self.apart <= self.rounding:
            found.append(f"the engine's gradient of a chunk is not the plain model's: they are {self.apart:.1e} apart")
            if not self.repeats:
                found.append("nor does the plain model give the same gradient twice for the same batch and seed")
        if not self.follows:
            found.append("the model's weights are not the optimizer's, rounded")
        return found


def rows_of(found: Findings) -> list[Row]:
    """Return what was found as rows, with the verdict in the last one."""
    k = found.ranks * found.micro_batches
    layers = f"{found.layers} found, {found.reduced or 0} with GSNR"
    if found.trusted is not None:
        layers += f", {found.trusted} with a trust ratio (biases and norms have none here)"
    steps = f"{found.steps - found.raised}, {found.skipped} skipped by DeepSpeed"
    if found.raised:
        steps += f"; {found.raised} more with a raised learning rate, for the weights had not moved visibly"
    chunks = "bit for bit those of a plain model"
    if found.apart:
        chunks = f"within {found.apart:.1e} of those of a plain model, by norm; at most {found.rounding:.0e}"
    error = f"{found.error:.1e} of the weights' norm, at most {found.tolerance:.1e}"
    if found.coarse:
        error += f" (5e-3 of the distance moved: {found.coarse})"
    state = " + ".join(f"{key} {size:.1f}" for key, size in found.state.items())
    state = f"{state} = {sum(found.state.values()):.1f}" if state else "0"
    rows = [
        ("ZeRO", f"stage {found.stage}, {found.dtype}"),
        ("wrapper", "none: the optimizer has the model's own parameters" if found.wrapper == "none" else found.wrapper),
        ("mode", f"{found.mode}: {found.why}"),
        ("k", f"{k} = {found.ranks} ranks x {found.micro_batches} micro-batches"),
        ("gradient clipping", str(found.clip) if found.clip else "off"),
        ("layers", layers),
        ("steps", f"{steps}; the weights moved by {found.moved:.1e} of their norm"),
        ("chunk gradients", chunks),
        ("error", f"{error}; most of it in {found.worst[0]} ({found.worst[1]:.1e})"),
        ("optimizer state", f"{state} bytes per element of the shard"),
    ]
    if found.mode != "off":
        (before, between), (sent, once) = found.moments, found.sent
        reduction = "in place of" if found.mode == "fused" else "in addition to"
        rows += [
            ("moments", f"{before:.1f} bytes per element of the shard before a step, {between:.1f} between steps"),
            ("exchange buffers", f"{found.buffers:,} bytes per rank"),
            ("sent for moments", f"{sent:,} bytes per rank and micro-batch, {reduction} DeepSpeed's reduction"),
        ]
        if once:
            rows.append(("", f"{once:,} bytes more per rank and step"))
        if found.reduced is not None and k < FEW_CHUNKS:
            rows.append(("warning", f"k = {k} in this check; the paper found 32 to 256 best"))
        if found.reduced == 0:
            rows.append(("warning", "no layer has GSNR"))
    if found.trusted == 0:
        none = "no layer has a trust ratio: adapt is false everywhere, or all layers are one-dimensional"
        rows.append(("warning", none))
    return rows + ([("NOT EXACT", fault) for fault in found.faults] or [("verdict", "exact")])


def to_json(outcome: Outcome) -> str:
    """Return the outcome as JSON: the exit status, the texts of the table by their heading, and the numbers."""
    table: dict[str, list[str]] = {}
    for heading, text in outcome.rows:
        table.setdefault(heading, []).append(text)
    return json.dumps({"exit_status": outcome.status, "table": table, "numbers": outcome.numbers}, indent=2)


def render(rows: Sequence[Row]) -> str:
    """Return a Markdown table."""
    cells = [(key, value.replace("|", "\\|").replace("\n", " ")) for key, value in rows]
    width = max(len(key) for key, _ in cells)
    lines = [f"| {key:<{width}} | {value} |" for key, value in cells]
    return "\n".join([f"| {'':<{width}} | |", f"| {'-' * width} | --- |", *lines])
