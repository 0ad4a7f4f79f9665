"""A language model at batches far above its noise scale: each twin against its base, and controls of its ratio.

Rate and beta1 are tuned for each optimizer, on equal grids for a twin and its base, with two seeds; five other seeds
are reported, paired by seed. A control (``evidence.controls``) and another schedule are tuned over the rate alone, at
beta1 = 0.9 and at the best beta1 of what they are compared with. Plain PyTorch, one process, no clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_vrgd
from benchmarks.ranks import device_type
from ds_vrgd.schedules import warmup_polynomial_lr
from ds_vrgd_recipes.bert.evaluation import unigram_log_probabilities
from ds_vrgd_recipes.bert.examples import IGNORED_LABEL
from ds_vrgd_recipes.bert.store import Split
from ds_vrgd_recipes.run.groups import parameter_groups
from evidence.bert_data import GENERAL, HELD_OUT_BATCH, SPEECHES, prepared
from evidence.bert_report import worth
from evidence.controls import CONTROLS, Control, controlled
from evidence.experiment import FULL, Experiment, Row
from evidence.language_report import (
    BETA1,
    BETA2,
    NO_CONTROL,
    REPORTED,
    TUNING,
    WARMUP,
    arm_of,
    best_point,
    draw,
    tables,
)
from evidence.tuning import tune

#: Layers, width and heads.
MODELS = {"small": (4, 256, 4), "toy": (2, 32, 2)}
CAUSAL, MASKED = "causal", "masked"
MASKED_SHARE = 0.15
#: The first rate of each base and of its twin.
RATES = {"AdamW": 2e-3, "LAMB": 1e-2, "Momentum": 0.25}
#: Momentum has none, as its decay would not be decoupled.
WEIGHT_DECAY = {"AdamW": 0.01, "LAMB": 0.01, "Momentum": 0.0}
MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": ds_vrgd.VRAdamW,
    "LAMB": ds_vrgd.VRLAMB,
    "Momentum": ds_vrgd.VRMomentum,
}
#: For Momentum, its momentum; 1 - beta1 doubles.
BETAS = (BETA1, 0.8, 0.6, 0.2)
GAMMA = 0.1
HALF_STEP = math.sqrt(2.0)
EXAMPLES = 229_376  # 14 of the largest batches
#: Objective, batch and k, the most telling first; and whether there are controls.
TASKS = {
    (CAUSAL, 4096, 32): True,
    (CAUSAL, 8192, 32): False,
    (MASKED, 4096, 32): True,
    (CAUSAL, 1024, 32): False,
    (CAUSAL, 4096, 64): False,
    (CAUSAL, 16384, 32): False,
    (CAUSAL, 2048, 32): False,
}
CURVE = 20  # evaluations of a run
_HELD_OUT_SEED = 10_000  # of the masks


@dataclass(frozen=True)
class Setting:
    """Attributes:
    model: a name of ``MODELS``.
    text: a name of ``bert_data.TEXTS``.
    objective: "causal" or "masked".
    examples: sequences that the run sees, each once; ``examples / batch`` updates.
    k: micro-batches of an update.
    optimizer: a name of ``MADE``, with gamma = 1; or that of its twin, which begins with VR.
    control: a name of ``CONTROLS``; "none" for the twin's own ratio, and for a base.
    beta1: the momentum of Momentum.
    warmup: share of the updates; the rate falls linearly afterwards.
    held_out: sequences of an evaluation.
    """

    model: str
    text: str
    objective: str
    sequence_length: int
    examples: int
    batch: int
    k: int
    optimizer: str
    rate: float
    beta1: float
    seed: int
    control: str = NO_CONTROL
    beta2: float = BETA2
    warmup: float = WARMUP
    held_out: int = 2048


def settings(size: str) -> list[Setting]:
    """The plan: the first rate of every beta1 at the full size, and a grid without follow-up at the small one."""
    if size == FULL:
        return [
            replace(setting, beta1=beta1)
            for task in TASKS
            for base in RATES
            for setting in _pair(_setting(task, base), base)
            for beta1 in BETAS
        ]
    found = []
    for base in RATES:
        one = Setting("toy", SPEECHES, CAUSAL, 16, 384, 64, 8, base, 4.0 * RATES[base], BETA1, TUNING[0], held_out=64)
        variants = [replace(each, beta1=beta1) for each in _pair(one, base) for beta1 in BETAS[:2]]
        if base == "AdamW":
            variants += _variants(one, base)
        found += [replace(each, seed=seed) for seed in (TUNING[0], *REPORTED[:2]) for each in variants]
    return found


def _setting(task: tuple[str, int, int], base: str) -> Setting:
    objective, batch, k = task
    return Setting("small", GENERAL, objective, 64, EXAMPLES, batch, k, base, RATES[base], BETA1, TUNING[0])


def _pair(setting: Setting, base: str) -> list[Setting]:
    """A twin and its base."""
    return [replace(setting, optimizer=name) for name in (f"VR{base}", base)]


def _variants(setting: Setting, base: str) -> list[Setting]:
    """The twin with each control, and the base with a longer warm-up or, where it has one, another beta2."""
    twin, of_base = _pair(setting, base)
    found = [replace(twin, control=name) for name in CONTROLS] + [replace(of_base, warmup=0.35)]
    return found if base == "Momentum" else [*found, replace(of_base, beta2=0.98)]


def follow_up(size: str, rows: Sequence[Row]) -> list[Setting]:
    """Rates, their half steps and the reported seeds: of each twin and its base, then of their variants.

    A twin and its base share every rate that one of them calls for, so that their grids are equal.
    """
    if size != FULL:
        return []
    by_arm: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        by_arm.setdefault(arm_of(row), []).append(row)
    found: list[Setting] = []
    last: list[Setting] = []  # the variants at a tuned beta1
    for (task, has_controls), base in product(TASKS.items(), RATES):
        pair = _pair(_setting(task, base), base)
        of_pair = [by_arm.get(arm_of(vars(one)), []) for one in pair]
        called = [_search(rows, BETAS, RATES[base]) for rows in of_pair]
        shared = [call for own in called for call in own if call[-1] in TUNING]
        called = [[*shared, *(call for call in own if call[-1] in REPORTED)] for own in called]
        for one, own in zip(pair, called, strict=True):
            found += [replace(one, beta1=beta1, rate=rate, seed=seed) for beta1, rate, seed in own]
        if not has_controls or not all(map(_complete, of_pair, called)):
            continue
        for betas, wanted in (((BETA1,), found), (BETAS, last)):
            for variant in _variants(_setting(task, base), base):
                beta1, rate = best_point(of_pair[variant.optimizer == base], betas)
                of_beta1 = [row for row in by_arm.get(arm_of(vars(variant)), []) if row["beta1"] == beta1]
                called_by = _search(of_beta1, (beta1,), rate)
                wanted += [replace(variant, beta1=beta1, rate=each, seed=seed) for _, each, seed in called_by]
    return list(dict.fromkeys([*found, *last]))


Call = tuple[float, float, int]  # beta1, rate, seed


def _points(rows: Sequence[Row]) -> set[Call]:
    return {(row["beta1"], row["rate"], row["seed"]) for row in rows}


def _complete(rows: Sequence[Row], called: Sequence[Call]) -> bool:
    """Return whether the reported seeds were called for, and nothing that was called for is missing."""
    return called[-1][-1] in REPORTED and _points(rows).issuperset(called)


def _search(rows: Sequence[Row], betas: Sequence[float], start: float) -> list[Call]:
    """Return the beta1, rate and seed that the rows of one optimizer call for; a stage begins when the last is done.

    By factors of two from ``start`` at every beta1; half steps about the best, at beta1 = 0.9 and over all; and the
    best of these with the reported seeds.
    """
    tried = _points(rows)
    coarse = [row for row in rows if row["seed"] in TUNING and math.log2(row["rate"] / start).is_integer()]
    called: list[Call] = []
    for beta1 in betas:
        of_beta1 = [row for row in coarse if row["beta1"] == beta1]
        calls = tune(of_beta1, "rate", worth, (start,), seeds=TUNING) or [(start, TUNING[0])]
        called += [(beta1, rate, seed) for rate, seed in calls]
    compared = list(dict.fromkeys([betas[:1], betas]))
    if tried.issuperset(called):
        points = [best_point(coarse, among) for among in compared]
        steps = [(beta1, rate * step) for beta1, rate in points for step in (HALF_STEP / 2.0, HALF_STEP)]
        called += [(*step, seed) for step in steps for seed in TUNING]
    if tried.issuperset(called):
        called += [(*best_point(rows, among), seed) for among in compared for seed in REPORTED]
    return called


@dataclass(frozen=True)
class Text:
    """Token ids in rows of one length, on the device.

    Attributes:
        train, held_out: ``(n, length)`` int64.
        unigram: log probabilities of the pieces, ``(pieces,)``.
        mask: id of the piece that stands for a masked one.
    """

    train: Tensor
    held_out: Tensor
    unigram: Tensor
    mask: int


@lru_cache(maxsize=1)
def load_text(text: str, length: int) -> Text:
    """Return one of ``bert_data.TEXTS``: its documents end to end, cut into rows."""
    data = prepared(text)
    tokenizer = data.tokenizer
    train, held_out = (_rows(split, length, tokenizer.sep_token_id) for split in (data.train, data.held_out))
    unigram = torch.from_numpy(unigram_log_probabilities(data.unigram_counts)).to(device_type())
    return Text(train, held_out, unigram, tokenizer.mask_token_id)


def _rows(split: Split, length: int, separator: int) -> Tensor:
    """Return the whole rows of a split, with a separator before every document."""
    parts = [np.insert(of.tokens, of.sentences[of.documents[:-1]], separator) for of in split.shards]
    joined = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    return joined[: len(joined) // length * length].view(-1, length).to(device_type())


def inputs_and_labels(rows: Tensor, objective: str, mask: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return input ids and labels: the next tokens, or 15 % masked ones, drawn by ``seed``."""
    if objective == CAUSAL:
        return rows[:, :-1], rows[:, 1:]
    drawn = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < MASKED_SHARE
    chosen = drawn.to(rows.device)
    return rows.masked_fill(chosen, mask), rows.masked_fill(~chosen, IGNORED_LABEL)


