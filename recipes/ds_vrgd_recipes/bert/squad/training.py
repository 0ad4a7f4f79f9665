"""One training on the windows of a file: updates of the training loop, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from ds_vrgd.optim import OPTIMIZERS
from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd_recipes.bert.squad.settings import ADAMW, Settings
from ds_vrgd_recipes.bert.squad.windows import Ints, TokenisedQuestions, Windows
from ds_vrgd_recipes.run.errors import InputError, TrainingFailed
from ds_vrgd_recipes.run.groups import parameter_groups
from ds_vrgd_recipes.run.loop import Objective, Place, PlainEngine, Updates

_POOL = 64  # batches among which windows of like length are brought together
_SHOWN = 50  # updates over which the loss of a training is a mean
_MAX_NORM = 1.0


@dataclass(frozen=True)
class Trained:
    """Mean loss of the last 50 updates (nats, mean of start and end), number of updates, and seconds."""

    loss: float
    updates: int
    seconds: float


class Answering(Objective):
    """The start and the end of an answer in each window."""

    values = ("loss",)
    unit = "windows"
    way_out = "lower --lr"

    def __init__(self, tokenised: TokenisedQuestions, settings: Settings, seed: int, device: torch.device) -> None:
        self.run = settings
        order = batch_order(tokenised.lengths, settings.epochs, settings.batch_size, seed)
        self.phases = [len(order)]
        self._windows, self._order, self._seed = tokenised.windows.to(device), torch.from_numpy(order).to(device), seed
        self._longest = (
            tokenised.lengths[order]
            .reshape(len(order), settings.batch_size // settings.chunk, settings.chunk)
            .max(axis=2)
        )
        self._bf16 = settings.autocasts(device)

    @override
    def title(self, phase: int) -> str:
        return f"seed {self._seed}"

    @override
    def batches(
        self, phase: int, first_step: int, rank: int, ranks: int, device: torch.device
    ) -> Iterator[tuple[Tensor, int]]:
        for rows, longest in zip(self._order, self._longest.tolist(), strict=True):
            yield from zip(rows.split(self.run.chunk), longest, strict=True)

    @override
    def lr(self, phase: int, step: int) -> float:
        (steps,), peak = self.phases, self.run.lr
        warmup = round(self.run.warmup_ratio * steps)
        return warmup_polynomial_lr(step, total_steps=steps, peak_lr=peak, warmup_steps=warmup, power=1.0)

    @override
    def loss(self, engine: Any, batch: tuple[Tensor, int], place: Place) -> tuple[Tensor, Sequence[Tensor]]:
        loss = window_loss(engine, self._windows, *batch, self._bf16)
        return loss, (loss,)


def train(
    model: torch.nn.Module, tokenised: TokenisedQuestions, settings: Settings, seed: int, device: torch.device
) -> Trained:
    """Train ``model``, which is on ``device``, in place.

    Raises:
        InputError: fewer windows in all epochs than one batch.
        TrainingFailed: the loss is not finite, or too many updates are skipped.
    """
    task = Answering(tokenised, settings, seed, device)
    if not task.phases[0]:
        raise InputError(
            f"--batch-size {settings.batch_size} is more than the {len(tokenised.lengths)} windows of --train-file "
            f"times --epochs {settings.epochs}; lower it"
        )
    engine = PlainEngine(model, _optimizer(model, settings, device), settings.batch_size // settings.chunk, _MAX_NORM)
    torch.manual_seed(seed)  # of dropout: the same whatever the weights took
    model.train()
    started = time.perf_counter()
    try:
        losses = [record["loss"] for record, _ in Updates(task=task, engine=engine).all(0)]
    except TrainingFailed as failure:
        raise TrainingFailed(f"seed {seed}, {failure}") from failure
    return Trained(float(np.mean(losses[-_SHOWN:])), len(losses), time.perf_counter() - started)


def batch_order(lengths: Ints, epochs: int, batch_size: int, seed: int) -> Ints:
    """Return the windows of every batch, [updates, batch_size]; every epoch has each window once.

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


def window_loss(model: Any, windows: Windows, chosen: Tensor, longest: int, bf16: bool) -> Tensor:
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
