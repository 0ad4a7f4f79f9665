"""The command ``ds-vrgd`` itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

import ds_vrgd
from ds_vrgd.cli.main import main


def test_module_tells_the_version() -> None:
    command = [sys.executable, "-m", "ds_vrgd.cli", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"ds_vrgd {ds_vrgd.__version__}"


def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["no-such-command"])
    assert ended.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for command in ("doctor", "plan", "plot", "suggest", "to-universal", "completion"):
        assert command in script
    assert "--deepspeed_config" in script
