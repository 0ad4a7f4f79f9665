"""The command ``ds-vrgd-recipes``: each subcommand is the program that ``scripts/`` starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ds_vrgd_recipes
from ds_vrgd_recipes.cli.main import PROGRAMS, _program, main

ROOT = Path(__file__).parents[3]


def test_every_script_has_its_command() -> None:
    for name in PROGRAMS:
        script = (ROOT / "scripts" / f"{name.replace('-', '_')}.py").read_text(encoding="utf-8")
        assert f"from {_program(name).__module__} import main\n" in script


def test_module_prints_the_version() -> None:
    command = [sys.executable, "-m", "ds_vrgd_recipes.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"ds_vrgd_recipes {ds_vrgd_recipes.__version__}"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_parses_its_own_arguments(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: ds-vrgd-recipes {name} ")


def test_deepspeed_launcher_may_put_the_rank_first(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--local_rank=0", "pretrain-bert", "--run", "demo.yaml", "--no-such-option"])
    assert ended.value.code == 2
    assert "required: --deepspeed_config/--config, --output" in capsys.readouterr().err


def test_run_files_are_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--run", "bert-large/64k-32k.yaml", "--gpus", "64"]) == 0
    assert "7,739" in capsys.readouterr().out  # updates of phase 1 in that file


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such-command"])
    assert ended.value.code == 2
    assert "no-such-command" in capsys.readouterr().err
