"""Saving where a write fails on one rank: the error is kept, and the rank takes part in the rest."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_vrgd_recipes.run.saving import save_checkpoint


class Writer(TorchCheckpointEngine):
    """Raises ``error`` instead of writing its second file."""

    def __init__(self, error: Exception | None, decoupled: bool = False) -> None:
        super().__init__()
        self.error, self.decoupled, self.asked = error, decoupled, 0

    def is_decoupled(self) -> bool:
        return self.decoupled

    def save(self, state_dict: Any, path: str) -> None:
        self.asked += 1
        if self.asked == 2 and self.error is not None:
            raise self.error
        super().save(state_dict, path)


class Engine:
    """Saves three files and the script as DeepSpeed's engine does."""

    def __init__(self, writer: Writer) -> None:
        self.checkpoint_engine: Any = writer
        self.at_the_end = False

    def save_checkpoint(self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool) -> None:
        assert not save_latest
        self.checkpoint_engine.makedirs(f"{folder}/{tag}", exist_ok=True)
        for name in ("a.pt", "b.pt", "c.pt"):
            self.checkpoint_engine.save(client_state, f"{folder}/{tag}/{name}")
        self._copy_recovery_script(folder)
        self.at_the_end = True  # where the other ranks wait

    def _copy_recovery_script(self, folder: str) -> None:
        (Path(folder) / "zero_to_fp32.py").touch()


def test_every_file_is_listed(tmp_path: Path) -> None:
    writer = Writer(None)
    written = save_checkpoint(Engine(writer), tmp_path, "step-3", {"step": 3})
    assert written.error is None
    assert written.files == [tmp_path / "step-3" / name for name in ("a.pt", "b.pt", "c.pt")]
    assert (tmp_path / "zero_to_fp32.py").exists()


@pytest.mark.parametrize(
    ("error", "kept"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError("[enforce fail] . unexpected pos 704 vs 614"), "a full disk, or a quota"),
        (KeyError("dtype"), "dtype"),
    ],
)
def test_an_error_is_kept_and_nothing_more_is_written(tmp_path: Path, error: Exception, kept: str) -> None:
    engine = Engine(writer := Writer(error))
    written = save_checkpoint(engine, tmp_path, "step-3", {"step": 3})
    assert written.error is not None
    assert written.error.startswith(f"{tmp_path}/step-3/b.pt: ")
    assert kept in written.error
    assert engine.at_the_end
    assert engine.checkpoint_engine is writer
    assert "_copy_recovery_script" not in vars(engine)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.pt", "step-3"]


def test_writers_in_the_background_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"in the background by Writer, .* Remove \"decoupled\""):
        save_checkpoint(Engine(Writer(None, decoupled=True)), tmp_path, "step-3", {})


def test_the_engine_copies_its_script_by_the_method_that_is_replaced() -> None:
    """A private name of DeepSpeed: when this fails, read its ``save_checkpoint`` again, and mend ``run/saving.py``."""
    assert list(inspect.signature(DeepSpeedEngine._copy_recovery_script).parameters) == ["self", "save_path"]
