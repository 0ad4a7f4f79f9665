"""What the BERT runs say: a table by batch and optimizer, and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from benchmarks.pages import table
from evidence.experiment import Row
from evidence.report import draw_spreads, grouped, spread
from evidence.tuning import best

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {"LAMB": "C0", "VRLAMB": "C1", "AdamW": "C2", "VRAdamW": "C3"}


def worth(row: Row) -> float:
    """By which a rate is chosen: the less the final loss, the more; one that came apart is worse than any."""
    return -row["final"] if math.isfinite(row["final"]) else -math.inf


def _median(rows: Sequence[Row]) -> float:
    """Of the final losses."""
    return -statistics.median(map(worth, rows))


def _learned(rows: Sequence[Row]) -> str:
    """Median of the first evaluated update at which the loss lies below the entropy of who ignores context."""
    first = [next((one[0] for one in row["evaluations"] if one[1] < row["entropy"]), math.inf) for row in rows]
    median = statistics.median(first)
    return "never" if median == math.inf else f"{median:g}"


def _updates_to(target: float, row: Row) -> float:
    """The update at which a run's held-out loss falls to ``target``, between two evaluations on a straight line."""
    before, above = 0.0, math.inf
    for update, loss, *_ in row["evaluations"]:
        if loss <= target:
            share = (above - target) / (above - loss) if math.isfinite(above) else 1.0
            return float(before + share * (update - before))
        before, above = update, loss
    return math.inf


def _best(rows: Sequence[Row]) -> tuple[float, list[Row]]:
    return best(sorted(rows, key=lambda row: row["rate"]), "rate", worth)


def tables(rows: Sequence[Row]) -> list[str]:
    """For each text a line for each batch and optimizer: its best rate, and all rates."""
    lines: list[str] = []
    for (model, text, examples), of_model in grouped(rows, "model", "text", "examples").items():
        if examples == 0:
            f1 = spread([row["cloze_f1"] for row in of_model if "cloze_f1" in row], 1)
            lines += [f"BERT-{model} with random weights, fine-tuned on the questions ({text}): F1 {f1}.", ""]
            continue
        cells: dict[tuple[int, str], list[str]] = {}
        for (batch,), of_batch in grouped(of_model, "batch").items():
            chosen = {name: _best(runs) for (name,), runs in grouped(of_batch, "optimizer").items()}
            target = max(_median(runs) for _, runs in chosen.values())
            for name, (rate, runs) in chosen.items():
                tried = sorted(grouped([row for row in of_batch if row["optimizer"] == name], "rate").items())
                steps = statistics.median(_updates_to(target, row) for row in runs)
                answered = [row["cloze_f1"] for row in runs if "cloze_f1" in row]
                cells[batch, name] = [
                    str(batch),
                    name,
                    str(batch // runs[0]["micro_batch"]),
                    str(runs[0]["updates"]),
                    f"{rate:g}",
                    spread([row["final"] for row in runs]),
                    str(len(runs)),
                    _learned(runs),
                    "never" if steps == math.inf else f"{steps:.0f} ({target:.3f})",
                    spread(answered, 1) if answered else "",
                    "; ".join(f"{each:g}: {_median(of):.3f}" for (each,), of in tried),
                ]
        header = ["batch", "optimizer", "k", "updates", "best rate", "its held-out loss", "seeds"]
        header += ["update below the entropy", "updates to the loss that all reach", "cloze F1", "median loss by rate"]
        entropy = of_model[0]["entropy"]
        head = f"BERT-{model} on {text}, {examples:,} examples; nats per masked token, unigram entropy {entropy:.3f}:"
        lines += [head, "", *table(header, [cells[place] for place in sorted(cells)]), ""]
    return lines[:-1]


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """Loss against rate, of the two longest sweeps at their best batch; against batch where most batches were."""
    sweeps = grouped([row for row in rows if row["updates"]], "model", "text", "examples").values()
    axes = figure.subplots(1, 3)
    for axis, members in zip(axes, sorted(sweeps, key=len, reverse=True)[:2], strict=False):
        best_batch = min(grouped(members, "batch").values(), key=lambda of: _median(_best(of)[1]))
        for (optimizer,), of in grouped(best_batch, "optimizer").items():
            rates = sorted(grouped(of, "rate").items())
            _line(axis, [rate for (rate,), _ in rates], [runs for _, runs in rates], optimizer)
        title = f"BERT-{members[0]['model']}, batch {best_batch[0]['batch']:,}"
        axis.set(xlabel="peak learning rate", xscale="log", title=title)
        axis.axhline(members[0]["entropy"], color="grey", linestyle=":", label="ignores context")
    widest = max(sweeps, key=lambda members: len(grouped(members, "batch")))
    for (optimizer,), of in grouped(widest, "optimizer").items():
        batches = sorted(grouped(of, "batch").items())
        _line(axes[2], [batch for (batch,), _ in batches], [_best(runs)[1] for _, runs in batches], optimizer)
    title = f"BERT-{widest[0]['model']}, each at its best rate"
    axes[2].set(xlabel="batch, sequences", xscale="log", title=title)
    places = sorted({row["batch"] for row in widest})
    axes[2].set_xticks(places, [f"{batch:,}" for batch in places], rotation=30)
    axes[2].minorticks_off()
    axes[2].axhline(widest[0]["entropy"], color="grey", linestyle=":", label="ignores context")
    axes[0].set_ylabel("held-out masked-LM loss, nats per token\nmedian, range of seeds")
    for axis in axes:
        if axis.has_data():
            axis.legend(fontsize=7)
        else:
            axis.set_axis_off()  # there is one sweep


def _line(axis: Axes, places: Sequence[float], groups: Sequence[Sequence[Row]], optimizer: str) -> None:
    finals = [[row["final"] if math.isfinite(row["final"]) else math.nan for row in runs] for runs in groups]
    style = "--" if optimizer in ("LAMB", "AdamW") else "-"
    draw_spreads(axis, places, finals, label=optimizer, color=COLORS[optimizer], linestyle=style)
