"""The doctor's findings as a table for a bug report."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vrgd.doctor.findings import Findings
from ds_vrgd.optim.base import FEW_CHUNKS

Row = tuple[str, str]


def rows_of(found: Findings) -> list[Row]:
    """What was seen, and the verdict in the last row."""
    beside = "in place of" if found.mode == "fused" else "beside"
    wrapper = {"none": "none: the optimizer has the model's own parameters"}.get(found.wrapper, found.wrapper)
    rows = [
        ("ZeRO", f"stage {found.stage}, {found.dtype}"),
        ("wrapper", wrapper),
        ("mode", f"{found.mode}: {found.why}"),
        ("k", f"{found.ranks * found.micro_batches} = {found.ranks} ranks x {found.micro_batches} micro-batches"),
        ("gradient clipping", str(found.clip) if found.clip else "off"),
        ("layers", _layers(found)),
        ("steps", _steps(found)),
        ("chunk gradients", _chunks(found)),
        ("error", _error(found)),
        ("optimizer state", f"{_state(found)} bytes an element of the shard"),
    ]
    if found.mode != "off":
        before, between = found.moments
        rows += [
            ("moments", f"{before:.1f} bytes an element of the shard before a step, {between:.1f} between steps"),
            ("exchange buffers", f"{found.buffers:,} bytes a rank"),
            ("sent for moments", f"{found.sent[0]:,} bytes a rank in a micro-batch, {beside} DeepSpeed's reduction"),
        ]
        if found.sent[1]:
            rows.append(("", f"{found.sent[1]:,} bytes a rank more in a step"))
    rows += [("warning", text) for text in _warnings(found)]
    return rows + ([("NOT EXACT", fault) for fault in found.faults] or [("verdict", "exact")])


def _layers(found: Findings) -> str:
    parts = [f"{found.layers} found", f"{found.reduced} with GSNR"]
    if found.trusted is not None:
        parts.append(f"{found.trusted} with a trust ratio (biases and norms have none here)")
    return ", ".join(parts)


def _steps(found: Findings) -> str:
    text = f"{found.steps - found.raised}, {found.skipped} skipped by DeepSpeed"
    if found.raised:
        text += f"; {found.raised} more with a raised learning rate, for the weights had not moved visibly"
    return f"{text}; the weights moved by {found.moved:.1e} of their norm"


def _chunks(found: Findings) -> str:
    if found.apart == 0:
        return "bit for bit those of a plain model"
    return f"within {found.apart:.1e} of those of a plain model, by norm; at most {found.rounding:.0e}"


def _error(found: Findings) -> str:
    name, part = found.worst
    text = f"{found.error:.1e} of the weights' norm, at most {found.tolerance:.1e}"
    if found.coarse:
        text += f" (5e-3 of the way: {found.coarse})"
    return f"{text}; most of it in {name} ({part:.1e})"


def _state(found: Findings) -> str:
    if not found.state:
        return "0"
    parts = " + ".join(f"{key} {size:.1f}" for key, size in found.state.items())
    return f"{parts} = {sum(found.state.values()):.1f}"


def _warnings(found: Findings) -> list[str]:
    k, warnings = found.ranks * found.micro_batches, []
    if found.mode != "off" and k < FEW_CHUNKS:
        warnings.append(f"k = {k} in this check; the paper found 32 to 256 best")
    if found.mode != "off" and not found.reduced:
        warnings.append("no layer has GSNR")
    if found.trusted == 0:
        warnings.append("no layer has a trust ratio: adapt is false everywhere, or all layers are one-dimensional")
    return warnings


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    cells = [(key, value.replace("|", "\\|").replace("\n", " ")) for key, value in rows]
    width = max(len(key) for key, _ in cells)
    lines = [f"| {key:<{width}} | {value} |" for key, value in cells]
    return "\n".join([f"| {'':<{width}} | |", f"| {'-' * width} | --- |", *lines])
