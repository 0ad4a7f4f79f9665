"""A DeepSpeed JSON alone: programs that do not import ds_vrgd, with stand-ins for what is slow to import."""

from __future__ import annotations

import importlib
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_vrgd.__main__ import main
from ds_vrgd_autoload import SWITCH

ROOT = Path(__file__).parents[1]

# As DeepSpeed is made: the package imports torch first, and then its engine.
TORCH = "import ds_vrgd_autoload\nds_vrgd_autoload.start()\n"
DEEPSPEED = "import torch\nfrom .runtime.engine import DeepSpeedEngine\nfrom .runtime.pipe import PipelineEngine\n"
ENGINE = """
class DeepSpeedEngine:
    def __init__(self, name, *, lr):
        self.built = f"{type(self).__name__} {name} {lr}"
"""
PIPELINE = """
from deepspeed.runtime.engine import DeepSpeedEngine
class PipelineEngine(DeepSpeedEngine):
    def __init__(self, name, **arguments):
        super().__init__(name, **arguments)
"""
# Like the real one, it needs a DeepSpeed that is imported completely, and wraps its engine.
DS_VRGD = """
import deepspeed
build = deepspeed.PipelineEngine.__mro__[1].__init__
def built_by_us(self, *args, **kwargs):
    build(self, *args, **kwargs)
    self.built += " with ds_vrgd"
deepspeed.DeepSpeedEngine.__init__ = built_by_us
print("IMPORTED")
"""
BUILD = """
import sys
print("BEFORE", "ds_vrgd" in sys.modules)
print(deepspeed.PipelineEngine("VRLAMB", lr=1).built)
print(deepspeed.DeepSpeedEngine("VRLAMB", lr=2).built)
print("FINDERS", [finder for finder in sys.meta_path if "autoload" in type(finder).__module__])
"""
WITH = ["PipelineEngine VRLAMB 1 with ds_vrgd", "DeepSpeedEngine VRLAMB 2 with ds_vrgd"]
WITHOUT = [line.removesuffix(" with ds_vrgd") for line in WITH]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with stand-ins for torch, DeepSpeed and ds_vrgd."""
    files = {
        "torch.py": TORCH, "deepspeed/__init__.py": DEEPSPEED, "deepspeed/runtime/__init__.py": "",
        "deepspeed/runtime/engine.py": ENGINE, "deepspeed/runtime/pipe.py": PIPELINE, "ds_vrgd.py": DS_VRGD,
        "ds_vrgd_autoload.py": (ROOT / "ds_vrgd_autoload.py").read_text(),
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, program: str, flag: str = "-S", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program, by default without any installed package."""
    environment = {name: value for name, value in os.environ.items() if name not in (SWITCH, "PYTHONPATH")}
    environment |= {"PYTHONPATH": str(folder), **variables}
    command = [sys.executable, flag, "-c", program]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "first", ["import torch, deepspeed", "import deepspeed, torch", "import torch as t, deepspeed"]
)
def test_the_first_engine_brings_ds_vrgd(folder: Path, first: str) -> None:
    done = run(folder, first + BUILD)
    assert done.stdout.splitlines() == ["BEFORE False", "IMPORTED", *WITH, "FINDERS []"], done.stderr


def test_a_program_that_imports_ds_vrgd_gets_it_once(folder: Path) -> None:
    done = run(folder, "import torch, ds_vrgd, deepspeed" + BUILD)
    assert done.stdout.splitlines() == ["IMPORTED", "BEFORE True", *WITH, "FINDERS []"], done.stderr


def test_another_wrapper_of_the_engine_stays(folder: Path) -> None:
    other = """
build = deepspeed.DeepSpeedEngine.__init__
def profiled(self, *args, **kwargs):
    build(self, *args, **kwargs)
    self.built += " profiled"
deepspeed.DeepSpeedEngine.__init__ = profiled
"""
    done = run(folder, "import deepspeed" + other + BUILD)
    assert done.stdout.splitlines()[2:4] == [f"{WITHOUT[0]} profiled", f"{WITHOUT[1]} profiled with ds_vrgd"]


def test_the_switch_turns_it_off(folder: Path) -> None:
    done = run(folder, "import torch, deepspeed" + BUILD, **{SWITCH: "0"})
    assert done.stdout.splitlines() == ["BEFORE False", *WITHOUT, "FINDERS []"], done.stderr


def test_without_deepspeed_nothing_happens(folder: Path) -> None:
    (folder / "deepspeed").rename(folder / "elsewhere")
    done = run(folder, "import torch, sys\nprint('ds_vrgd' in sys.modules)\nimport deepspeed")
    assert done.stdout == "False\n"
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'deepspeed'"


@pytest.mark.parametrize("broken", ["raise OSError('no libcuda')", "import nowhere", "1 +"])
def test_a_broken_ds_vrgd_is_a_warning(folder: Path, broken: str) -> None:
    (folder / "ds_vrgd.py").write_text(broken)
    done = run(folder, "import torch, deepspeed" + BUILD)
    assert done.stdout.splitlines()[1:3] == WITHOUT, done.stderr
    assert f"Repair or uninstall ds_vrgd, or set {SWITCH}=0" in done.stderr