class LanguageModel(nn.Module):
    """A pre-LN transformer whose output weights are those of its embedding; without dropout."""

    def __init__(self, model: str, pieces: int, length: int, *, causal: bool) -> None:
        super().__init__()
        layers, width, heads = MODELS[model]
        self.tokens, self.positions = nn.Embedding(pieces, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.causal = causal
        for weight in self.parameters():
            if weight.dim() > 1:  # the encoder's layers are copies of one
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Return the loss in nats, over the labels that are not ignored."""
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.positions.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device) if self.causal else None
        hidden = self.body(hidden, mask=mask, is_causal=self.causal)
        logits = functional.linear(hidden, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


def make_optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a setting: a base is its twin's class with gamma = 1."""
    base = setting.optimizer.removeprefix("VR")
    gamma = 1.0 if setting.optimizer == base else GAMMA
    if base == "Momentum":
        betas: dict[str, object] = {"momentum": setting.beta1}
    else:
        betas = {"betas": (setting.beta1, setting.beta2)}
    decay = WEIGHT_DECAY[base]
    return MADE[base](parameter_groups(model), lr=setting.rate, gamma=gamma, weight_decay=decay, **betas)


def measure(setting: Setting) -> Row:
    """Train and evaluate; on a CPU with one thread: so small a model gains nothing from others, which wait for it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(setting, load_text(setting.text, setting.sequence_length))
    finally:
        torch.set_num_threads(threads)


def train(setting: Setting, text: Text) -> Row:
    """Train on a text and evaluate.

    Returns:
        ``curve``: update, held-out loss in nats per predicted token, and of a twin, else null, the mean raw ratio and
        the fractions clamped low and high. ``final``: the last loss, NaN if it is not finite. ``entropy``: that of the
        same tokens under their frequencies. ``updates``.
    """
    if setting.examples > len(text.train):
        raise ValueError(
            f"examples={setting.examples}, but {setting.text!r} has {len(text.train)} sequences of "
            f"{setting.sequence_length} tokens: lower examples, or add a corpus to bert_data.TEXTS"
        )
    device = text.train.device
    torch.manual_seed(setting.seed)
    causal = setting.objective == CAUSAL
    model = LanguageModel(setting.model, len(text.unigram), setting.sequence_length, causal=causal).to(device)
    optimizer = make_optimizer(setting, model)
    control = None if setting.control == NO_CONTROL else Control(setting.control, setting.seed)
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(setting.seed))
    seen = text.train[order[: setting.examples].to(device)]
    examples = inputs_and_labels(seen, setting.objective, text.mask, setting.seed)
    held_out = inputs_and_labels(text.held_out[: setting.held_out], setting.objective, text.mask, _HELD_OUT_SEED)
    updates = setting.examples // setting.batch
    final = math.nan
    evaluated = {round((point + 1) * updates / CURVE) for point in range(CURVE)} | {updates}
    curve: list[list[float | None]] = []
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = warmup_polynomial_lr(
                update - 1, total_steps=updates, peak_lr=setting.rate, warmup_steps=round(setting.warmup * updates)
            )
        for ids, labels in _chunks(examples, (update - 1) * setting.batch, setting.batch, setting.batch // setting.k):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(ids, labels)
            (loss / setting.k).backward()
        with controlled(control):
            optimizer.step()
        if update in evaluated:
            final = held_out_loss(model, held_out)
            curve.append([update, final, *_ratios(setting, optimizer)])
            if not math.isfinite(final):
                break
        optimizer.zero_grad()
    labels = held_out[1][held_out[1] != IGNORED_LABEL]
    entropy = -float(text.unigram[labels].mean())
    return {"curve": curve, "final": final, "entropy": entropy, "updates": updates}


def _chunks(examples: Sequence[Tensor], first: int, count: int, size: int) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(of[first : first + count].split(size) for of in examples), strict=True)


def _ratios(setting: Setting, optimizer: torch.optim.Optimizer) -> list[float | None]:
    if not setting.optimizer.startswith("VR"):
        return [None, None, None]
    means = ds_vrgd.gsnr_stats(optimizer).means()
    return [means.mean_ratio, means.clamped_low, means.clamped_high]


@torch.no_grad()
def held_out_loss(model: nn.Module, examples: Sequence[Tensor]) -> float:
    """Return the loss over all predicted tokens, nats each."""
    device = examples[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for ids, labels in _chunks(examples, 0, len(examples[0]), HELD_OUT_BATCH):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            total += model(ids, labels, "sum").double()
    return float(total) / int((examples[1] != IGNORED_LABEL).sum())


def prepare(to_measure: Sequence[Setting]) -> None:
    """Prepare the texts once for all processes."""
    for text in dict.fromkeys(setting.text for setting in to_measure):
        prepared(text)


EXPERIMENT = Experiment(
    "A language model: twins, bases and controls of the ratio",
    settings,
    measure,
    tables,
    draw,
    (14.0, 9.0),
    follow_up,
    prepare,
    kind=lambda setting: (setting.model, setting.batch, setting.k, setting.control),
)
