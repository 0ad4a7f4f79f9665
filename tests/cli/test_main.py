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
