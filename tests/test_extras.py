"""What an import loads, what works with torch alone, and the error about a package that is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ds_vrgd.extras import MissingExtra, need

ROOT = Path(__file__).resolve().parents[1]

# Hides the packages that the first argument names, as if they were not installed.
HIDE = """
import importlib.util, sys, warnings

hidden = set(sys.argv[1].split())

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in hidden else find_spec(name, package)
sys.meta_path.insert(0, Hide())
"""

LATE = """
import ds_vrgd
import ds_vrgd_cli

late = ["transformers", "datasets", "pyarrow", "tokenizers", "matplotlib", "tensorboard"]
late += ["triton", "torchvision", "accelerate", "ds_vrgd_recipes"]
print("LOADED", *[name for name in late if name in sys.modules])
import torch
print("CUDA", torch.cuda.is_initialized())
"""

WITHOUT_EXTRAS = """
import importlib
import ds_vrgd.extras, ds_vrgd_cli, ds_vrgd_recipes.cli.main

for module in ["ds_vrgd_recipes.bert.main", "ds_vrgd_recipes.clicks.main", "ds_vrgd_recipes.vision.main", "ds_vrgd.hf"]:
    try:
        importlib.import_module(module)
    except ds_vrgd.extras.MissingExtra as error:
        print("MISSING", module, error)
for command in (["plan", "--run", "x", "--gpus", "1"], ["plot", "x"], ["completion", "bash"]):
    print("STATUS", command[0], ds_vrgd_cli.main(command))
for command in (["pretrain-bert", "--run", "x"], ["plot", "x"]):
    print("STATUS recipes", command[0], ds_vrgd_recipes.cli.main.main(command))
"""

# Two chunks whose second gradient is the first one's negative in every other element: there r is 0, and gamma's share
# of a mean of zero is zero, so that these weights only decay; the others move.
WITH_TORCH_ALONE = """
import torch
import ds_vrgd

torch.manual_seed(0)
model = torch.nn.Linear(4, 3, bias=False)
before = model.weight.detach().clone()
optimizer = ds_vrgd.VRLAMB(model.parameters(), lr=0.1, weight_decay=0.0)
sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
for gradient in (torch.ones(3, 4), torch.ones(3, 4) * sign):
    (model.weight * gradient / 2).sum().backward()
optimizer.step()
moved = (model.weight.detach() - before).abs()
print("MOVED", bool((moved[:, ::2] > 0).all()), float(moved[:, 1::2].max()))
print("K", ds_vrgd.gsnr_stats(optimizer).k)
print("DEEPSPEED", *[name for name in sys.modules if "deepspeed" in name])
import ds_vrgd_cli
from ds_vrgd_cli import main
for command in (["plan", "--run", "x", "--gpus", "1"], ["plot", "--help"], ["doctor", "--cluster"]):
    print("STATUS", *command, main(command))
