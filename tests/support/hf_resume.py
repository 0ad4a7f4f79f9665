"""Train with the Trainer, stop, resume in a fresh one, and compare with a run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ds_vrgd.noise import find_optimizer
from tests.support.hf import Case, fresh, make_model, make_trainer, weights_of
from tests.support.resuming import differences, shards


def everything(trainer: Any) -> dict[str, Any]:
    """Return all that the next step depends on, on this rank; a collective under DeepSpeed."""
    optimizer = find_optimizer(trainer.optimizer)
    if trainer.is_deepspeed_enabled:
        tensors = optimizer.observer.tensors
    else:
        tensors = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        "model": weights_of(trainer),
        **shards(optimizer, tensors),
        "rates": [group["lr"] for group in optimizer.param_groups],
        "decays": [group["weight_decay"] for group in optimizer.param_groups],
        "schedule": trainer.lr_scheduler.state_dict(),
    }


def resume(case: Case, folder: Path) -> tuple[list[str], int]:
    """Return where a resumed run differs bitwise from one that never stopped, and how much state was compared."""
    with fresh():
        trainer = make_trainer(case, folder / "whole", save_strategy="steps", save_steps=2, max_steps=4)
        trainer.train()
        expected, losses = everything(trainer), _losses(trainer)
        if trainer.is_deepspeed_enabled:
            trainer.model_wrapped.destroy()
    with fresh():
        model = make_model()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)  # the checkpoint's weights must come
        trainer = make_trainer(case, folder / "resumed", model=model, max_steps=4)
        trainer.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
        found = differences(expected, everything(trainer)) + differences(losses[2:], _losses(trainer)[-2:], "loss")
        if trainer.is_deepspeed_enabled:
            trainer.model_wrapped.destroy()
    return found, sum(len(state) for state in expected["state"])


def _losses(trainer: Any) -> list[dict[str, Any]]:
    """Return the log of each step: its loss, and its GSNR."""
    keys = ("loss", "gsnr_mean_ratio", "noise_scale_mean", "noise_scale_low", "noise_scale_high")
    records = [{key: record[key] for key in keys if key in record} for record in trainer.state.log_history]
    lines = [record for record in records if record]
    return [one | other for one, other in zip(lines[::2], lines[1::2], strict=True)]
