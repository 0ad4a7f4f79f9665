"""Every pair of optimizer and schedule, by where each comes from, with and without offload, at every ZeRO stage."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch

import ds_vrgd
from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.weights import master_weights
from ds_vrgd.schedules import warmup_polynomial_lr
from tests.support.hf import LR, Corpus, deepspeed_config, fresh, make_model, training_arguments
from tests.support.hf import Case as TrainerCase
from tests.support.hf_accelerate import cheap_cpu_adam
from tests.support.model import batches, param_groups
from tests.support.model import make_model as make_tiny_model

STAGES = (0, 1, 2, 3)
OPTIMIZERS = ("JSON", "instance", "class", "factory")
SCHEDULES = ("JSON", "Trainer", "ours", "none")
UNFORCED = "cpu, unforced"
OFFLOADS = ("none", "cpu", UNFORCED, "nvme")
STEPS, WARMUP, ACCUMULATION = 4, 2, 2
ARGUMENTS: dict[str, Any] = {"lr": LR, "weight_decay": 0.1}


@dataclass(frozen=True)
class Pair:
    """One cell of the table."""

    optimizer: str
    schedule: str
    offload: str
    stage: int

    def zero(self, folder: Path) -> dict[str, Any]:
        """The JSON's ``zero_optimization``, and what goes with it."""
        section: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500}
        if self.stage == 3:
            section["stage3_param_persistence_threshold"] = 0
        if self.offload != "none":
            section["offload_optimizer"] = {"device": self.offload.partition(",")[0]}
        if self.offload == "nvme":
            section["offload_optimizer"]["nvme_path"] = str(folder)
        return {"zero_optimization": section} | (
            {"zero_force_ds_cpu_optimizer": False} if self.offload == UNFORCED else {}
        )


ALL = [Pair(*cell) for cell in itertools.product(OPTIMIZERS, SCHEDULES, OFFLOADS, STAGES)]


@dataclass(frozen=True)
class Trained:
    """The result of a pair that works: its weights, flat, and the learning rate of every step."""

    weights: torch.Tensor
    rates: list[float]


def expected_rates(schedule: str) -> list[float]:
    """Return the learning rate of each step, from the schedules' own formulas."""
    if schedule == "none":
        return [LR] * STEPS
    if schedule == "ours":
        return [_ours(step) * LR for step in range(STEPS)]
    rising = [LR * step / WARMUP for step in range(WARMUP)]
    linear = rising + [LR * (STEPS - step) / (STEPS - WARMUP) for step in range(WARMUP, STEPS)]
    # DeepSpeed's own schedules are a step late: the first rate holds for two steps.
    return linear if schedule == "Trainer" else [linear[0], *linear[:-1]]


def _ours(step: int) -> float:
    # torch asks for the rate of the step after the last, too.
    return warmup_polynomial_lr(min(step, STEPS - 1), total_steps=STEPS, peak_lr=1.0, warmup_steps=1)


def run_pair(pair: Pair, folder: Path) -> Trained | str:
    """Train a few steps; the text of the error if there is one."""
    try:
        return _with_trainer(pair, folder) if pair.schedule == "Trainer" else _with_engine(pair, folder)
    except Exception as error:
        text = str(error).replace(str(folder), "/some/folder")
        return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '0x...', text)}"


