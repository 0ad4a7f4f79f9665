"""BERT against batch size, small (table 1): LAMB and AdamW and their variance-reduced twins, each with its own rates.

A fixed number of examples whatever the batch. Plain PyTorch, one process: bf16 autocast over fp32 weights, and every
micro-batch is a chunk. The trajectory is the engine's (docs/EXACTNESS.md); what is saved is the start of an engine for
each of some hundred short runs, and its time on the host, by which small models are limited. From one process a model
this small does not fill a GPU either: take ``--workers 2`` for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

import ds_vrgd
from benchmarks.ranks import device_type
from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd_recipes.bert.model import PretrainingModel, bert_config
from ds_vrgd_recipes.bert.runfile import ModelSection
from ds_vrgd_recipes.run.errors import TrainingFailed
from ds_vrgd_recipes.run.groups import parameter_groups
from evidence.bert_cloze import SETTINGS as CLOZE
from evidence.bert_cloze import fine_tuned, make
from evidence.bert_data import GENERAL, SPEECHES, Material, material
from evidence.bert_report import draw, tables, worth
from evidence.experiment import FULL, Experiment, Row
from evidence.report import grouped
from evidence.tuning import SEEDS, tune

MODELS = {
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 2, "intermediate_size": 512},
    "mini": {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    "toy": {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256},
}
#: Seen by a run of the full size, and by a few.
EXAMPLES, LONGER = 786_432, 1_048_576
TWINS = {"LAMB": "VRLAMB", "AdamW": "VRAdamW"}
UNTRAINED = "none"
BATCHES = (2048, 8192, 4096, 16384, 32768, 1024)
RATES = {"LAMB": (1e-2, 5e-3), "AdamW": (1e-3, 5e-4)}
WARMUP, WEIGHT_DECAY, CLIP = 0.1, 0.01, 1.0
EVALUATIONS = 8


@dataclass(frozen=True)
class Setting:
    """Attributes:
    text: a name of ``bert_data.TEXTS``.
    examples: seen by the run, some of them several times, with other masks; ``examples / batch`` updates.
    micro_batch: sequences of a chunk, so k = batch / micro_batch; for the optimizers without chunks, too.
    held_out: sequences of an evaluation.
    cloze: fine-tune on questions afterwards.
    """

    model: str
    text: str
    sequence_length: int
    examples: int
    batch: int
    micro_batch: int
    optimizer: str
    rate: float
    seed: int
    held_out: int = 2048
    cloze: bool = False


def settings(size: str) -> list[Setting]:
    """The most telling first: a sweep may be cut off at any place."""
    if size != FULL:
        rates = {"LAMB": 2e-2, "AdamW": 2e-3}
        return [
            Setting("toy", SPEECHES, 64, 2048, batch, 16, name, rates[base], 0, held_out=256)
            for batch in (256, 512)
            for base in TWINS
            for name in (TWINS[base], base)
        ]
    untrained = [Setting("mini", GENERAL, 128, 0, 2048, 128, UNTRAINED, 0.0, seed, cloze=True) for seed in SEEDS]
    trained = [_mini(name, batch, rate, SEEDS[0]) for batch in BATCHES for name, rate in _starts(RATES)]
    longer = [_mini(name, 2048, rate, SEEDS[0], LONGER) for name, rate in _starts({"LAMB": RATES["LAMB"]})]
    return [*_tiny(), *untrained, *trained, *longer]


def follow_up(size: str, rows: Sequence[Row]) -> list[Setting]:
    """Each optimizer's own best rate at every batch, and there the other seeds: at a twin's its base's, too."""
    if size != FULL:
        return []
    swept = [row for row in rows if row["examples"] == EXAMPLES]
    found: list[Setting] = []
    for (name, batch), of in grouped(swept, "optimizer", "batch").items():
        base = name.removeprefix("VR")
        for rate, seed in tune(of, "rate", worth, RATES[base]):
            names = (name,) if seed == SEEDS[0] else (name, base)
            found += [_mini(each, batch, rate, seed) for each in names]
    return list(dict.fromkeys(found))


def _starts(rates: dict[str, tuple[float, ...]]) -> Iterator[tuple[str, float]]:
    for base, of_base in rates.items():
        for rate in of_base:
            yield from ((TWINS[base], rate), (base, rate))


def _mini(optimizer: str, batch: int, rate: float, seed: int, examples: int | None = None) -> Setting:
    # 16 chunks are the least that the paper's study calls good enough.
    micro_batch = min(1024, batch // 16)
    return Setting("mini", GENERAL, 128, examples or EXAMPLES, batch, micro_batch, optimizer, rate, seed, cloze=True)


def _tiny() -> Iterator[Setting]:
    """With all seeds, a few minutes each on a CPU core; last the batch of the most updates, which takes the longest."""
    grids = {"LAMB": (2e-2, 1e-2, 4e-2), "AdamW": (1e-3, 2e-3, 5e-4, 4e-3)}
    for batch, seed in product((256, 512, 64), range(3)):
        for base, rates in grids.items():
            for rate, name in product(rates, (TWINS[base], base)):
                yield Setting("tiny", SPEECHES, 64, 32_768, batch, batch // 16, name, rate, seed, held_out=512)


def _source(setting: Setting) -> tuple[str, int, int, int]:
    # All runs of the full size but the few take their examples from one bank.
    examples = setting.examples if setting.model != "mini" else max(EXAMPLES, setting.examples)
    return setting.text, setting.sequence_length, examples, setting.held_out


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
        ``entropy``: that of the same tokens for who ignores context. ``updates``. And of ``cloze``, where neither the
        run nor the fine-tuning came apart, ``cloze_f1`` and ``cloze_exact_match``.
    """
    data = material(*_source(setting))
    torch.manual_seed(setting.seed)
    model = network(setting, data)
    if setting.optimizer == UNTRAINED:
        loss = held_out_loss(model, data, setting.sequence_length)
        row: Row = {"evaluations": [[0, loss, None, None, None]], "final": loss, "entropy": data.entropy, "updates": 0}
    else:
        row = train(setting, model, data)
    if setting.cloze and math.isfinite(row["final"]):
        assert data.tokenizer is not None
        with suppress(TrainingFailed):  # the rate is the same for all networks, and too high for some ruined ones
            row |= fine_tuned(model.network.config, model.network.state_dict(), data.tokenizer, setting.seed, CLOZE)
    return row


def network(setting: Setting, data: Material) -> PretrainingModel:
    """With random weights, on the device, and compiled where that is a GPU."""
    section = ModelSection.model_validate(MODELS[setting.model])
    model = PretrainingModel(bert_config(section, data.pieces)).to(device_type())
    if device_type() == "cuda":
        model.compile_layers()  # once a process: the next models of the same shape take the same code
    return model


def train(setting: Setting, model: PretrainingModel, data: Material) -> Row:
    """As ``measure`` says, but for the questions."""
    device = torch.device(device_type())
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


def prepare(to_measure: Sequence[Setting]) -> None:
    """Text, questions and examples, once for all processes."""
    if any(setting.cloze for setting in to_measure):
        make()
    for source in dict.fromkeys(map(_source, to_measure)):
        material(*source)
    material.cache_clear()  # the processes have copies of their own


EXPERIMENT = Experiment(
    "BERT: held-out loss against rate and batch",
    settings,
    measure,
    tables,
    draw,
    (11.0, 4.0),
    follow_up,
    prepare,
    kind=lambda setting: (setting.model, setting.batch),
)
