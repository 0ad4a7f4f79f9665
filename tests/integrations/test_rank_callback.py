"""The callback that logs the ranks side by side."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ds_vrgd

hf = pytest.importorskip("ds_vrgd.hf")


def test_ranks_are_logged_after_the_loss_with_the_number_of_events() -> None:
    optimizer = ds_vrgd.LAMB([torch.nn.Parameter(torch.ones(2))], watch=lambda event: None)
    logged: list[dict[str, Any]] = []
    accelerator = SimpleNamespace(optimizer_step_was_skipped=False)
    callback = hf.RankCallback(SimpleNamespace(optimizer=optimizer, log=logged.append, accelerator=accelerator))
    callback.on_log(None, None, None, logs={"loss": 1.0})
    assert logged == []  # before the first step
    generator = torch.Generator().manual_seed(0)
    gradients = [{"w": torch.randn(40, generator=generator)} for _ in range(4)]
    gradients[3] = gradients[0]
    assert optimizer.recorder is not None
    optimizer.recorder.report = ds_vrgd.RankReport.of_gradients(gradients)
    optimizer.recorder._act(ds_vrgd.RankWatch().update(optimizer.recorder.report))
    callback.on_log(None, None, None, logs={"learning_rate": 0.1})
    for _ in range(2):
        callback.on_log(None, None, None, logs={"loss": 1.0})
    first, second = logged
    assert (first["rank_events"], second["rank_events"]) == (1.0, 0.0)
    norms = torch.stack([of["w"].norm() for of in gradients])
    assert first["rank_norm_1"] == pytest.approx(float(norms[1] / norms.sort().values[1:3].mean()), rel=1e-5)
    assert {f"rank_{name}_{rank}" for name in ("norm", "cosine", "deviation") for rank in range(4)} < set(first)
    logged.clear()
    optimizer.overflow = True  # the report is of an earlier step
    callback.on_log(None, None, None, logs={"loss": 1.0})
    optimizer.overflow, accelerator.optimizer_step_was_skipped = False, True
    callback.on_log(None, None, None, logs={"loss": 1.0})
    assert logged == [{"rank_events": 0.0}] * 2


def test_an_optimizer_without_a_watch_and_a_foreign_one_are_refused_before_the_training() -> None:
    params = [torch.nn.Parameter(torch.ones(2))]
    for optimizer, error, message in (
        (ds_vrgd.LAMB(params), ValueError, 'watch=None, so nobody compares the ranks. Give the optimizer watch="log"'),
        (torch.optim.AdamW(params), RuntimeError, "RankCallback: .* Pass optimizer_cls_and_kwargs="),
    ):
        with pytest.raises(error, match=message):
            hf.RankCallback(SimpleNamespace(optimizer=optimizer)).on_train_begin(None, None, None)