@pytest.mark.parametrize(
    "engine", ["class AnotherEngine: pass\nDeepSpeedEngine = PipelineEngine = None\n", "raise OSError('no GPU')"]
)
def test_a_deepspeed_of_another_kind_is_left_alone(folder: Path, engine: str) -> None:
    """Whatever DeepSpeed's own import does, it does without us, too."""
    (folder / "deepspeed" / "__init__.py").write_text("import torch\nfrom .runtime.engine import DeepSpeedEngine\n")
    (folder / "deepspeed" / "runtime" / "engine.py").write_text(engine)
    program = "import deepspeed; print(deepspeed.DeepSpeedEngine)"
    found, alone = run(folder, program), run(folder, program, **{SWITCH: "0"})
    assert (found.returncode, found.stdout) == (alone.returncode, alone.stdout)
    assert found.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]


def test_torch_is_whole_with_the_entry_point_and_a_broken_package(tmp_path: Path) -> None:
    """The real torch, and the entry point as pyproject.toml states it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (entry,) = project["entry-points"]["torch.backends"].items()
    metadata = tmp_path / "probe-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\n{entry[0]} = {entry[1]}\n")
    (tmp_path / "ds_vrgd_autoload.py").write_text((ROOT / "ds_vrgd_autoload.py").read_text())
    (tmp_path / "ds_vrgd.py").write_text("raise OSError('broken')")
    program = (
        "import torch, sys; print(torch.ones(2).sum().item(), sorted({'ds_vrgd_autoload', 'ds_vrgd'} & {*sys.modules}))"
    )
    done = run(tmp_path, program, "-P" if sys.version_info >= (3, 11) else "-s")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2.0 ['ds_vrgd_autoload']\n", "")


PROGRAM = """
import sys, torch, deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, which takes minutes
deepspeed.init_distributed("gloo", rank=0, world_size=1, auto_mpi_discovery=False)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
    "optimizer": {"type": "LAMB", "params": {"lr": 0.1}},
})
for _ in range(2):
    engine.backward(engine(torch.randn(2, 4)).sum())
    engine.step()
print("ARGUMENTS", sys.argv[1:], "BASIC", type(engine.basic_optimizer).__module__, engine.global_steps)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["autoload", "module"])
def test_the_real_deepspeed_trains_a_json_alone(tmp_path: Path, how: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    start = "import ds_vrgd_autoload, runpy; ds_vrgd_autoload.start(); runpy.run_path('train.py')"
    command = {"autoload": ["-c", start], "module": ["-m", "ds_vrgd", "--local_rank=0", "train.py", "--x"]}[how]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": "29671", "LOCAL_RANK": "0", SWITCH: "1" if how == "autoload" else "0"}
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    arguments = ["--local_rank=0", "--x"] if how == "module" else []
    assert f"ARGUMENTS {arguments} BASIC ds_vrgd.optim.lamb 1" in done.stdout
    assert 'optimizer.type="LAMB" is the LAMB of ds_vrgd' in done.stdout + done.stderr


@pytest.mark.parametrize("spelled, named, whose", [
    ("LAMB", "LAMB", "ds_vrgd"), ("Lamb", "lamb", "DeepSpeed (FusedLamb)"), ("lamb", "lamb", "DeepSpeed (FusedLamb)"),
    ("VRLAMB", "VRLAMB", None), ("AdamW", "adamw", None),
])  # fmt: skip
def test_a_warning_names_the_optimizer_for_each_spelling_of_lamb(
    spelled: str, named: str, whose: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(_param_dict={"optimizer": {"type": spelled}})
    engine = SimpleNamespace(
        global_rank=0, optimizer_name=lambda: named, optimizer_params=lambda: {"lr": 0.1}, _config=config
    )
    register = importlib.import_module("ds_vrgd.engines.deepspeed.register")  # the package has a function of this name
    told: list[str] = []
    monkeypatch.setattr(register.logger, "warning", told.append)
    found = register._configure_basic_optimizer(lambda *_: "of DeepSpeed", engine, [torch.nn.Parameter(torch.ones(1))])
    assert (found == "of DeepSpeed") == (spelled not in register.NAMES)
    expected = [f'optimizer.type="{spelled}" is the LAMB of {whose}'] if whose else []
    assert [line.partition(". ")[0] for line in told] == expected


SHOW = "import sys; print(sys.argv, sys.path[0], 'ds_vrgd' in sys.modules, __name__)"


@pytest.mark.parametrize(
    "words, arguments",
    [
        (["{0}/train.py", "--x", "1"], ["{0}/train.py", "--x", "1"]),
        (["--local_rank=3", "{0}/train.py", "-m"], ["{0}/train.py", "--local_rank=3", "-m"]),
    ],
)
def test_a_program_is_run_as_if_by_itself(
    tmp_path: Path, words: list[str], arguments: list[str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "train.py").write_text(SHOW)
    monkeypatch.setattr(sys, "argv", ["ds_vrgd", *(word.format(tmp_path) for word in words)])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert main() == 0
    assert capsys.readouterr().out == f"{[word.format(tmp_path) for word in arguments]} {tmp_path} True __main__\n"


def test_a_module_is_run_as_if_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **how: called.append((name, how, sys.argv)))
    monkeypatch.setattr(sys, "argv", ["ds_vrgd", "--local_rank=0", "-m", "package.train", "--x"])
    assert main() == 0
    how = {"run_name": "__main__", "alter_sys": True}
    assert called == [("package.train", how, ["package.train", "--local_rank=0", "--x"])]


@pytest.mark.parametrize("words, status", [([], 2), (["-m"], 2), (["--frobnicate"], 2), (["--help"], 0)])
def test_without_a_program_the_usage_is_shown(
    words: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ds_vrgd", *words])
    assert main() == status
    assert "deepspeed --module ds_vrgd" in "".join(capsys.readouterr())
