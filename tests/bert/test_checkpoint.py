"""What --resume refuses, from the description that lies beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd.bert import checkpoint
from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.runfile import RunFile

CONFIG: dict[str, Any] = {"optimizer": {"type": "VRLAMB"}, "zero_optimization": {"stage": 2}}


class FakeEngine:
    """Saves and loads only the client state."""

    global_rank = 0

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any]) -> None:
        self.client_state = client_state
        (Path(folder) / "latest").write_text(tag, encoding="utf-8")

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str | None, Any]:
        return folder, self.client_state


@pytest.fixture
def saved(run: RunFile, tmp_path: Path) -> tuple[Path, FakeEngine, dict[str, Any]]:
    """An output folder with checkpoints after 3 and 5 of 6 updates; phase 1 has 4."""
    engine, description = FakeEngine(), checkpoint.describe(run, "abc", 2, CONFIG)
    for step in (3, 5):
        checkpoint.save(engine, tmp_path, step, description)
    return tmp_path, engine, description


def test_output_checkpoint_and_tag_folder_are_found(saved: tuple[Path, FakeEngine, dict[str, Any]]) -> None:
    output, engine, _ = saved
    for path, tag in (("", "step-000005"), ("checkpoints", "step-000005"), ("checkpoints/step-000003", "step-000003")):
        found = checkpoint.find(output / path)
        assert (found.folder, found.tag, found.step) == (output / "checkpoints", tag, int(tag[-6:]))
    checkpoint.load(engine, checkpoint.find(output))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(
            InputError, match=r"--resume .* is not a checkpoint of a pre-training run; give the --output"
        ):
            checkpoint.find(path)


def test_the_same_run_fits(saved: tuple[Path, FakeEngine, dict[str, Any]], run: RunFile) -> None:
    output, _, description = saved
    checkpoint.check(checkpoint.find(output), json.loads(json.dumps(description)))


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("vocabulary_sha256", "def", "vocabulary_sha256=abc, not def"),
        ("ranks", 4, "ranks=2, not 4"),
        ("zero_stage", 3, "zero_stage=2, not 3"),
        ("optimizer", "LAMB", "optimizer=VRLAMB, not LAMB"),
        ("seed", 9, "seed=3, not 9"),
    ],
)
def test_other_runs_do_not(saved: tuple[Path, FakeEngine, dict[str, Any]], key: str, value: Any, expected: str) -> None:
    output, _, description = saved
    with pytest.raises(InputError, match=f"was saved with {expected}; use the settings of that run"):
        checkpoint.check(checkpoint.find(output), {**description, key: value})


def test_only_the_differing_key_of_another_model_is_named(
    saved: tuple[Path, FakeEngine, dict[str, Any]], run: RunFile
) -> None:
    output, _, description = saved
    other = {**description, "model": {**description["model"], "hidden_size": 64}}
    with pytest.raises(InputError, match=r"was saved with model\.hidden_size=16, not 64; use"):
        checkpoint.check(checkpoint.find(output), other)


def test_begun_phases_are_fixed_and_later_ones_may_change(
    saved: tuple[Path, FakeEngine, dict[str, Any]],
) -> None:
    output, _, description = saved
    first, second = description["phases"]
    later = {**description, "phases": [first, {**second, "steps": 9}]}
    checkpoint.check(checkpoint.find(output / "checkpoints" / "step-000003"), later)
    with pytest.raises(InputError, match=r"phases\.2\.steps=2, not 9"):
        checkpoint.check(checkpoint.find(output), later)


def test_weights_of_another_step_than_described(saved: tuple[Path, FakeEngine, dict[str, Any]]) -> None:
    output, engine, _ = saved
    with pytest.raises(InputError, match="incomplete or mixed"):
        checkpoint.load(engine, checkpoint.find(output / "checkpoints" / "step-000003"))
