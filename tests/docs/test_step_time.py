"""The bar chart of the README: drawn from the measured tables, and from nothing else."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHART = runpy.run_path(str(ROOT / "scripts" / "step_time.py"))


def test_the_figure_is_that_of_the_tables() -> None:
    name, measured = CHART["ratios"](CHART["SOURCE"].read_text(encoding="utf-8"))
    assert CHART["FIGURE"].read_text(encoding="utf-8") == CHART["drawing"](name, measured)
    # docs/MEASUREMENTS.md, Findings.
    assert name == "VRLAMB, fused"
    assert measured[1, 1] == [0.67, 0.73, 0.70]
    assert measured[2, 4] == [0.83, 0.93, 0.90, 0.83, 0.91]
    assert measured[3, 4] == [0.79]


def test_other_machines_are_left_out_and_default_arguments_come_first() -> None:
    def row(name: str, ratio: float) -> str:
        return f"| {name} | 1 | 4 | 90.0 | 20.0 | 60.0 | 10.0 | 30.0 | {ratio} | 1.2 | 20.4 | +4.7 |"

    text = "\n".join(["## 2026-11-28 06:34 UTC: 2 x NVIDIA H200", row("VRLAMB, fused", 0.9), row("VRLAMB", 0.8)])
    assert CHART["ratios"](text) == ("VRLAMB", {(1, 4): [0.8]})
    assert CHART["ratios"](text.replace("H200", "H100"))[1] == {}
