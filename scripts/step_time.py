"""Draw docs/figures/step_time.svg: the step of BERT-large with VRLAMB, relative to torch's fused AdamW.

    python scripts/step_time.py

The figures are those of docs/MEASUREMENTS.md: every run of BERT-large on two H200 with VRLAMB's default arguments, and
one ratio per run, to AdamW in the same engine.
"""

from __future__ import annotations

import re
import statistics
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, FIGURE = ROOT / "docs" / "MEASUREMENTS.md", ROOT / "docs" / "figures" / "step_time.svg"
RUN = re.compile(r"^## \S+ \S+ UTC: 2 x NVIDIA H200$")
#: The rows that are drawn, by their name in the tables, and what a bar calls their engine; {} is the ZeRO stage.
ENGINES = {
    "VRLAMB": "ZeRO-{}",
    "FSDP2, VRLAMB": "FSDP2",
    "FSDP2 without resharding, VRLAMB": "FSDP2 without resharding",
    "DDP, VRLAMB": "DDP",
}
LARGEST = 1.35

Ratios = dict[tuple[str, int], list[float]]


def ratios(text: str) -> Ratios:
    """Return, by engine and accumulation, the ratio to AdamW in every run."""
    found: Ratios = defaultdict(list)
    counts = False
    for line in text.splitlines():
        if line.startswith("## "):
            counts = bool(RUN.match(line))
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if counts and len(cells) == 12 and cells[0] in ENGINES and cells[8] not in ("–", "failed"):
            found[ENGINES[cells[0]].format(cells[1]), int(cells[2])].append(float(cells[8]))
    order = [engine.format(stage) for engine in ENGINES.values() for stage in range(4)]
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def drawing(measured: Ratios) -> str:
    """Return the SVG. Its greys are legible on white and on black pages."""
    left, width, height, gap = 322, 320, 20, 28
    top = 62
    bottom = top + gap * (len(measured) + 1)

    def x(ratio: float) -> float:
        return round(left + width * ratio / LARGEST, 1)

    def text(at: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
        return f'<text x="{at}" y="{y}" text-anchor="{anchor}"{more}>{words}</text>'

    def bar(y: float, ratio: float, colour: str) -> str:
        return f'<rect x="{left}" y="{y}" width="{round(x(ratio) - left, 1)}" height="{height}" fill="{colour}"/>'

    title = "A training step with VRLAMB, relative to AdamW in the same engine: less is faster"
    setting = "BERT-large, bf16, two H200; 128 sequences of 128 tokens per micro-batch and rank; default arguments"
    parts = [
        text(12, 22, title, more=' font-size="15"'),
        text(12, 42, setting),
        bar(top, 1, "#8c8c8c"),
        text(left - 10, top + 15, "torch's fused AdamW", "end"),
        text(x(LARGEST), top + 15, "1.00"),
    ]
    for row, ((engine, accumulation), values) in enumerate(measured.items(), start=1):
        y = top + gap * row
        low, middle, high = min(values), statistics.median(values), max(values)
        batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
        runs = f"{len(values)} runs" if len(values) > 1 else "1 run"
        parts += [
            text(left - 10, y + 15, f"{engine}, {batches}", "end"),
            bar(y, middle, "#1f8a70"),
            f'<path d="M{x(low)} {y + 10}H{x(high)}" stroke="#d9822b" stroke-width="3"/>',
            text(x(LARGEST), y + 15, f"{middle:.2f} ({runs})"),
        ]
    parts += [
        f'<path d="M{x(1)} {top}V{bottom - 6}" stroke="#8c8c8c" stroke-dasharray="3 3"/>',
        text(12, bottom + 14, "Bar: the median over the runs. Line: from the fastest run to the slowest."),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {bottom + 26}" width="760" '
            'font-family="sans-serif" font-size="13" fill="#7a7a7a" role="img" '
            'aria-label="Bar chart: time of a training step relative to AdamW">',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    FIGURE.write_text(drawing(ratios(SOURCE.read_text(encoding="utf-8"))), encoding="utf-8")
    print(FIGURE.relative_to(ROOT))
