"""A checkpoint is whole or is none; what is deleted and when; what --resume refuses before anything is loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from ds_vrgd.manifest import Fingerprint, first_fault
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.errors import InputError, TrainingFailed
from ds_vrgd_recipes.run.files import fingerprint
from ds_vrgd_recipes.run.manifest import write_manifest
from ds_vrgd_recipes.run.settings import mathematics

DESCRIPTION: dict[str, Any] = {
    "model": {"hidden_size": 16},
    "data_sha256": "123",
    "seed": 3,
    "phases": [{"lr": 0.1, "steps": 4}, {"lr": 0.2, "steps": 2}],
    **mathematics(
        {
            "optimizer": {"type": "VRLAMB", "params": {"lr": 0.1, "gamma": 0.1}},
            "zero_optimization": {"stage": 2},
            "gradient_clipping": 1.0,
        },
        2,
        ({}, {"adapt": False}),
    ),
}


class Alone:
    """The only rank."""

    rank, size = 0, 1

    def on_rank_zero(self, work: Callable[[], Any]) -> Any:
        return work()

    def gather(self, value: Any) -> list[Any]:
        return [value]


class FakeEngine:
    """Saves two small files as DeepSpeed's engine does, and loads the client state that was saved last."""

    def __init__(self) -> None:
        self.checkpoint_engine: Any = TorchCheckpointEngine()
        self.optimizer = SimpleNamespace(param_groups=[])

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        self.client_state = client_state
        for name in ("model_states.pt", "optim_states.pt"):
            self.checkpoint_engine.save({"tensor": torch.arange(1000.0)}, f"{folder}/{tag}/{name}")
        self._copy_recovery_script(folder)

    def _copy_recovery_script(self, folder: str) -> None:
        (Path(folder) / "zero_to_fp32.py").touch()

    def load_checkpoint(self, folder: str, tag: str) -> tuple[str | None, Any]:
        return folder, self.client_state


RANKS: Any = Alone()
Saved = tuple[Path, FakeEngine, dict[str, Any]]


def save(saved: Saved, step: int, keep: int = 9) -> None:
    output, engine, description = saved
    checkpoint.save(engine, RANKS, output, step, description, keep)


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """An output folder with checkpoints after 3 and 5 of 6 updates; phase 1 has 4."""
    saved = tmp_path, FakeEngine(), DESCRIPTION
    for step in (3, 5):
        save(saved, step)
    return saved


def names(saved: Saved) -> list[str]:
    return sorted(path.name for path in (saved[0] / "checkpoints").glob("step-*"))


def test_output_checkpoint_and_tag_folder_are_found(saved: Saved) -> None:
    output, engine, _ = saved
    for path, tag in (("", "step-000005"), ("checkpoints", "step-000005"), ("checkpoints/step-000003", "step-000003")):
        found = checkpoint.find(output / path)
        assert (found.folder, found.tag, found.step) == (output / "checkpoints", tag, int(tag[-6:]))
    checkpoint.load(engine, checkpoint.find(output))


def test_the_last_one_if_there_is_one(saved: Saved, tmp_path: Path) -> None:
    assert checkpoint.find_last(tmp_path / "absent") is None
    output, *_ = saved
    found = checkpoint.find_last(output)
    assert found is not None
    assert found.step == 5
    (output / "checkpoints" / "latest").unlink()  # killed before it was written
    assert checkpoint.find_last(output) == found


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(InputError, match=r"--resume .* is not a checkpoint of a run; give the --output"):
            checkpoint.find(path)


def test_the_same_run_fits(saved: Saved) -> None:
    output, _, description = saved
    checkpoint.check(checkpoint.find(output), json.loads(json.dumps(description)))


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("data_sha256", "456", "data_sha256=123, not 456"),
        ("zero_stage", 3, "zero_stage=2, not 3"),
        ("optimizer", "LAMB", "optimizer=VRLAMB, not LAMB"),
        ("seed", 9, "seed=3, not 9"),
        ("gradient_clipping", 0.5, r"gradient_clipping=1\.0, not 0\.5"),
        ("fp16", {"enabled": True}, r"fp16=off, not {'enabled': True}"),
    ],
)
def test_other_runs_do_not(saved: Saved, key: str, value: Any, expected: str) -> None:
    output, _, description = saved
    with pytest.raises(InputError, match=f"was saved with {expected}; use the settings of that run"):
        checkpoint.check(checkpoint.find(output), {**description, key: value})


