"""Small files in the Criteo format, and a run file over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def lines(rows: int, seed: int, values: int = 40) -> list[str]:
    """Lines whose label follows from the first category and the first integer; a tenth of all fields is empty."""
    rng = np.random.default_rng(seed)
    effects = np.random.default_rng(0).normal(size=values) * 2
    out = []
    for _ in range(rows):
        dense = rng.integers(0, 50, size=13)
        categories = rng.integers(values, size=26)
        logit = effects[categories[0]] + np.log1p(dense[0]) - 3
        label = int(rng.random() < 1 / (1 + np.exp(-logit)))
        fields = [*map(str, dense), *(f"{(column << 16) + int(value):08x}" for column, value in enumerate(categories))]
        kept = [field if place in (0, 13) or rng.random() > 0.1 else "" for place, field in enumerate(fields)]
        out.append("\t".join([str(label), *kept]))
    return out


def write_files(folder: Path, train_rows: int = 600, test_rows: int = 200) -> tuple[Path, Path]:
    """A training and a test file."""
    paths = folder / "day_0", folder / "day_1"
    for path, rows, seed in zip(paths, (train_rows, test_rows), (1, 2), strict=True):
        path.write_text("".join(line + "\n" for line in lines(rows, seed)), encoding="ascii")
    return paths


def run_settings(train: Path, test: Path, /, **changes: Any) -> dict[str, Any]:
    """A complete run file: two epochs of 512 rows, 8 updates of 8 chunks of 16 rows."""
    settings: dict[str, Any] = {
        "seed": 3,
        "model": {"embedding_dim": 4, "bottom_mlp": [8, 4], "top_mlp": [8]},
        "data": {"source": "files", "train": [str(train)], "test": [str(test)], "hash_slots": 4096},
        "epochs": 2,
        "global_batch": 128,
        "micro_batch": 16,
        "lr": 1.0,
        "warmup_ratio": 0.25,
        "checkpoint_every": 3,
    }
    return settings | changes
