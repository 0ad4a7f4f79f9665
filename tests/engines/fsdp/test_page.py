"""docs/FSDP.md: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ds_vrgd
from tests.support.ranks import run_on_ranks

PAGE = Path(__file__).parents[3] / "docs" / "FSDP.md"


class Model(nn.Module):
    """A model with its blocks where the page looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.h = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.transformer.h:
            inputs = torch.tanh(block(inputs))
        return self.head(inputs).square().mean()


def run_page(rank: int, folder: str) -> tuple[int, bool]:
    """Train with the first block, save and load with the second; return k, and whether the state is as it was."""
    start, checkpoint, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {"model": model, "torch": torch, "folder": folder}
    exec(start, names)
    optimizer = names["optimizer"]
    for _ in range(4):
        (model(torch.randn(3, 6)) / 4).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    before = {param: state["exp_avg"].to_local().clone() for param, state in optimizer.state.items()}
    exec(checkpoint, names)
    same = all(torch.equal(optimizer.state[param]["exp_avg"].to_local(), value) for param, value in before.items())
    return ds_vrgd.gsnr_stats(optimizer).k, same


def test_python_of_the_page_runs(tmp_path: Path) -> None:
    assert run_on_ranks(2, run_page, str(tmp_path)) == [(8, True)] * 2