def test_an_argument_that_differs_in_one_param_group_is_named_there(saved: Saved) -> None:
    output, _, description = saved
    first, second = description["optimizer_params"]
    for changed, expected in (
        ([first, {**second, "gamma": 0.5}], r"optimizer_params\.2\.gamma=0\.1, not 0\.5"),
        ([{**first, "betas": [0.5, 0.9]}, second], r"optimizer_params\.1\.betas\.1=0\.9, not 0\.5, .*betas\.2=0\.999"),
        ([first, {**second, "adapt": True}], r"optimizer_params\.2\.adapt=False, not True"),
        ([first], r"optimizer_params=\["),  # another number of groups
    ):
        with pytest.raises(InputError, match=f"was saved with {expected}"):
            checkpoint.check(checkpoint.find(output), {**description, "optimizer_params": changed})


def test_all_that_differs_is_named_at_once(saved: Saved) -> None:
    output, _, description = saved
    with pytest.raises(InputError, match=r"was saved with seed=3, not 9, gradient_clipping=1\.0, not 0\.0; use"):
        checkpoint.check(checkpoint.find(output), {**description, "seed": 9, "gradient_clipping": 0.0})


def test_a_checkpoint_of_an_older_version_says_less_and_is_resumed(saved: Saved) -> None:
    output, _, description = saved
    found = checkpoint.find(output)
    path = found.folder / found.tag / "pretraining.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    for group in state["optimizer_params"]:  # whose optimizer did not know trust_clip
        del group["trust_clip"]
    path.write_text(json.dumps(state), encoding="utf-8")
    checkpoint.check(found, description)
    clipped = [{**group, "trust_clip": [0, 10]} for group in description["optimizer_params"]]
    with pytest.raises(InputError, match=r"optimizer_params\.1\.trust_clip=None, not \[0, 10\]"):
        checkpoint.check(found, {**description, "optimizer_params": clipped})
    for key in ("optimizer_params", "gradient_clipping", "fp16"):
        del state[key]
    path.write_text(json.dumps(state), encoding="utf-8")
    checkpoint.check(found, {**description, "optimizer_params": clipped, "gradient_clipping": 0.5, "new": True})


def test_other_ranks_go_on_where_the_state_can_be_carried_over(saved: Saved) -> None:
    output, _, description = saved
    resumption, other = checkpoint.find(output), {**description, "ranks": 4}
    checkpoint.check(resumption, other)
    folder = resumption.folder / resumption.tag
    state = json.loads((folder / "pretraining.json").read_text(encoding="utf-8"))
    for change in ({"optimizer": "Adam"}, {"zero_stage": 0}):  # not ours; BF16_Optimizer's shards
        (folder / "pretraining.json").write_text(json.dumps(state | change), encoding="utf-8")
        (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").touch()
        with pytest.raises(InputError, match="was saved with ranks=2, not 4; use the settings of that run"):
            checkpoint.check(resumption, other | change)


def test_only_the_differing_key_of_another_model_is_named(saved: Saved) -> None:
    output, _, description = saved
    other = {**description, "model": {**description["model"], "hidden_size": 64}}
    with pytest.raises(InputError, match=r"was saved with model\.hidden_size=16, not 64; use"):
        checkpoint.check(checkpoint.find(output), other)


def test_begun_phases_are_fixed_and_later_ones_may_change(
    saved: Saved,
) -> None:
    output, _, description = saved
    first, second = description["phases"]
    later = {**description, "phases": [first, {**second, "steps": 9}]}
    checkpoint.check(checkpoint.find(output / "checkpoints" / "step-000003"), later)
    with pytest.raises(InputError, match=r"phases\.2\.steps=2, not 9"):
        checkpoint.check(checkpoint.find(output), later)


def test_weights_of_another_step_than_described(saved: Saved) -> None:
    output, engine, _ = saved
    with pytest.raises(InputError, match="incomplete or mixed"):
        checkpoint.load(engine, checkpoint.find(output / "checkpoints" / "step-000003"))


def test_a_checkpoint_has_its_name_when_all_of_it_is_there(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved[0] / "checkpoints"

    def state() -> tuple[list[str], str]:
        return names(saved), (checkpoints / "latest").read_text(encoding="utf-8")

    seen = []
    monkeypatch.setattr(checkpoint, "write_manifest", lambda *to: (seen.append(state()), write_manifest(*to)))
    save(saved, 6)
    assert seen == [(["step-000003", "step-000005", "step-000006.partial"], "step-000005")]
    assert state() == (["step-000003", "step-000005", "step-000006"], "step-000006")
    files = json.loads((checkpoints / "step-000006" / "manifest.json").read_text(encoding="utf-8"))["files"]
    assert set(files) == {"model_states.pt", "optim_states.pt", "pretraining.json"}


def damage_cut(path: Path) -> str:
    size = path.stat().st_size
    os.truncate(path, size - 10)
    return f"has {size - 10} bytes, not {size}"


def damage_flip(path: Path) -> str:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return r"has sha256 [0-9a-f]{64}, not [0-9a-f]{64}"


def damage_lose(path: Path) -> str:
    path.unlink()
    return r"cannot be read \(No such file or directory\)"


@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_lose])
@pytest.mark.parametrize("name", ["optim_states.pt", "pretraining.json"])
def test_a_damaged_file_is_named_with_the_way_out(saved: Saved, damage: Callable[[Path], str], name: str) -> None:
    output = saved[0]
    found = damage(output / "checkpoints" / "step-000005" / name)
    whole = output / "checkpoints" / "step-000003"
    with pytest.raises(
        InputError,
        match=rf"step-000005 is damaged: {name} {found}\. Nothing was loaded; .* from there with --resume {whole}",
    ):
        checkpoint.verify(checkpoint.find(output), RANKS)
    checkpoint.verify(checkpoint.find(whole), RANKS)
    damage(whole / name)
    with pytest.raises(InputError, match="there is no whole one before it: start anew"):
        checkpoint.verify(checkpoint.find(output), RANKS)


