"""Advice from logs whose noise scale is known."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ds_vrgd
from ds_vrgd.noise import gradient_noise
from ds_vrgd_cli import main
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.suggest import Suggestion, lines, suggest
from tests.recipes.run.logs import NOISE, updates, write


def test_batch_and_rate_of_a_known_noise_scale(tmp_path: Path) -> None:
    found = suggest(write(tmp_path, *updates(300, 500.0)))
    assert found.noise_scale.low <= 500 <= found.noise_scale.high
    assert (found.counted, found.older, found.warmup) == (290, None, 10)
    assert (found.probe_batch, found.batch) == (64, 512)  # the nearest power of two times 64
    assert found.lr == pytest.approx(0.02 * 8**0.5)
    # of 64,000 examples the probe's warm-up is 10 in 1000 updates, and at 8 times the batch 10 in 125
    assert found.warmup_ratio(64_000) == pytest.approx(0.08)
    with pytest.raises(InputError, match="the warm-up of 10 updates of 512 examples is longer than such a run"):
        found.warmup_ratio(5000)
    # At a batch of one noise scale both costs are 2.
    at = Suggestion(**{**vars(found), "batch": 512})
    assert at.examples(512) == pytest.approx(1 + 512 / found.noise_scale.value)
    assert at.updates(512) == pytest.approx(1 + found.noise_scale.value / 512)


@pytest.mark.parametrize(("scale", "batch", "suggested"), [(20.0, 96, 24), (3.0, 96, 3), (100.0, 96, 96)])
def test_smaller_batches_are_whole_ones(tmp_path: Path, scale: float, batch: int, suggested: int) -> None:
    assert suggest(write(tmp_path, *updates(200, scale, batch=batch))).batch == suggested


def test_only_the_last_phase_counts_and_a_drift_is_told(tmp_path: Path) -> None:
    first = updates(100, 5000.0, batch=512, lr=0.3)
    second = updates(410, [200.0] * 210 + [1000.0] * 200, first=101, phase=2, seed=1)
    found = suggest(write(tmp_path, *first, *second))
    assert (found.probe_batch, found.probe_lr, found.counted) == (64, 0.02, 200)
    assert found.older is not None
    assert found.older.low <= 200 <= found.older.high
    assert found.noise_scale.low <= 1000 <= found.noise_scale.high


def test_too_wide_an_interval_is_refused_with_the_updates_that_it_takes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too uncertain to choose a batch by") as caught:
        suggest(write(tmp_path, *updates(60, 4000.0, warmup=0, seed=6)))
    assert re.search(r"at least \d,\d\d0 samples after 60 updates", str(caught.value))  # no 2.11e+03
    more = re.search(r"some (\d+) more updates like these", str(caught.value))
    assert more is not None
    # as many, and what was asked for is there
    found = suggest(write(tmp_path, *updates(60 + 2 * int(more[1]), 4000.0, warmup=0, seed=6)))
    assert found.noise_scale.high / found.noise_scale.low <= 2.0
    with pytest.raises(InputError, match="a batch larger than 64"):
        suggest(write(tmp_path, *updates(60, 1e7, warmup=0)))


def test_what_cannot_be_judged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"10 updates after the warm-up .* it takes at least 6 more"):
        suggest(write(tmp_path, *updates(20, 500.0)))
    with pytest.raises(InputError, match=r"0 updates after the warm-up"):  # still rising
        suggest(write(tmp_path, *updates(20, 500.0, warmup=50)))
    without = [{name: value for name, value in record.items() if name != "gsnr"} for record in updates(50, 500.0)]
    with pytest.raises(InputError, match="probe with an optimizer with GSNR"):
        suggest(write(tmp_path, *without))
    with pytest.raises(InputError, match=r"the batch changed within the last phase \(\[64, 128\]\)"):
        suggest(write(tmp_path, *updates(50, 500.0), *updates(50, 500.0, batch=128, warmup=0, first=51)))


@pytest.mark.parametrize(
    ("low", "high", "batch", "verdict"),
    [
        (0.246, 0.31, 64, "this ratio is noise"),
        (0.22, 0.275, 64, "these are not the shares of noise"),
        (0.281, 0.33, 64, "these are not the shares of noise"),
        (0.246, 0.31, 1024, "no verdict, since the batch is not below the noise scale, and a signal can"),
        (0.22, 0.275, 1024, "these are not the shares of noise"),
    ],
)
def test_verdict_on_the_ratio(tmp_path: Path, low: float, high: float, batch: int, verdict: str) -> None:
    clamped = {"clamped_low": low, "clamped_high": high, **NOISE}
    found = suggest(write(tmp_path, *updates(300, 500.0, batch=batch, clamped=clamped)))
    (line,) = (line for line in lines(found, None) if line.startswith("GSNR"))
    shares = f"GSNR          {low:.3f} clamped to gamma and {high:.3f} to 1, pure noise 0.281 and 0.275"
    assert line.startswith(f"{shares} (compared within 0.05): {verdict}")


def regression(signs: bool, weight: torch.Tensor) -> list[dict[str, Any]]:
    """Records of updates at weights of zero, whose true gradient is ``-2 weight``; random signs leave no signal."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.Parameter(torch.zeros(len(weight)))
    optimizer = ds_vrgd.VRSGD([layer], lr=0.0)
    records = updates(40, 500.0, warmup=0)
    for record in records:
        for _ in range(8):
            inputs = torch.randn(8, len(weight), generator=generator)
            sign = 2.0 * torch.randint(2, (), generator=generator) - 1.0 if signs else 1.0
            (sign / 8 * (inputs @ (layer - weight)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        noise = gradient_noise(optimizer, 8)
        record["gsnr"] |= asdict(ds_vrgd.gsnr_stats(optimizer).means())
        record["gsnr"] |= {"noise_trace": float(noise.trace.sum()), "noise_signal": float(noise.signal.sum())}
    return records


def test_verdict_on_gradients(tmp_path: Path) -> None:
    # tr(Sigma) / |G|^2 is one more than the number of inputs: twice, and half of, the batch of 64.
    normal, one = torch.randn(128, generator=torch.Generator().manual_seed(2)), torch.eye(32)[0]
    with pytest.raises(InputError, match=r"this ratio is noise$"):
        suggest(write(tmp_path, *regression(True, normal)))
    for weight, verdict in ((normal, True), (normal[:32], None), (one, False)):
        found = suggest(write(tmp_path, *regression(False, weight)))
        assert found.noise_scale.value == pytest.approx(len(weight) + 1, rel=0.2)
        assert found.clamped is not None
        assert found.clamped.is_noise is verdict


def test_verdict_is_on_the_updates_that_count(tmp_path: Path) -> None:
    old = updates(100, 500.0)  # of a release that did not log the shares of noise
    warmup = updates(10, 500.0, first=101, warmup=20, clamped={"clamped_low": 0.9, "clamped_high": 0.0, **NOISE})
    steady = updates(200, 500.0, first=111, warmup=0, clamped={"clamped_low": 0.27, "clamped_high": 0.28, **NOISE})
    of_phase = [{**record, "phase": 2} for record in warmup + steady]
    found = suggest(write(tmp_path, *old, *of_phase)).clamped
    assert found is not None
    assert (found.low, found.high, found.is_noise) == (pytest.approx(0.27), pytest.approx(0.28), True)
    assert suggest(write(tmp_path, *old, *updates(200, 500.0, first=101, warmup=0))).clamped is None
    found = suggest(write(tmp_path, *old, *updates(50, 500.0, first=101, warmup=0, clamped=NOISE))).clamped
    assert found is not None
    assert (found.low, found.is_noise) == (pytest.approx(0.2), False)


def test_verdict_where_the_noise_scale_is_too_uncertain(tmp_path: Path) -> None:
    clamped = {"clamped_low": 0.28, "clamped_high": 0.28, **NOISE}
    with pytest.raises(InputError, match=r"a batch larger than 64\. GSNR: 0\.280 clamped .*: this ratio is noise$"):
        suggest(write(tmp_path, *updates(60, 1e7, warmup=0, clamped=clamped)))
    with pytest.raises(InputError, match=r"a batch larger than 64$"):
        suggest(write(tmp_path, *updates(60, 1e7, warmup=0)))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", *updates(300, 500.0))
    assert main(["suggest", str(folder), "--examples", "512000"]) == 0
    printed = capsys.readouterr().out
    assert "batch         512, where the probe had 64" in printed
    assert "the run       1,000 updates for 512,000 examples, warmup_ratio 0.01" in printed
    assert "What this does not know" in printed
    assert main(["suggest", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"], found["probe_batch"], found["noise_scale"]["low"] > 0.0) == (512, 64, True)
    assert found["clamped"] is None
    write(tmp_path / "run", *updates(300, 500.0, clamped=NOISE))
    assert main(["suggest", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["clamped"]
    assert found == pytest.approx({"low": 0.2, "high": 0.1, **NOISE, "is_noise": False})
    assert main(["suggest", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert main(["suggest", str(folder), "--examples", "0"]) == 2
    assert main(["suggest", str(write(tmp_path / "short", *updates(20, 500.0)))]) == 1  # it takes more updates