def _with_engine(pair: Pair, folder: Path) -> Trained:
    model = make_tiny_model()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": 10**9,
        **pair.zero(folder),
    }
    groups = param_groups(model, adapt=False)
    given: dict[str, Any] = {"model": model, "model_parameters": groups, "config": config}
    if pair.optimizer == "JSON":
        config["optimizer"] = {"type": "VRLAMB", "params": ARGUMENTS}
    else:
        for group in groups:  # a class is called with nothing but the parameters
            group.setdefault("weight_decay", ARGUMENTS["weight_decay"])
            group["lr"] = LR
        given["optimizer"] = {
            "instance": lambda: ds_vrgd.VRLAMB(groups),
            "class": lambda: ds_vrgd.VRLAMB,
            "factory": lambda: functools.partial(ds_vrgd.VRLAMB, **ARGUMENTS),
        }[pair.optimizer]()
    if pair.schedule == "JSON":
        schedule = {"warmup_max_lr": LR, "warmup_min_lr": 0.0, "warmup_num_steps": WARMUP, "total_num_steps": STEPS}
        config["scheduler"] = {"type": "WarmupDecayLR", "params": schedule | {"warmup_type": "linear"}}
    elif pair.schedule == "ours":
        given["lr_scheduler"] = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, _ours)
    engine, *_ = deepspeed.initialize(**given)
    rates = []
    for step in range(STEPS):
        for index, tokens in enumerate(batches(step, ACCUMULATION)):
            engine.backward(engine(tokens))
            if index == ACCUMULATION - 1:
                rates.append(engine.basic_optimizer.param_groups[0]["lr"])
            engine.step()
    return _finish(engine, rates)


def _with_trainer(pair: Pair, folder: Path) -> Trained:
    from transformers import Trainer

    from ds_vrgd.hf import VRTrainerMixin

    class VRTrainer(VRTrainerMixin, Trainer):  # type: ignore[misc]
        pass

    with fresh(), cheap_cpu_adam():
        model = make_model()
        config = deepspeed_config(pair.stage, "VRLAMB" if pair.optimizer == "JSON" else None) | pair.zero(folder)
        given: dict[str, Any] = {
            "JSON": {},
            "instance": {"optimizers": (ds_vrgd.VRLAMB(model.parameters(), **ARGUMENTS), None)},
            "class": {"optimizer_cls_and_kwargs": (ds_vrgd.VRLAMB, {})},
            "factory": {"optimizer_cls_and_kwargs": (functools.partial(ds_vrgd.VRLAMB, gamma=0.1), {})},
        }[pair.optimizer]
        case = TrainerCase(pair.stage, accumulation=ACCUMULATION)
        arguments = training_arguments(case, folder, max_steps=STEPS, warmup_steps=WARMUP, deepspeed=config)
        trainer = VRTrainer(model=model, args=arguments, train_dataset=Corpus(), **given)
        trainer.train()
        rates = [record["learning_rate"] for record in trainer.state.log_history if "learning_rate" in record]
        if (
            pair.optimizer == "JSON"
        ):  # then the engine steps the schedule, and the Trainer logs the rate of the next step
            rates = [0.0, *rates[:-1]]
        return _finish(trainer.model_wrapped, rates)


def _finish(engine: Any, rates: list[float]) -> Trained:
    assert type(engine.basic_optimizer) is ds_vrgd.VRLAMB
    assert ds_vrgd.gsnr_stats(engine).k == ACCUMULATION
    masters = master_weights(engine)
    engine.destroy()
    return Trained(torch.cat([masters[name] for name in sorted(masters)]), rates)


def run_pairs(rank: int, pairs: list[Pair], folder: str) -> dict[Pair, Trained | str]:
    """Run all of them in one process."""
    return {pair: run_pair(pair, Path(folder)) for pair in pairs}


def judge(found: dict[Pair, Trained | str]) -> dict[Pair, str]:
    """Return "works", the error, or WRONG: all pairs of a schedule must train alike, at the rates of that schedule."""
    verdicts: dict[Pair, str] = {}
    for pair, outcome in found.items():
        if isinstance(outcome, str):
            verdicts[pair] = outcome
            continue
        first = next(
            other for of, other in found.items() if of.schedule == pair.schedule and not isinstance(other, str)
        )
        apart = norm_of([outcome.weights - first.weights]) / norm_of([first.weights])
        expected = expected_rates(pair.schedule)
        late = max(abs(one - other) for one, other in zip(outcome.rates, expected, strict=True))
        fits = apart <= 8e-7 and late <= 1e-9
        verdicts[pair] = "works" if fits else f"WRONG: weights {apart:.1e} apart, rates {outcome.rates}, not {expected}"
    return verdicts
