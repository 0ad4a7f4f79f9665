"""The training programs, started as modules: torchrun -m, python -m."""

from __future__ import annotations

import runpy
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["bert.main", "bert.prepare_main", "bert.squad.main", "bert.squad.cloze", "clicks.main", "vision.main"]
)
def test_a_program_that_is_started_as_a_module_runs(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"ds_vrgd_recipes.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__")
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out
