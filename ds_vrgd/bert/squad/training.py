"""One training on the windows of a file."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tqdm import tqdm

from ds_vrgd.bert.squad.settings import ADAMW, Settings
from ds_vrgd.bert.squad.windows import Ints, TokenisedQuestions, Windows
from ds_vrgd.optim import OPTIMIZERS
from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd.training.errors import InputError, TrainingFailed
from ds_vrgd.training.groups import parameter_groups

_POOL = 64  # batches among which windows of like length are brought together
_LOOK_EVERY = 50  # updates between looks at the loss, for each of which the host waits for the device
_MAX_NORM = 1.0


@dataclass(frozen=True)
class Trained:
    """Mean loss of the last updates (nats, mean of start and end), number of updates, and seconds."""

    loss: float
    updates: int
    seconds: float


def train(
    model: torch.nn.Module, tokenised: TokenisedQuestions, settings: Settings, seed: int, device: torch.device
) -> Trained:
    """Train ``model``, which is on ``device``, in place.

    Raises:
        InputError: fewer windows in all epochs than one batch.
        TrainingFailed: the loss is not finite.
    """
    batches = batch_order(tokenised.lengths, settings.epochs, settings.batch_size, seed)
    if not len(batches):
        raise InputError(
            f"--batch-size {settings.batch_size} is more than the {len(tokenised.lengths)} windows of --train-file "
            f"times --epochs {settings.epochs}; lower it"
        )
    windows = tokenised.windows.to(device)
    on_device = torch.from_numpy(batches).to(device)
    longest = tokenised.lengths[batches].reshape(len(batches), -1, settings.chunk).max(axis=2)
    optimizer = _optimizer(model, settings, device)
    warmup = round(settings.warmup_ratio * len(batches))
    bf16 = settings.autocasts(device)
    torch.manual_seed(seed)  # of dropout: the same whatever the weights took
    model.train()
    losses = torch.zeros((), device=device)
    looked, mean = 0, math.nan
    started = time.perf_counter()
    bar = tqdm(range(len(batches)), desc=f"seed {seed}", dynamic_ncols=True)
    for step in bar:
        lr = warmup_polynomial_lr(step, total_steps=len(batches), peak_lr=settings.lr, warmup_steps=warmup, power=1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for chosen, width in zip(on_device[step].split(settings.chunk), longest[step].tolist(), strict=True):
            loss = window_loss(model, windows, chosen, width, bf16) * (settings.chunk / settings.batch_size)
            loss.backward()
            losses += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % _LOOK_EVERY == 0 or step + 1 == len(batches):
            mean = losses.item() / (step + 1 - looked)
            looked = step + 1
            losses.zero_()
            if not math.isfinite(mean):
                raise TrainingFailed(f"seed {seed}, update {step + 1}: the loss is {mean}; lower --lr")
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
    return Trained(mean, len(batches), time.perf_counter() - started)


def batch_order(lengths: Ints, epochs: int, batch_size: int, seed: int) -> Ints:
    """Which windows are in which batch, [updates, batch_size]; every epoch has each window once.

    A batch holds windows of like length, which saves padding; the order of the batches does not depend on it. Batches
    run on over the end of an epoch; what is left after the last whole one is dropped.
    """
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(lengths)) for _ in range(epochs)])
    updates = len(order) // batch_size
    for begin in range(0, updates * batch_size, _POOL * batch_size):
        pool = order[begin : min(begin + _POOL * batch_size, updates * batch_size)]
        rows = pool[np.argsort(lengths[pool], kind="stable")].reshape(-1, batch_size)
        order[begin : begin + len(pool)] = rng.permutation(rows).ravel()
    return order[: updates * batch_size].reshape(updates, batch_size)


def window_loss(
    model: torch.nn.Module, windows: Windows, chosen: torch.Tensor, longest: int, bf16: bool
) -> torch.Tensor:
    """Mean cross-entropy of start and end over the windows ``chosen``; padding has no share in it."""
    inputs = windows.inputs(chosen, longest)
    with torch.autocast(chosen.device.type, torch.bfloat16, enabled=bf16):
        output = model(**inputs)
    padding = inputs["attention_mask"] == 0
    start, end = (
        functional.cross_entropy(logits.float().masked_fill(padding, -torch.inf), places[chosen])
        for logits, places in ((output.start_logits, windows.starts), (output.end_logits, windows.ends))
    )
    return (start + end) / 2


def _optimizer(model: torch.nn.Module, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    arguments: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay}
    groups = parameter_groups(model)
    if settings.optimizer == ADAMW:
        return torch.optim.AdamW(groups, fused=device.type == "cuda", **arguments)
    return OPTIMIZERS[settings.optimizer](groups, **arguments)
