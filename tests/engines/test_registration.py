"""``import ds_vrgd`` beside a DeepSpeed that is not supported, or that is broken: plain PyTorch works all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ENGINE = """
__version__ = "0.9.5"

class DeepSpeedEngine:
    def __init__(self, model=None, optimizer=None, config=None):
        print("BUILT", type(optimizer).__name__)

class PipelineEngine(DeepSpeedEngine):
    pass
"""

PROGRAM = """
import functools, torch, ds_vrgd, deepspeed

model = torch.nn.Linear(3, 2)
optimizer = ds_vrgd.VRSGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.randn(4, 3)).sum().backward()
optimizer.step()
print("K", ds_vrgd.gsnr_stats(optimizer).k)
deepspeed.DeepSpeedEngine(model, torch.optim.AdamW(model.parameters()), {"optimizer": {"type": "AdamW"}})
for given in (
    {"optimizer": optimizer},
    {"optimizer": ds_vrgd.LARS},
    {"optimizer": functools.partial(ds_vrgd.VRLAMB, lr=1.0)},
    {"config": {"optimizer": {"type": "LAMB"}}},
    {"config": {"optimizer": {"type": "VR-LAMB"}}},
):
    try:
        deepspeed.PipelineEngine(model, **given)
    except RuntimeError as error:
        print("REFUSED", error)
"""


def run(folder: Path, package: str) -> subprocess.CompletedProcess[str]:
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text(package)
    environment = {name: value for name, value in os.environ.items() if name != "DS_VRGD_ANY_VERSION"}
    environment["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT)))
    program = PROGRAM if "Engine" in package else "import ds_vrgd; print(ds_vrgd.VRLAMB)"
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)


def test_an_unsupported_release_is_refused_by_its_engines_alone(tmp_path: Path) -> None:
    done = run(tmp_path, ENGINE)
    assert done.returncode == 0, done.stderr
    k, built, *refused = done.stdout.splitlines()
    assert k == "K 2"
    assert built == "BUILT AdamW"
    assert len(refused) == 5
    assert all("DeepSpeed 0.9.5 is not among the supported releases" in line for line in refused)


def test_a_release_whose_names_have_changed_is_refused_by_its_engines_alone(tmp_path: Path) -> None:
    done = run(tmp_path, ENGINE.replace("0.9.5", "7.0.0"))
    assert done.returncode == 0, done.stderr
    k, built, *refused = done.stdout.splitlines()
    assert (k, built) == ("K 2", "BUILT AdamW")
    assert len(refused) == 5
    assert all("ds_vrgd does not work with DeepSpeed 7.0.0: ModuleNotFoundError: No module" in line for line in refused)


def test_a_broken_deepspeed_is_a_warning(tmp_path: Path) -> None:
    done = run(tmp_path, 'raise OSError("CUDA_HOME does not exist")')
    assert done.returncode == 0, done.stderr
    assert "VRLAMB" in done.stdout
    assert "importing it failed with OSError: CUDA_HOME does not exist." in done.stderr
    assert "<string>:1: UserWarning: DeepSpeed is installed" in done.stderr  # names the line of the import