def test_every_share_of_the_files_is_looked_at(saved: Saved) -> None:
    folder = saved[0] / "checkpoints" / "step-000005"
    damage_flip(folder / "optim_states.pt")
    faults = [first_fault(folder, share, 2) for share in range(2)]
    assert len([fault for fault in faults if fault]) == 1


def test_a_damaged_or_absent_manifest_and_an_absent_folder(saved: Saved) -> None:
    output = saved[0]
    manifest = output / "checkpoints" / "step-000005" / "manifest.json"
    damage_cut(manifest)
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        checkpoint.find(output)
    manifest.unlink()
    with pytest.raises(InputError, match=r"manifest\.json is not there, so it was never completed.*step-000003"):
        checkpoint.find(output)
    shutil.rmtree(manifest.parent)
    with pytest.raises(InputError, match=r"step-000005 is damaged: its folder is not there.*step-000003"):
        checkpoint.find(output)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\xff\xfe", b"../../other/checkpoints/step-000005", b"/tmp/step-000005", b"step-", b"x" * 100_000],
)
def test_a_damaged_latest_is_named_with_the_newest_whole_checkpoint(saved: Saved, content: bytes) -> None:
    """What it names is not looked for outside of its folder."""
    output = saved[0]
    (output / "checkpoints" / "latest").write_bytes(content)
    whole = output / "checkpoints" / "step-000005"
    for find in (checkpoint.find, checkpoint.find_last):
        with pytest.raises(
            InputError, match=rf"latest is damaged: it holds '.*, not the name .* --resume {whole}"
        ) as found:
            find(output)
        assert len(str(found.value)) < 1000
    damage_flip(whole / "optim_states.pt")
    with pytest.raises(InputError, match=r"from there with --resume .*step-000003"):
        checkpoint.find(output)


@pytest.mark.parametrize(
    "content",
    [
        '{"files": ["a"]}', '{"files": {}}', "[]", "3", "{}", '{"files": {"a": 3}}', '{"files": {"a": {"size": 1}}}',
        '{"files": {"a": {"size": "1", "sha256": "0"}}}', "[" * 100_000, '"\\ud800"',
    ],
)  # fmt: skip
def test_a_manifest_of_another_kind_is_damage(saved: Saved, content: str) -> None:
    whole, broken = (saved[0] / "checkpoints" / name for name in ("step-000003", "step-000005"))
    (broken / "manifest.json").write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=rf"step-000005 is damaged: manifest\.json is damaged .* --resume {whole}"):
        checkpoint.find(saved[0])


