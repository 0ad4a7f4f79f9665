"""BERT against batch size, small (table 1): LAMB and AdamW and their variance-reduced twins, each with its own rates.

A fixed number of examples whatever the batch. Plain PyTorch, one process: bf16 autocast over fp32 weights, and every
micro-batch is a chunk. The trajectory is the engine's (docs/EXACTNESS.md); what is saved is the start of an engine for
each of some hundred runs of a few seconds, and its time on the host, by which small models are limited. From one
process a model this small does not fill a GPU either: take ``--workers 3``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import ds_vrgd
from benchmarks.evidence.bert_data import Material, material
from benchmarks.evidence.bert_report import draw, tables
from benchmarks.evidence.experiment import FULL, Experiment, Row
from benchmarks.ranks import device_type
from ds_vrgd.bert.model import PretrainingModel, bert_config
from ds_vrgd.bert.runfile import ModelSection
from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd.training.groups import parameter_groups

MODELS = {
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "toy": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256},
}
TWINS = {"LAMB": "VRLAMB", "AdamW": "VRAdamW"}
WARMUP, WEIGHT_DECAY, CLIP = 0.1, 0.01, 1.0
EVALUATIONS = 8


@dataclass(frozen=True)
class Setting:
    """Attributes:
    examples: seen by the run, some of them several times, with other masks; ``examples / batch`` updates.
    micro_batch: sequences of a chunk, so k = batch / micro_batch; for the optimizers without chunks, too.
    """

    model: str
    sequence_length: int
    examples: int
    batch: int
    micro_batch: int
    optimizer: str
    rate: float
    seed: int
    held_out: int = 2048  # sequences of an evaluation


def settings(size: str) -> list[Setting]:
    """The most telling first: a sweep may be cut off at any place."""
    if size != FULL:
        rates = {"LAMB": 2e-2, "AdamW": 2e-3}
        return [
            Setting("toy", 64, 2048, batch, 16, name, rates[base], 0, held_out=256)
            for batch in (256, 512)
            for base in TWINS
            for name in (TWINS[base], base)
        ]
    grids = {"LAMB": (1e-2, 5e-3, 2e-2), "AdamW": (1e-3, 5e-4, 2e-3)}
    wider = {"LAMB": (2.5e-3, 4e-2), "AdamW": (2.5e-4, 4e-3)}

    def runs(examples: int, batch: int, base: str, rates: tuple[float, ...], seed: int) -> Iterator[Setting]:
        # 16 chunks are the least that the paper's study calls good enough; more of them, not larger ones, from 256 on.
        micro_batch = min(256, batch // 16)
        for rate in rates:
            for name in (TWINS[base], base):
                yield Setting("mini", 128, examples, batch, micro_batch, name, rate, seed)

    few, many = 262_144, 524_288
    plan = [(few, 2048, "LAMB", grids["LAMB"], 0)]
    plan += [(many, batch, base, grids[base], 0) for base in grids for batch in (2048, 8192)]
    plan += [(many, batch, base, grids[base], seed) for seed in (1, 2) for base in grids for batch in (8192, 2048)]
    plan += [(many, batch, base, grids[base], 0) for batch in (32768, 4096, 16384, 1024) for base in grids]
    plan += [(many, batch, base, wider[base], 0) for batch in (2048, 8192, 32768) for base in grids]
    plan += [
        (many, batch, base, grids[base], s) for s in (1, 2) for batch in (32768, 4096, 16384, 1024) for base in grids
    ]
    return [setting for part in plan for setting in runs(*part)]


def make_optimizer(setting: Setting, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a setting; the bases take the same options as their twins."""
    groups = parameter_groups(model)
    if setting.optimizer == "AdamW":
        fused = device_type() == "cuda"
        return torch.optim.AdamW(groups, lr=setting.rate, weight_decay=WEIGHT_DECAY, fused=fused)
    named: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "LAMB": ds_vrgd.LAMB,
        "VRLAMB": ds_vrgd.VRLAMB,
        "VRAdamW": ds_vrgd.VRAdamW,
    }
    return named[setting.optimizer](groups, lr=setting.rate, weight_decay=WEIGHT_DECAY)


def measure(setting: Setting) -> Row:
    """Train and evaluate.

    Returns:
        ``evaluations``: update, held-out masked-LM loss in nats per masked token, and of the variance-reduced the mean
        raw ratio and the fractions clamped low and high, else null. ``final``: the last loss, NaN if it is not finite.
        ``entropy``: that of the same tokens for who ignores context. ``updates``.
    """
    most = max(each.examples for each in settings(FULL)) if setting.model == "mini" else setting.examples
    shape = tuple(MODELS[setting.model].items())
    return train(setting, material(shape, setting.sequence_length, most, setting.held_out))


def train(setting: Setting, data: Material) -> Row:
    """As ``measure`` says."""
    device = torch.device(device_type())
    torch.manual_seed(setting.seed)
    section = ModelSection.model_validate(MODELS[setting.model])
    model = PretrainingModel(bert_config(section, data.pieces)).to(device)
    optimizer = make_optimizer(setting, model)
    bank = data.bank.ordered(torch.randperm(setting.examples, generator=torch.Generator().manual_seed(setting.seed)))
    updates, k = setting.examples // setting.batch, setting.batch // setting.micro_batch
    evaluated = {round((place + 1) * updates / EVALUATIONS) for place in range(EVALUATIONS)} | {updates}
    evaluations: list[list[float | None]] = []
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = warmup_polynomial_lr(
                update - 1, total_steps=updates, peak_lr=setting.rate, warmup_steps=round(WARMUP * updates)
            )
        first = (update - 1) * setting.batch
        for turn in range(k):
            batch = bank.micro_batch(first + turn * setting.micro_batch, setting.micro_batch)
            with _autocast(device):
                masked_lm, next_sentence = model(**batch, longest=setting.sequence_length)
            ((masked_lm + next_sentence) / k).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        if update in evaluated:
            loss = held_out_loss(model, data, setting.sequence_length)
            evaluations.append([update, loss, *_clamped(setting, optimizer)])
            if not math.isfinite(loss):
                break
        optimizer.zero_grad()
    final = evaluations[-1][1]
    return {"evaluations": evaluations, "final": final, "entropy": data.entropy, "updates": updates}


def _autocast(device: torch.device) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _clamped(setting: Setting, optimizer: torch.optim.Optimizer) -> list[float | None]:
    if not setting.optimizer.startswith("VR"):
        return [None, None, None]
    means = ds_vrgd.gsnr_stats(optimizer).means()
    return [means.mean_ratio, means.clamped_low, means.clamped_high]


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, data: Material, longest: int) -> float:
    """Masked-LM loss over all held-out batches, nats per masked token."""
    model.eval()
    total, count = torch.zeros((), dtype=torch.float64, device=data.bank.labels.device), 0
    for batch in data.held_out:
        with _autocast(total.device):
            masked_lm, _ = model(**batch, longest=longest)
        total += masked_lm.double() * len(batch["labels"])
        count += len(batch["labels"])
    model.train()
    return float(total) / count


EXPERIMENT = Experiment("BERT: held-out loss against rate and batch", settings, measure, tables, draw, (11.0, 4.0))
