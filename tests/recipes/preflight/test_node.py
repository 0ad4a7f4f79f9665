"""What a rank finds on its machine."""

from __future__ import annotations

import os
from pathlib import Path

from ds_vrgd_recipes.preflight.node import driver_version, existing, installed, left_segments, look_around


def test_versions_name_all_that_must_be_the_same() -> None:
    found = installed()
    assert set(found) == {"Python", "ds_vrgd", "torch", "deepspeed", "transformers"}  # and NCCL and driver on a GPU
    assert "not installed" not in found.values()


def test_driver_version(tmp_path: Path) -> None:
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version: 12.3.0\n",
        encoding="utf-8",
    )
    assert driver_version(version) == "550.54.15"
    assert driver_version(tmp_path / "absent") is None


def test_output_that_is_still_to_be_made(tmp_path: Path) -> None:
    assert existing(tmp_path / "new" / "run") == tmp_path
    node = look_around(tmp_path / "new" / "run", alone=True)
    assert node.output_free > 0
    assert node.unwritable is None
    assert not (tmp_path / "new").exists()


def test_shared_memory_that_no_process_uses(tmp_path: Path) -> None:
    shm, processes = tmp_path / "shm", tmp_path / "proc"
    (processes / "7" / "fd").mkdir(parents=True)
    shm.mkdir()
    mapped, opened, left, others = (
        shm / name
        for name in ("nccl-mapped", "torch_opened", "deepspeed_allreduce_buffer_0_127.0.0.1_29500_1", "pulse-1")
    )
    for path in (mapped, opened, left, others):
        path.touch()
    (processes / "7" / "maps").write_text(f"7f00-7f01 rw-s 00000000 00:19 12 {mapped}\n", encoding="utf-8")
    (processes / "7" / "fd" / "3").symlink_to(opened)
    (processes / "8").mkdir()  # has just ended: nothing of it can be read
    assert left_segments(shm, processes) == [str(left)]


def test_shared_memory_of_this_very_process_is_in_use(tmp_path: Path) -> None:
    segment = tmp_path / "nccl-open"
    with segment.open("wb"):
        assert left_segments(tmp_path) == []
    assert left_segments(tmp_path) == [str(segment)]
    assert segment.stat().st_uid == os.getuid()
