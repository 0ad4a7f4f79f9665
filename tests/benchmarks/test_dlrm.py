"""The DLRM experiment on a handful of rows: what it trains, what it says of the ratio, which rate it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ds_vrgd.doctor import reference
from ds_vrgd_recipes.clicks.prepared import WORDS
from evidence import dlrm

pytestmark = pytest.mark.slow

SIZES = [40, *[4] * 25]
SMALLEST = replace(dlrm.settings("small")[0], batch=64, chunks=8, embedding_dim=4, bottom_mlp=(16, 4), top_mlp=(16,))


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """512 rows for training and as many for the test; the label says whether the first number is above a half."""
    rng = np.random.default_rng(0)
    records = np.empty((1024, WORDS), dtype=np.int32)
    dense = rng.random((1024, 13), dtype=np.float32)
    records[:, 1:14] = dense.view(np.int32)
    records[:, 14:] = np.stack([rng.integers(size, size=1024) for size in SIZES], axis=1)
    records[:, 0] = dense[:, 0] > 0.5
    train, test = torch.from_numpy(records).split(512)
    monkeypatch.setattr(dlrm, "_data", lambda: (SIZES, train, test))
    return train


@pytest.mark.parametrize(
    "optimizer, rate, least",
    [(dlrm.SGD, 0.2, 0.9), (dlrm.VRSGD, 0.2, 0.9), (dlrm.VRSGD_MLPS, 0.2, 0.9), (dlrm.LOGISTIC, 0.02, 0.7)],
)
def test_every_contender_learns(optimizer: str, rate: float, least: float) -> None:
    row = dlrm.measure(replace(SMALLEST, optimizer=optimizer, rate=rate, epochs=20))
    assert row["steps"] == 20 * 512 // 64
    assert row["test_auc"] > least
    assert row["base_loss"] == pytest.approx(np.log(2), abs=0.01)
    assert ("table_ratio" in row) == (optimizer == dlrm.VRSGD)


def test_a_run_that_comes_apart_is_at_chance() -> None:
    row = dlrm.measure(replace(SMALLEST, optimizer=dlrm.SGD, rate=1e30))
    assert np.isnan(row["test_loss"])
    assert row["validation_auc"] == row["test_auc"] == 0.5


def test_a_setting_repeats_itself_and_a_seed_changes_it() -> None:
    setting = replace(SMALLEST, optimizer=dlrm.VRSGD)
    assert dlrm.measure(setting) == dlrm.measure(setting) != dlrm.measure(replace(setting, seed=1))


def test_the_ratios_are_those_of_the_float64_reference(rows: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = dlrm.DLRM(SIZES, 2, [4, 2], [4]).double()
    batch = rows[rows[:, 14] < 10][:64]  # 30 of 40 rows of the first table are not touched
    found = dlrm._ratios(model, batch, 8)
    touched, seen = 0, {"table": [], "mlp": []}
    for name, weight in model.named_parameters():
        chunks = [torch.autograd.grad(dlrm._loss(model, chunk), weight)[0] for chunk in batch.chunk(8)]
        ratio = reference.gsnr_ratio(chunks, gamma=0.1, gsnr_eps=1e-6)
        there = torch.stack(chunks).abs().sum(0) > 0
        if name.startswith("tables"):
            there = there.any(1, keepdim=True).expand_as(there)
            touched += int(there[:, 0].sum())
        seen["table" if name.startswith("tables") else "mlp"].append(ratio[there])
    assert found["zero_rows"] == pytest.approx(1 - touched / sum(SIZES))
    assert found["zero_rows"] >= 30 / sum(SIZES)
    for part, ratios in seen.items():
        together = torch.cat(ratios)
        assert found[f"{part}_ratio"] == pytest.approx(together.mean().item())
        assert found[f"{part}_ones"] == pytest.approx((together == 1).double().mean().item())


def test_the_rate_is_chosen_by_the_validation_half_and_by_all_seeds() -> None:
    def row(rate: float, seed: int, validation: float, test: float) -> dict[str, Any]:
        return {"rate": rate, "seed": seed, "validation_auc": validation, "test_auc": test}

    low = [row(1.0, seed, 0.7, 0.9) for seed in range(3)]
    high = [row(2.0, seed, auc, 0.6) for seed, auc in enumerate((0.1, 0.8, 0.9))]
    lucky = [row(4.0, 0, 0.99, 0.99)]
    assert dlrm.best([*low, *high, *lucky]) == high


def test_tables_and_figure_of_all_settings(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    results = {"steps": 1, "validation_auc": 0.7, "test_auc": 0.7, "test_loss": 0.5, "base_loss": 0.6}
    ratios = dict.fromkeys(("zero_rows", "table_ratio", "table_ones", "mlp_ratio", "mlp_ones"), 0.5)
    rows = [{**vars(setting), **results, **ratios} for setting in dlrm.settings("full")]
    lines = dlrm.tables(rows)
    row = "| 4,096 | 1 | VRSGD | 0.5 of 0.5, 1, 2, 4, 8 | 0.7000 (0.7000–0.7000) | 0.5000 (0.5000–0.5000) |"
    assert f"{row} 512k: 0.8013 |" in lines
    figure = Figure()
    dlrm.draw(figure, rows)
    assert len(figure.axes) == 5
