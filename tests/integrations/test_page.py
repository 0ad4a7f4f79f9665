"""docs/TRAINER.md: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_vrgd
from tests.support.hf import Case, Corpus, fresh, make_model, training_arguments

PAGE = Path(__file__).parents[2] / "docs" / "TRAINER.md"


@pytest.mark.filterwarnings("ignore:.* estimates the GSNR from only k")
def test_python_of_the_page_runs(tmp_path: Path) -> None:
    from transformers import Trainer

    one_line, mixin, accelerated = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    with fresh():
        arguments = training_arguments(Case(None), tmp_path, max_steps=2)
        names: dict[str, Any] = {
            "Trainer": Trainer, "args": arguments, "dataset": Corpus(), "model": make_model(),
        }  # fmt: skip
        exec(one_line, names)
        names["trainer"].train()
        assert ds_vrgd.gsnr_stats(names["trainer"].optimizer).k == 3
        exec(mixin, names | {"model": make_model()})
    with fresh():
        torch.manual_seed(0)
        names = {
            "ds_vrgd": ds_vrgd, "model": make_model(), "loader": torch.utils.data.DataLoader(Corpus(), batch_size=2),
        }  # fmt: skip
        exec(accelerated, names)
        assert ds_vrgd.gsnr_stats(names["optimizer"]).k == 4
