"""The examples for frameworks that pick an optimizer by its name, each where its package can be imported.

``pip install --no-deps`` is enough for what is used of them here: a hook, a container, a factory.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import ds_vrgd
from tests.examples.launch import ROOT, losses, run_example

pytestmark = pytest.mark.slow


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "examples" / f"{name}.py"))


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.line(x) - labels).square().mean()}


def trainer(folder: Path) -> Trainer:
    """Two updates of four chunks."""
    rows = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(32)]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, gradient_accumulation_steps=4, max_steps=2, learning_rate=4e-3,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return Trainer(Regression(), arguments, train_dataset=rows)


def check(made: Any) -> None:
    optimizer = getattr(made, "optimizer", made)  # Accelerate's wrapper has it inside
    assert type(optimizer) is ds_vrgd.VRLAMB
    assert ds_vrgd.gsnr_stats(optimizer).k == 4
    assert optimizer.param_groups[0]["gamma"] == 0.1


def test_torchtitan_trains() -> None:
    pytest.importorskip("torchtitan.components.optimizer")
    learned, frequencies = losses(run_example("torchtitan_optimizer", ranks=1))
    assert learned < frequencies


def test_an_axolotl_plugin_sets_the_optimizer(tmp_path: Path) -> None:
    pytest.importorskip("axolotl.integrations.base")
    made = trainer(tmp_path)
    example("axolotl_plugin")["VRPlugin"]().post_trainer_create(SimpleNamespace(learning_rate=4e-3), made)
    made.train()
    check(made.optimizer)


def test_ms_swift_knows_the_name(tmp_path: Path) -> None:
    pytest.importorskip("swift.optimizers")
    example("swift_plugin")
    from swift.optimizers import optimizers_map

    made = trainer(tmp_path)
    made.args.max_epochs = None  # an argument of swift's, which importing it makes every Trainer read
    callback = optimizers_map["vrlamb"](made.args, made)

    def create_optimizer(model: Any = None) -> Any:  # as swift's own trainer does
        made.optimizer = callback.create_optimizer(model)
        return made.optimizer

    made.create_optimizer = create_optimizer
    made.train()
    check(made.optimizer)


def test_automodel_builds_it_from_its_yaml() -> None:
    """Without FSDP2, which the recipe of the example attaches to."""
    import nemo_automodel.components.optim.optimizer as optim  # `make venv` installs it

    model = Regression()
    config = optim.OptimizerFromFactoryConfig(factory=ds_vrgd.VRLAMB, kwargs={"lr": 4e-3, "gamma": 0.1})
    (optimizer,) = config.build(model)
    for _ in range(4):
        model(torch.randn(4, 4), torch.randn(4, 1))["loss"].backward()
    optimizer.step()
    check(optimizer)