@pytest.mark.parametrize("state", ['{"step": "5"}', '{"step": 5}', "{}"])
def test_a_description_without_what_a_resume_needs(saved: Saved, state: str) -> None:
    folder = saved[0] / "checkpoints" / "step-000005"
    (folder / "pretraining.json").write_text(state, encoding="utf-8")
    write_manifest(folder, {"pretraining.json": fingerprint(folder / "pretraining.json")})  # adapted
    with pytest.raises(InputError, match=r"pretraining\.json has (step|ranks)=.*, not a number"):
        checkpoint.find(saved[0])


def test_without_latest_a_complete_checkpoint_is_pointed_at(saved: Saved) -> None:
    (saved[0] / "checkpoints" / "latest").unlink()
    with pytest.raises(InputError, match=r"such as .*step-000005$"):
        checkpoint.find(saved[0])


def test_the_newest_stay_and_later_ones_of_an_earlier_run(saved: Saved) -> None:
    save(saved, 4, keep=2)  # gone back to 3, and on
    assert names(saved) == ["step-000003", "step-000004", "step-000005"]
    save(saved, 5, keep=1)  # in place of that of the earlier run
    assert names(saved) == ["step-000005"]
    save(saved, 6, keep=1)
    assert names(saved) == ["step-000006"]
    checkpoint.verify(checkpoint.find(saved[0]), RANKS)


def test_nothing_is_deleted_before_the_new_one_is_complete(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    with pytest.raises(
        TrainingFailed,
        match=r"step-000006 could not be written to .*: \[Errno 28\] No space left on device\. \S+ GB are free there, "
        r"and step-000005 takes \S+ GB; free as much .* and resume with --resume",
    ):
        save(saved, 6, keep=1)
    assert names(saved) == ["step-000003", "step-000005"]
    checkpoint.verify(checkpoint.find(saved[0]), RANKS)


def test_a_full_disk_beside_a_damaged_checkpoint(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the disk."""

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (saved[0] / "checkpoints" / "step-000005" / "manifest.json").write_text("{}", encoding="utf-8")
    monkeypatch.setattr(checkpoint, "write_manifest", full)
    with pytest.raises(TrainingFailed, match=r"No space left on device.* step-000005 takes some GB"):
        save(saved, 6)


def test_a_disk_that_is_full_at_the_first_checkpoint(saved: Saved, tmp_path: Path) -> None:
    _, engine, description = saved

    def full(state: Any, path: str) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    engine.checkpoint_engine.save = full
    with pytest.raises(
        TrainingFailed, match=r"rank 0: .*model_states\.pt: Disk quota exceeded.* and start again with --resume"
    ):
        checkpoint.save(engine, RANKS, tmp_path / "new", 3, description, 2)


def test_a_file_that_rank_0_does_not_see(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = ({"shard.pt": Fingerprint(1, "0")}, None)
    monkeypatch.setattr(Alone, "gather", lambda self, value: [value, elsewhere])
    with pytest.raises(TrainingFailed, match=r"shard\.pt is not visible to rank 0; put the output on a shared"):
        save(saved, 6)
    assert names(saved) == ["step-000003", "step-000005"]


def test_what_a_kill_has_left_is_cleared_away(saved: Saved) -> None:
    checkpoints = saved[0] / "checkpoints"
    (checkpoints / "step-000006.partial").mkdir()  # while it was written
    (checkpoints / "step-000006.partial" / "model_states.pt").write_bytes(b"half")
    (checkpoints / "step-000003").rename(checkpoints / "step-000003.partial")  # complete, but for its name
    (checkpoints / "step-000001").mkdir()
    checkpoint.tidy(saved[0])
    assert names(saved) == ["step-000001", "step-000003", "step-000005"]
    # One that is being replaced has lost its manifest, and the new one is complete.
    shutil.copytree(checkpoints / "step-000005", checkpoints / "step-000005.partial")
    (checkpoints / "step-000005" / "manifest.json").unlink()
    checkpoint.tidy(saved[0])
    assert names(saved) == ["step-000001", "step-000003", "step-000005"]
    checkpoint.verify(checkpoint.find(saved[0]), RANKS)
