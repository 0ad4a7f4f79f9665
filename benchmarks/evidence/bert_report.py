"""What the BERT runs say: a table by batch and optimizer, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.evidence.experiment import Row
from benchmarks.evidence.report import grouped, spread
from benchmarks.pages import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {"LAMB": "C0", "VRLAMB": "C1", "AdamW": "C2", "VRAdamW": "C3"}


def _median(rows: Sequence[Row]) -> float:
    """Of the final losses; a run that came apart is worse than any."""
    return statistics.median(row["final"] if math.isfinite(row["final"]) else math.inf for row in rows)


def _learned(rows: Sequence[Row]) -> str:
    """Median of the first evaluated update at which the loss lies below the entropy of who ignores context."""
    first = [next((one[0] for one in row["evaluations"] if one[1] < row["entropy"]), math.inf) for row in rows]
    median = statistics.median(first)
    return "never" if median == math.inf else f"{median:g}"


def tables(rows: Sequence[Row]) -> list[str]:
    """A line for each number of examples, batch and optimizer: its best rate, and all rates."""
    lines = []
    for (model, examples), of_model in grouped(rows, "model", "examples").items():
        body = []
        for (batch, optimizer), members in sorted(grouped(of_model, "batch", "optimizer").items()):
            by_rate = dict(sorted(grouped(members, "rate").items()))
            (best,) = min(by_rate, key=lambda rate: _median(by_rate[rate]))
            runs = by_rate[(best,)]
            rates = "; ".join(f"{rate:g}: {_median(of):.3f}" for (rate,), of in by_rate.items())
            k = batch // runs[0]["micro_batch"]
            cells = [str(batch), optimizer, str(k), str(runs[0]["updates"]), f"{best:g}"]
            body.append([*cells, spread([row["final"] for row in runs]), str(len(runs)), _learned(runs), rates])
        header = ["batch", "optimizer", "k", "updates", "best rate", "its held-out loss", "seeds"]
        header += ["update below the entropy", "median loss by rate"]
        entropy = of_model[0]["entropy"]
        lines += [f"BERT-{model}, {examples:,} examples; nats per masked token, unigram entropy {entropy:.3f}:", ""]
        lines += table(header, body)
    return lines


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Loss against rate for two batches, and at the best rate against batch; of the larger number of examples."""
    most = max(row["examples"] for row in rows)
    shown = [row for row in rows if row["examples"] == most]
    batches = [
        batch for (batch,) in sorted(grouped(shown, "batch"), key=lambda one: -len(grouped(shown, "batch")[one]))
    ]
    axes = figure.subplots(1, 3, sharey=True)
    for axis, batch in zip(axes[:2], sorted(batches[:2]), strict=False):
        for (optimizer,), of in grouped([row for row in shown if row["batch"] == batch], "optimizer").items():
            by_rate = sorted(grouped(of, "rate").items())
            _line(axis, [rate for (rate,), _ in by_rate], [runs for _, runs in by_rate], optimizer)
        axis.set(xlabel="peak learning rate", xscale="log", title=f"batch {batch:,}")
    for (optimizer,), of in grouped(shown, "optimizer").items():
        by_batch = sorted(grouped(of, "batch").items())
        best = [min(grouped(runs, "rate").values(), key=_median) for _, runs in by_batch]
        _line(axes[2], [batch for (batch,), _ in by_batch], best, optimizer)
    axes[2].set(xlabel="batch, sequences", xscale="log", title="each at its best rate")
    axes[0].set_ylabel("held-out masked-LM loss, nats per token")
    for axis in axes:
        axis.axhline(shown[0]["entropy"], color="grey", linestyle=":", label="ignores context")
        axis.legend(fontsize=7)


def _line(axis: object, places: Sequence[float], groups: Sequence[Sequence[Row]], optimizer: str) -> None:
    finals = [[row["final"] if math.isfinite(row["final"]) else math.nan for row in runs] for runs in groups]
    medians = [statistics.median(of) for of in finals]
    low = [median - min(of) for median, of in zip(medians, finals, strict=True)]
    high = [max(of) - median for median, of in zip(medians, finals, strict=True)]
    style = "--" if optimizer in ("LAMB", "AdamW") else "-"
    axis.errorbar(  # type: ignore[attr-defined]
        places, medians, [low, high], label=optimizer, color=COLORS[optimizer], linestyle=style, marker="o", capsize=2
    )
