"""The bar chart of the README: drawn from the measured tables, and from nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = runpy.run_path(str(ROOT / "scripts" / "step_time.py"))


def test_the_figure_is_that_of_the_tables() -> None:
    measured = CHART["ratios"](CHART["SOURCE"].read_text(encoding="utf-8"))
    assert CHART["FIGURE"].read_text(encoding="utf-8") == CHART["drawing"](measured)
    # docs/RESULTS.md, the cost of a step.
    assert measured["ZeRO-1", 1] == [0.83]
    assert measured["ZeRO-2", 4] == [0.93, 0.94]
    assert measured["FSDP2", 1] == [1.27, 1.16]
    assert measured["DDP", 4] == [1.11, 1.1]


def test_other_machines_and_other_arguments_are_left_out() -> None:
    def row(name: str, ratio: float, stage: str = "1") -> str:
        return f"| {name} | {stage} | 4 | 90.0 | 20.0 | 60.0 | 10.0 | 30.0 | {ratio} | 1.2 | 20.4 | +4.7 |"

    rows = [row("VRLAMB, fused", 0.9), row("VRLAMB", 0.8), row("FSDP2, VRLAMB", 1.1, "–")]
    text = "\n".join(["## 2026-11-28 06:34 UTC: 2 x NVIDIA H200", *rows])
    assert CHART["ratios"](text) == {("ZeRO-1", 4): [0.8], ("FSDP2", 4): [1.1]}
    assert CHART["ratios"](text.replace("H200", "H100")) == {}
