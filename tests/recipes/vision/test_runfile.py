"""What a run file means, and what is refused in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.launch import load_deepspeed_config
from ds_vrgd_recipes.vision.runfile import load_run_file
from tests.recipes.vision.cases import run_file

CONFIGS = Path(__file__).parents[3] / "configs"


def test_updates_and_rates_follow_the_images() -> None:
    run = run_file()
    assert run.steps(40) == 6  # 2.4 * 40 / 16
    # 0.8 * 40 / 16 = 2 updates of warm-up to 0.1 * sqrt(16 / 4); then half a cosine over four.
    rates = [run.lr_at(step, 40, 0.1) for step in range(6)]
    assert rates == pytest.approx([0.1, 0.2, 0.2, 0.2 * (2 + 2**0.5) / 4, 0.1, 0.2 * (2 - 2**0.5) / 4])
    assert [run.is_due(0.8, step, 40) for step in range(1, 7)] == [False, True, False, True, False, True]
    assert run_file(lr_base_batch=None).lr_at(1, 40, 0.1) == 0.1


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.glob("resnet*/*.yaml")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_shipped_run_files(path: Path) -> None:
    run = load_run_file(path)
    assert path.stem == (f"{run.global_batch // 1024}k" if run.global_batch >= 1024 else f"{run.global_batch}")
    assert run.global_batch % run.micro_batch == 0
    assert run.global_batch // run.micro_batch >= 8  # below, a VR optimizer warns


def test_shipped_optimizers_and_their_twins_differ_in_gamma_alone() -> None:
    paths = sorted(CONFIGS.glob("resnet*/vr_*.json"))
    assert len(paths) == 5
    for path in paths:
        twin = load_deepspeed_config(path.with_name(path.name.removeprefix("vr_")))["optimizer"]
        ours = load_deepspeed_config(path)["optimizer"]
        assert load_deepspeed_config(path)["gradient_clipping"] == 0  # or DeepSpeed would clip at 1
        assert ours["params"].pop("gamma") == 0.1
        assert twin["params"].pop("gamma", 1.0) == 1.0
        assert ours["params"] == twin["params"]
        assert ours["type"].removeprefix("VR") == twin["type"].removeprefix("VR")


@pytest.mark.parametrize(
    "text, expected",
    [
        ("model: {network: resnet-small, depth: 18}", "depth=18 is not 6n + 2"),
        ("model: {network: resnet-50}", "model.network=resnet-50 is not for data.source=fashion-mnist"),
        ("epochs: 1\nwarmup_epochs: 2", "warmup_epochs=2.0 is more than epochs=1.0"),
        ("micro_batch: 1", "micro_batch=1: input should be greater than 1"),
        ("decay: linear", "decay='linear': unknown key"),
    ],
)
def test_unusable_values(tmp_path: Path, text: str, expected: str) -> None:
    whole = {
        "data": "{source: fashion-mnist}",
        "model": "{network: resnet-small, depth: 8}",
        "global_batch": "16",
        "micro_batch": "4",
        "epochs": "1",
    }
    for line in text.splitlines():
        key, value = line.split(": ", 1)
        whole[key] = value
    path = tmp_path / "run.yaml"
    path.write_text("".join(f"{key}: {value}\n" for key, value in whole.items()), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        load_run_file(path)
    assert expected in str(refused.value)
