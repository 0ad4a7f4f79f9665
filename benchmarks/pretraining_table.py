"""The tables of a run of ``benchmarks.pretraining``: its ways side by side, and what the GPU does in a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.pages import table

Row = dict[str, Any]

PLAIN = "plain"
WAYS = {PLAIN: "transformers", "packed": "packed", "compiled": "packed and compiled"}
#: Kinds of kernels by what their names hold, the first that fits.
KINDS = {
    "attention": ("sdpa", "flash", "dot_do_o", "convert_dq"),
    "matrix products": ("nvjet", "gemm", "splitkreduce", "cutlass"),
    "GELU": ("gelu",),
    "dropout, residuals, layer norm": ("norm", "dropout", "gammabeta", "maske", "fused_add"),
    "moments and update of VRLAMB": ("_merge", "_ratio_sums", "_sum_blocks", "_advance", "_apply", "multi_tensor"),
    "other": ("",),
}


def lines(rows: Sequence[Row]) -> list[str]:
    """Return Markdown lines of all rows."""
    plain = {row["sequence_length"]: row["sequences_per_second"]["median"] for row in rows if row["way"] == PLAIN}
    body, kernels = [], []
    for row in rows:
        speed, length = row["sequences_per_second"], row["sequence_length"]
        body.append(
            [
                WAYS[row["way"]],
                str(length),
                f"{row['micro_batch']} x {row['accumulation']}",
                f"{speed['median']:,.0f} ({speed['p10']:,.0f}–{speed['p90']:,.0f})",
                f"{speed['median'] / plain[length]:.2f}" if length in plain else "–",
                f"{speed['median'] * length * row['real_tokens']:,.0f}",
                f"{row['waited_for_data']['median'] * 1e3:.1f}",
                f"{row['first_step_seconds']:.1f}",
                f"{row['peak_bytes'] / 1e9:.1f}" if row["peak_bytes"] else "–",
                f"{row['loss']:.4f}",
            ]
        )
        if row["kernels"]:
            kernels.append([WAYS[row["way"]], str(length), *_by_kind(row)])
    header = ["", "sequence", "micro-batch x accum.", "sequences/s (10–90 %)", "/ transformers", "tokens/s"]
    header += ["waits for data, ms a step", "first step, s", "peak, GB", "loss"]
    found = ["### Pre-training on real text", "", *table(header, body), ""]
    if kernels:
        found += table(["kernels, ms a step", "sequence", "the step", *KINDS, "too short to be listed"], kernels)
    return found


def _by_kind(row: Row) -> list[str]:
    """Return milliseconds of a whole step, of the kernels of each kind, and of those that the profile does not list."""
    sums = dict.fromkeys(KINDS, 0.0)
    for kernel in row["kernels"]:
        name = kernel["name"].lower()
        sums[next(kind for kind, marks in KINDS.items() if any(mark in name for mark in marks))] += kernel["ms"]
    total = row["kernels"][0]["ms"] / row["kernels"][0]["share"]
    step = row["micro_batch"] * row["accumulation"] / row["sequences_per_second"]["median"] * 1e3
    return [f"{ms:,.0f}" for ms in (step, *sums.values(), total - sum(sums.values()))]
