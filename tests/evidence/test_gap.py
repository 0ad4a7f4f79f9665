"""Equation 5 by hand, steps on data without noise, and trainings whose accuracies are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ds_vrgd import VRLAMB, VRSGD, VRAdam
from evidence import gap
from evidence.gap_report import KINDS, WHICH, best_rate, tables

Images = dict[str, tuple[Tensor, Tensor]]


def given(monkeypatch: pytest.MonkeyPatch, images: Images) -> None:
    monkeypatch.setattr(gap, "data", lambda: images)
    gap.trained.cache_clear()


def test_equation_5_by_hand() -> None:
    """Two chunks with gradients 1 and 3 of one weight: mean 2, variance of the mean 1. Another weight without noise."""
    chunks = torch.tensor([[1.0, 5.0], [3.0, 5.0]], dtype=torch.float64)
    mean = {"a": chunks.mean(0)}
    m2 = {"a": (chunks - chunks.mean(0)).square().sum(0)}
    # SGD changes the loss by 4 and 25. r_1 n is 4 (or, without bias, 4 - 1), and 1 / (r_1 n + 1) of the 4 is lost.
    assert gap.expected(mean, m2, mean, k=2) == pytest.approx(
        {"all": 29.0, "kept": 29.0 - 4 / (4 + 1), "kept_unbiased": 29.0 - 4 / (3 + 1)}
    )
    half = {"a": mean["a"] * torch.tensor([0.5, 1.0])}
    assert gap.expected(mean, m2, half, k=2)["kept_unbiased"] == pytest.approx(27.0 - 2 / (3 + 1))


def test_the_ratio_is_vrsgds() -> None:
    """What scales VRSGD's step, from the same chunks."""
    chunks = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.3
    weight = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = VRSGD([weight], lr=1.0, gamma=gap.GAMMA)
    for chunk in chunks:
        (weight @ chunk / 8).backward()
    optimizer.step()
    mean, m2 = gap.moments(
        lambda at, chunk: at["a"] @ chunk[0], {"a": torch.zeros(50, dtype=torch.float64)}, [chunks], 8
    )
    found = -gap.ratio(mean["a"], m2["a"], 8) * mean["a"]
    torch.testing.assert_close(found, weight.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimizer", [VRAdam, VRLAMB])
def test_the_averaged_ratio_is_vradams_and_vrlambs(optimizer: type[VRAdam] | type[VRLAMB]) -> None:
    """Three steps: draw s weighs beta3^(3 - s) (1 - beta3) / (1 - beta3^3), with the optimizers' default beta3."""
    made = optimizer([weight := torch.nn.Parameter(torch.ones(50, dtype=torch.float64))], lr=1e-3)
    assert [one.beta3 for one in gap.settings("small") if isinstance(one, gap.Step)] == [made.defaults["beta3"]] * 15
    zero = {"a": torch.zeros(50, dtype=torch.float64)}
    shards, ratios, found = gap.shards_of(zero, beta3=0.9), [], {}
    for draw in range(3):
        chunks = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(draw)) + 0.3
        made.zero_grad()
        for chunk in chunks:
            (weight @ chunk / 8).backward()
        made.step()
        mean, m2 = gap.moments(lambda at, chunk: at["a"] @ chunk[0], zero, [chunks], 8)
        ratios.append(gap.ratio(mean["a"], m2["a"], 8))
        found = gap.averaged_ratio(shards, {"a": ratios[-1]})
    expected = (0.81 * ratios[0] + 0.9 * ratios[1] + ratios[2]) * 0.1 / (1 - 0.9**3)
    torch.testing.assert_close(found["a"], expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(made.state[weight]["exp_avg_gsnr"] / (1 - 0.9**3), expected, rtol=1e-9, atol=0)


def test_the_averaged_ratio_keeps_of_the_bias_what_the_own_draw_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two kinds of images in noise: equation 5 promises VR-SGD more than its step keeps, as r follows its own draw.

    The loss's change is linear in r. The older draws of the mean know nothing of the step's own, as the other samples'
    ratio does not: what remains of VR-SGD's error is the own draw's weight, 1 - beta3, up to the denominators.
    """
    labels = torch.arange(3000) % 2
    images = torch.randn(3000, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    images += 0.1 * (2.0 * labels - 1.0).view(-1, 1, 1, 1)
    given(monkeypatch, {"train": (images, labels), "test": (images, labels)})
    setting = gap.Step("mlp", 200, 0, "fresh", n=64, k=8, rate=1e-4, draws=8, seed=0)
    alone = gap.measure(replace(setting, beta3=0.0, draws=1, warm_up=1))
    assert [alone[f"averaged_{name}"] for name in WHICH] == [alone[f"vr_{name}"] for name in WHICH], "nothing but r"
    row = gap.measure(setting)
    vr, independent, averaged = (row[f"{k}_unbiased"] - row[f"{k}_measured"] for k in ("vr", "independent", "averaged"))
    assert vr > 0.08
    assert abs(independent) < 0.02
    assert (averaged - independent) / (vr - independent) == pytest.approx(0.1, abs=0.04)


def test_without_noise_every_ratio_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """All images are the same one: what a step gains on its samples it gains on others."""
    image = torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    same = image.expand(400, -1, -1, -1), torch.full((400,), 3)
    given(monkeypatch, {"train": same, "test": same})
    for source in ("fresh", "seen"):
        row = gap.measure(gap.Step("mlp", 200, 1, source, n=64, k=8, rate=1e-4, draws=2, seed=0, warm_up=1))
        assert len(row) == 12
        assert row == {name: pytest.approx(1.0, abs=1e-6) for name in row}


@pytest.mark.parametrize(
    ("optimizer", "rate"), [("Momentum", 0.1), ("VRMomentum", 0.1), ("LARS", 5.0), ("VRLARS", 5.0)]
)
def test_a_training_fits_what_can_be_fitted_and_the_gap_is_the_rest(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, rate: float
) -> None:
    """Two kinds of images; half of the test labels are wrong."""
    labels = torch.arange(160) % 2
    images = labels.float().view(-1, 1, 1, 1).expand(-1, -1, 28, 28)
    wrong = torch.where(torch.arange(160) < 80, labels, 1 - labels)
    given(monkeypatch, {"train": (images, labels), "test": (images, wrong)})
    row = gap.measure(gap.Gap("mlp", 160, 80, 8, 20, optimizer, rate, 0))
    assert (row["train"], row["test"], row["gap"]) == (100.0, 50.0, 50.0)
    assert [epoch for epoch, *_ in row["curve"]] == list(range(2, 21, 2))


def test_the_best_rate_is_that_of_the_test_accuracy() -> None:
    rows = [
        {"part": "gap", "optimizer": "LARS", "rate": rate, "seed": seed, "train": 90.0, "test": test,
         "gap": 90.0 - test, "images": 8, "batch": 4, "k": 2, "epochs": 1, "curve": [[1, 85.0, test]]}
        for rate, tests in ((1.0, (80.0, 81.0, 99.0)), (2.0, (82.0, 83.0, 84.0)))
        for seed, test in enumerate(tests)
    ]  # fmt: skip
    assert {row["rate"] for row in best_rate(rows)} == {2.0}
    text = "\n".join(tables(rows))
    assert "| LARS | 2 | 90.00 (90.00–90.00) | 83.00 (82.00–84.00) | 7.00 (6.00–8.00) |" in text
    assert "| gap at a training accuracy of | 84–86 % |" in text
    assert "| LARS | 2.50 (-14.00–5.00) |" in text, "of 85 less 80, 81, 99, 82, 83, 84"


def test_the_table_has_a_row_for_every_kind_of_step() -> None:
    numbers = {f"{kind}_{which}": place + 0.25 for place, kind in enumerate(KINDS) for which in WHICH}
    fields = {"part": "step", "epochs": 1, "source": "seen", "n": 8, "k": 2, "rate": 1.0, "draws": 3, "warm_up": 5}
    text = "\n".join(tables([{**fields, "beta3": 0.5, **numbers}]))
    assert "| 1 epochs, seen | averaged r (VRAdam, VRLAMB) | 3.250 | 3.250 | 3.250 |" in text
    assert "of which 5 came before, with beta3 0.5" in text


def test_bases_and_twins_have_equal_budgets() -> None:
    for size in ("small", "full"):
        gaps = [one for one in gap.settings(size) if isinstance(one, gap.Gap)]
        for base, twin in gap.PAIRS.items():
            tried = [[(one.rate, one.seed) for one in gaps if one.optimizer == name] for name in (base, twin)]
            assert tried[0] == tried[1] != []
            assert all(one.batch % one.k == 0 for one in gaps)
