"""The command ``ds-vrgd`` itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import ds_vrgd
import ds_vrgd_recipes
from ds_vrgd_cli import main
from ds_vrgd_recipes.cli.main import main as recipes


def test_module_prints_the_version() -> None:
    command = [sys.executable, "-m", "ds_vrgd.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"ds_vrgd {ds_vrgd.__version__}"


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such-command"])
    assert ended.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


def test_help_needs_neither_torch_nor_seconds() -> None:
    program = "import resource, sys, ds_vrgd_cli\nds_vrgd_cli.main([])\n"
    program += "used = resource.getrusage(resource.RUSAGE_SELF)\n"
    program += "print('LOADED', *({'torch', 'ds_vrgd', 'deepspeed'} & set(sys.modules)))\n"
    program += "print('SECONDS', used.ru_utime + used.ru_stime)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    *help_text, loaded, seconds = done.stdout.splitlines()
    assert help_text[0].startswith("usage: ds-vrgd ")
    assert any(line.split()[:1] == ["doctor"] for line in help_text)
    assert loaded == "LOADED"
    assert float(seconds.split()[1]) < 0.3


@pytest.mark.parametrize("program, version", [(main, ds_vrgd.__version__), (recipes, ds_vrgd_recipes.__version__)])
def test_without_a_command_both_programs_print_their_help(
    program: Callable[[Sequence[str]], int], version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program([]) == 0
    assert "Exit status: 0 done" in capsys.readouterr().out
    assert program(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f" {version}\n")
    with pytest.raises(SystemExit) as ended:
        program(["docter", "--config", "x.json"])
    assert ended.value.code == 2
    assert "there is no command 'docter'; did you mean 'doctor'?" in capsys.readouterr().err


def test_json_is_all_that_standard_output_has() -> None:
    """Also where a library, or a child process, writes to standard output by itself."""
    program = (
        "import os, subprocess, sys, ds_vrgd_cli\n"
        "def run(options):\n"
        "    print('by hand'); os.write(1, b'by a library\\n'); subprocess.run(['echo', 'by a child'])\n"
        "    options.result = '{}'\n"
        "    return 1\n"
        "parser = ds_vrgd_cli.argparse.ArgumentParser()\n"
        "command = ds_vrgd_cli.prepare(parser, 'ds_vrgd').add_parser('command')\n"
        "ds_vrgd_cli.add_json(command)\n"
        "command.set_defaults(run=run)\n"
        "sys.exit(ds_vrgd_cli.parse_and_run(parser, ['command', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "{}\n")
    assert {"by hand", "by a library", "by a child"} <= set(done.stderr.splitlines())


@pytest.mark.parametrize(
    "words",
    [
        ["plan", "--run", "none.yaml", "--gpus", "1"],
        ["plan", "--run", "demo.yaml", "--gpus", "1", "--config", "none.json"],
        ["plot", "none"],
        ["suggest", "none"],
        ["to-universal", "none", "out/none"],
        ["doctor", "--config", "none.json"],
        ["doctor", "--config", "none.json", "--free", "1"],
    ],
    ids=" ".join,
)
def test_input_that_cannot_be_used_exits_with_2(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith("error: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["doctor", "--config", "x.json"], ["to-universal", "x", "y"]], ids=" ".join)
def test_a_deepspeed_that_cannot_be_used_exits_with_2(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text('__version__ = "0.9.5"\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "ds_vrgd_cli", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: DeepSpeed 0.9.5 is not among the supported releases")
    assert done.stderr.count("\n") == 1


def test_defaults_do_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "ds_vrgd.json").write_text("no JSON")
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "--run", "demo.yaml", "--gpus", "2", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["phase"], first["k"], second["sequence_length"], second["hours"]) == (1, 8, 128, None)


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("doctor", "plan", "plot", "suggest", "to-universal", "completion"):
        assert command in script
    assert "--deepspeed_config" in script
