"""The Python and JSON blocks of README, START, BATCH_SIZE, RANKS and RELIABILITY run as they stand."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

import ds_vrgd
from tests.docs.commands import ROOT
from tests.support.ranks import run_on_ranks


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def block_with(page: str, words: str) -> str:
    (found,) = [block for block in blocks(page) if words in block]
    return found


class Model(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.head(torch.tanh(self.body(inputs))) - 1.0).square().mean()


def test_plain_pytorch_of_the_readme() -> None:
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "ds_vrgd": ds_vrgd, "model": Model(), "batch": torch.randn(32, 6), "loss_of": lambda model, batch: model(batch),
    }  # fmt: skip
    exec(block_with("README.md", "micro_batch in batch.chunk"), names)
    assert ds_vrgd.gsnr_stats(names["optimizer"]).k == 8


def test_gradients_of_one_process_are_watched(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    found = [[{"w": torch.randn(9)} for _ in range(4)] for _ in range(3)]
    found[1][2]["w"][5] = torch.nan
    exec(block_with("docs/RANKS.md", "of_gradients"), {"ds_vrgd": ds_vrgd, "found": found})
    assert capsys.readouterr().out.startswith("2 nonfinite ('w',) ")


@pytest.mark.parametrize("page", ["README.md", "docs/START.md", "docs/TRAINER.md"])
def test_json_names_an_optimizer_and_its_arguments(page: str) -> None:
    for block in blocks(page, "json"):
        given = json.loads(f"{{{block}}}")["optimizer"]
        arguments = {name: value for name, value in given["params"].items() if value != "auto"}
        assert getattr(ds_vrgd, given["type"])([nn.Parameter(torch.ones(2))], **arguments)


def run_engines(rank: int, folder: str) -> tuple[list[str], float, int]:
    """Run the blocks for DeepSpeed; return the optimizers, the noise scale, and the steps of a converted checkpoint."""
    start, two, stats = blocks("docs/START.md")
    (meter,), load = blocks("docs/BATCH_SIZE.md"), block_with("docs/RELIABILITY.md", "load_universal")
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2},
    }  # fmt: skip
    names: dict[str, Any] = {"deepspeed": deepspeed, "functools": functools, "config": config, "model": Model()}
    exec(start, names)
    ds_vrgd.engines.deepspeed.leave_out_shared_memory_op()
    made: list[str] = []
    initialize = deepspeed.initialize

    def kept(**arguments: Any) -> Any:
        result = initialize(**arguments)
        made.append(type(result[0].basic_optimizer).__name__)
        return result

    deepspeed.initialize = kept
    exec(two, names)
    config |= json.loads(f"{{{blocks('docs/START.md', 'json')[0]}}}")
    engine, *_ = deepspeed.initialize(model=names["model"], model_parameters=names["model"].parameters(), config=config)
    names |= {"engine": engine, "data": [torch.randn(2, 6) for _ in range(16)]}
    exec(meter, names)
    exec(stats, names)
    engine.save_checkpoint(f"{folder}/saved")
    torch.distributed.barrier()
    if rank == 0:
        ds_vrgd.engines.deepspeed.to_universal(f"{folder}/saved", f"{folder}/converted")
    torch.distributed.barrier()
    engine.destroy()
    names |= {"OUTPUT": f"{folder}/converted"}
    exec(load, names)
    return made, names["found"].value, names["engine"].global_steps


@pytest.mark.filterwarnings("ignore:.*")
def test_blocks_for_deepspeed(tmp_path: Any) -> None:
    for made, noise, steps in run_on_ranks(2, run_engines, str(tmp_path)):
        assert made == ["VRLAMB"] * 4
        assert noise > 0.0
        assert steps == 4
