"""What is imported when, and what is said of what is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ds_vrgd.extras import MissingExtra, need

ROOT = Path(__file__).resolve().parents[1]

# One interpreter for all of it. The finder hides packages as if they were not installed.
PROGRAM = """
import importlib, sys

import ds_vrgd
import ds_vrgd.cli.main

late = ["transformers", "datasets", "pyarrow", "tokenizers", "matplotlib", "tensorboard"]
late += ["triton", "torchvision", "accelerate"]
print("LOADED", *[name for name in late if name in sys.modules])
import torch
print("CUDA", torch.cuda.is_initialized())

hidden = {"transformers", "datasets", "pyarrow", "yaml", "matplotlib", "shtab"}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)
import ds_vrgd.extras
ds_vrgd.extras.find_spec = importlib.util.find_spec
sys.meta_path.insert(0, Hide())
for room in ["bert.main", "clicks.main", "vision.main", "integrations.hf"]:
    try:
        importlib.import_module(f"ds_vrgd.{room}")
    except ds_vrgd.extras.MissingExtra as error:
        print("MISSING", room, error)
for command in (["plan", "--run", "x", "--gpus", "1"], ["plot", "x"], ["completion", "bash"]):
    print("STATUS", command[0], ds_vrgd.cli.main.main(command))
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT)


def test_the_import_loads_nothing_that_it_does_not_need(done: subprocess.CompletedProcess[str]) -> None:
    assert "LOADED\n" in done.stdout
    assert "CUDA False\n" in done.stdout


@pytest.mark.parametrize(
    "room, extra",
    [("bert.main", "bert"), ("clicks.main", "clicks"), ("vision.main", "vision"), ("integrations.hf", "hf")],
)
def test_a_room_without_its_extra_names_it(done: subprocess.CompletedProcess[str], room: str, extra: str) -> None:
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"MISSING {room} ")]
    assert line.endswith(f"pip install 'ds_vrgd[{extra}]'")


@pytest.mark.parametrize("command, extra", [("plan", "bert"), ("plot", "plot"), ("completion", "completion")])
def test_a_command_without_its_extra_names_it_and_exits_with_2(
    done: subprocess.CompletedProcess[str], command: str, extra: str
) -> None:
    assert f"STATUS {command} 2\n" in done.stdout
    assert f"pip install 'ds_vrgd[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_is_missing_is_named() -> None:
    need("bert", "argparse")  # there
    with pytest.raises(MissingExtra, match=r"no_such_module not installed; .* pip install 'ds_vrgd\[bert\]'") as raised:
        need("bert", "argparse", "no_such_module")
    assert raised.value.name == "no_such_module"


def test_every_extra_that_an_error_names_exists() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"bert", "clicks", "vision", "hf", "plot", "completion"} <= set(extras)