print("STATUS doctor --config", main(["doctor", "--config", "x.json"]))
print("STATUS to-universal", main(["to-universal", "x", "y"]))
print("HELP", main.__module__ and "pip install ds_vrgd_recipes" in ds_vrgd_cli.build_parser().format_help())
import ds_vrgd.bert
"""


def run(program: str, hidden: set[str], **how: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HIDE + program, " ".join(hidden)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **how)  # type: ignore[call-overload,no-any-return]


def needed_by(distribution: str) -> set[str]:
    """Return the distributions that one brings without an extra."""
    found, new = set(), {distribution}
    while new:
        name = new.pop()
        found.add(name)
        try:
            requirements = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # for another platform
            continue
        wanted = {r.name.lower() for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})}
        new |= wanted - found
    return {re.sub(r"[-_.]+", "-", name).lower() for name in found}


@pytest.fixture(scope="module")
def late() -> subprocess.CompletedProcess[str]:
    return run(LATE, set(), check=True)


@pytest.fixture(scope="module")
def without_extras() -> subprocess.CompletedProcess[str]:
    return run(WITHOUT_EXTRAS, {"transformers", "datasets", "pyarrow", "yaml", "matplotlib", "shtab"}, check=True)


@pytest.fixture(scope="module")
def with_torch_alone() -> subprocess.CompletedProcess[str]:
    kept = needed_by("torch") | {"ds-vrgd"}
    hidden = {
        module
        for module, names in metadata.packages_distributions().items()
        if not kept & {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    }
    assert {"deepspeed", "packaging", "transformers"} <= hidden
    return run(WITH_TORCH_ALONE, hidden | {"ds_vrgd_recipes"})


def test_the_import_loads_nothing_that_it_does_not_need(late: subprocess.CompletedProcess[str]) -> None:
    assert "LOADED\n" in late.stdout
    assert "CUDA False\n" in late.stdout


@pytest.mark.parametrize(
    "module, extra",
    [
        ("ds_vrgd_recipes.bert.main", "ds_vrgd_recipes[bert]"),
        ("ds_vrgd_recipes.clicks.main", "ds_vrgd_recipes[clicks]"),
        ("ds_vrgd_recipes.vision.main", "ds_vrgd_recipes[vision]"),
        ("ds_vrgd.hf", "ds_vrgd[hf]"),
    ],
)
def test_a_module_without_its_extra_names_it(
    without_extras: subprocess.CompletedProcess[str], module: str, extra: str
) -> None:
    (line,) = [line for line in without_extras.stdout.splitlines() if line.startswith(f"MISSING {module} ")]
    assert line.endswith(f"pip install '{extra}'")


@pytest.mark.parametrize(
    "command, extra",
    [
        ("plan", "ds_vrgd_recipes[bert]"),
        ("plot", "ds_vrgd_recipes[plot]"),
        ("completion", "ds_vrgd[completion]"),
        ("recipes pretrain-bert", "ds_vrgd_recipes[bert]"),
        ("recipes plot", "ds_vrgd_recipes[plot]"),
    ],
)
def test_a_command_without_its_extra_names_it_and_exits_with_2(
    without_extras: subprocess.CompletedProcess[str], command: str, extra: str
) -> None:
    assert f"STATUS {command} 2\n" in without_extras.stdout
    assert f"pip install '{extra}'" in without_extras.stderr
    assert "Traceback" not in without_extras.stderr


def test_plain_pytorch_needs_torch_alone(with_torch_alone: subprocess.CompletedProcess[str]) -> None:
    assert "MOVED True 0.0\n" in with_torch_alone.stdout, with_torch_alone.stderr
    assert "K 2\n" in with_torch_alone.stdout
    assert "DEEPSPEED\n" in with_torch_alone.stdout


@pytest.mark.parametrize(
    "command, way_out",
    [
        ("plan --run x --gpus 1", "ds-vrgd plan is a part of ds_vrgd_recipes, which is not installed. Install it: "),
        ("plot --help", "ds-vrgd plot is a part of ds_vrgd_recipes, "),
        ("doctor --cluster", "ds-vrgd doctor --cluster is a part of ds_vrgd_recipes, "),
        ("doctor --config", "deepspeed not installed; the extra 'deepspeed' brings what is needed here: "),
        ("to-universal", "pip install 'ds_vrgd[deepspeed]'"),
    ],
)
def test_a_command_that_needs_more_says_what_to_install(
    with_torch_alone: subprocess.CompletedProcess[str], command: str, way_out: str
) -> None:
    assert f"STATUS {command} 2\n" in with_torch_alone.stdout
    assert way_out in with_torch_alone.stderr
    assert "HELP True\n" in with_torch_alone.stdout


def test_an_old_path_into_the_recipes_says_what_to_install(with_torch_alone: subprocess.CompletedProcess[str]) -> None:
    assert with_torch_alone.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: ds_vrgd.bert is now ds_vrgd_recipes.bert, which is not installed: "
        "pip install ds_vrgd_recipes"
    )


def test_what_is_missing_is_named() -> None:
    need("hf", "argparse")  # there
    with pytest.raises(MissingExtra, match=r"no_such_module not installed; .* pip install 'ds_vrgd\[hf\]'") as raised:
        need("hf", "argparse", "no_such_module")
    assert raised.value.name == "no_such_module"


def test_every_extra_that_an_error_names_exists() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    for file, named in (
        ("pyproject.toml", {"deepspeed", "hf", "completion"}),
        ("recipes/pyproject.toml", {"bert", "clicks", "vision", "plot"}),
    ):
        project = tomllib.loads((ROOT / file).read_text())["project"]
        assert named <= set(project["optional-dependencies"])
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"] == ["torch>=2.9"]
