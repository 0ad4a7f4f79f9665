"""Logs of runs that never were: with the noise of a gradient whose noise scale is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

# Of pure noise for k = 8 and gamma = 0.1, rounded.
NOISE = {"noise_low": 0.281, "noise_high": 0.275}
NAMES = [f"encoder.layer.{number}.weight" for number in range(12)]


def noisy(rng: np.random.Generator, scale: float, batch: int, dimensions: int = 400) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 as one update of ``batch`` samples measures them, where the trace is 1."""
    signal, k = 1.0 / scale, 8
    variance = 1.0 / dimensions / batch
    square = (signal**0.5 + variance**0.5 * rng.standard_normal()) ** 2 + variance * rng.chisquare(dimensions - 1)
    trace = rng.chisquare(dimensions * (k - 1)) / (dimensions * (k - 1))
    return trace, square - trace / batch


def updates(
    count: int,
    scale: float | list[float],
    *,
    batch: int = 64,
    lr: float = 0.02,
    warmup: int = 10,
    first: int = 1,
    phase: int = 1,
    seed: int = 0,
    clamped: dict[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Records of updates: the rate rises to ``lr`` and falls from there. ``clamped`` replaces an old log's shares."""
    rng = np.random.default_rng(seed)
    scales = scale if isinstance(scale, list) else [scale] * count
    records = []
    for place in range(count):
        trace, signal = noisy(rng, scales[place], batch)
        rate = lr * min((place + 1) / max(warmup, 1), 1.0 - max(place - warmup + 1, 0) / (2 * count))
        records.append(
            {
                "step": first + place,
                "phase": phase,
                "loss": 3.0 * 0.99**place + 0.1,
                "lr": rate,
                "sequences_per_second": 200.0,
                "skipped": False,
                "gsnr": {
                    "k": 8, "mean_ratio": 0.3, "clamped_low": 0.2, "clamped_high": 0.1, "batch": batch,
                    "noise_trace": trace, "noise_signal": signal, **(clamped or {}),
                },
            }
        )  # fmt: skip
    return records


def layers(step: int) -> dict[str, Any]:
    values = [10.0 ** (step % 3 - number / 6) for number in range(len(NAMES))]
    return {"step": step, "layers": {"gsnr": values, "trace": values, "signal": values}}


def write(folder: Path, *records: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return folder
