"""The versions of the report, and the locks of killed compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd.doctor.environment import stale_locks, versions


def test_lock_of_a_killed_compile_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert stale_locks() == []
    lock = tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (found,) = stale_locks()
    assert found.startswith(f"{lock} is 0 minutes old")
    assert "remove it" in found


def test_versions_name_all_that_computes() -> None:
    assert set(versions()) == {"ds_vrgd", "DeepSpeed", "torch", "Python", "device"}
