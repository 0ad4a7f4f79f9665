"""A language model at batches far above its noise scale: each twin against its base, and controls of its ratio.

Rate and beta1 are tuned for each optimizer, on equal grids for a twin and its base, with two seeds; five other seeds
are reported, paired by seed. A control (``evidence.controls``) and another schedule are tuned over the rate alone, at
beta1 = 0.9. Plain PyTorch, one process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

import ds_vrgd
from ds_vrgd.schedules import warmup_polynomial_lr
from evidence.bert_data import GENERAL_8K, SPEECHES
from evidence.bert_report import worth
from evidence.controls import CONTROLS, Control, controlled
from evidence.experiment import FULL, Experiment, Row
from evidence.language_model import (
    CAUSAL,
    HELD_OUT_SEED,
    MASKED,
    Text,
    accumulate,
    drawn_rows,
    held_out_loss,
    inputs_and_labels,
    make_model,
    make_optimizer,
    on_text,
    prepare,
)
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

#: The first rate of each base and of its twin.
RATES = {"AdamW": 2e-3, "LAMB": 1e-2, "Momentum": 0.25}
#: For Momentum, its momentum; 1 - beta1 doubles.
BETAS = (BETA1, 0.8, 0.6, 0.2)
HALF_STEP = math.sqrt(2.0)
EXAMPLES = 229_376  # 14 of the largest batches
CLIPPING = 1.0  # of one variant of a base
CURVE = 20  # evaluations of a run


@dataclass(frozen=True)
class Task:
    """Attributes:
    bases: their optimizers and twins are compared.
    controlled: the bases that have variants, and whose twins have ``controls``.
    betas: tried for beta1.
    model: a name of ``MODELS``.
    """

    objective: str
    batch: int
    k: int
    bases: tuple[str, ...] = ("AdamW", "LAMB")
    controlled: tuple[str, ...] = ()
    betas: tuple[float, ...] = BETAS[:2]
    controls: tuple[str, ...] = tuple(CONTROLS)
    model: str = "small"


#: The most telling first.
TASKS = (
    Task(CAUSAL, 2048, 32, ("AdamW", "LAMB", "Momentum"), ("AdamW", "LAMB"), BETAS),
    Task(CAUSAL, 2048, 32, ("AdamW",), ("AdamW",), controls=("permuted", "permuted once"), model="wide"),
    Task(CAUSAL, 4096, 32),
    Task(CAUSAL, 16384, 32),
    Task(MASKED, 1024, 32),
    Task(CAUSAL, 1024, 32),
    Task(CAUSAL, 2048, 64),
)


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
    clipping: largest norm of the gradient.
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
    clipping: float | None = None
    held_out: int = 2048


def settings(size: str) -> list[Setting]:
    """The plan: the first rate of every beta1 at the full size, and a grid without follow-up at the small one."""
    if size == FULL:
        return [
            replace(setting, beta1=beta1)
            for task, base in _compared()
            for setting in _pair(_setting(task, base), base)
            for beta1 in task.betas
        ]
    found = []
    for base in RATES:
        one = Setting("toy", SPEECHES, CAUSAL, 16, 384, 64, 8, base, 4.0 * RATES[base], BETA1, TUNING[0], held_out=64)
        variants = [replace(each, beta1=beta1) for each in _pair(one, base) for beta1 in BETAS[:2]]
        if base == "AdamW":
            variants += _variants(one, base, TASKS[0].controls)
        found += [replace(each, seed=seed) for seed in (TUNING[0], *REPORTED[:2]) for each in variants]
    return found


def _compared() -> list[tuple[Task, str]]:
    return [(task, base) for task in TASKS for base in task.bases]


def _setting(task: Task, base: str) -> Setting:
    rate, seed = RATES[base], TUNING[0]
    return Setting(task.model, GENERAL_8K, task.objective, 64, EXAMPLES, task.batch, task.k, base, rate, BETA1, seed)


def _pair(setting: Setting, base: str) -> list[Setting]:
    """A twin and its base."""
    return [replace(setting, optimizer=name) for name in (f"VR{base}", base)]


def _variants(setting: Setting, base: str, controls: Sequence[str]) -> list[Setting]:
    """Both clipped, the twin with each control, and the base with a longer warm-up and with another beta2."""
    twin, of_base = _pair(setting, base)
    clipped = [replace(one, clipping=CLIPPING) for one in (of_base, twin)]
    with_controls = [replace(twin, control=name) for name in controls]
    # What GSNR adds to clipping may have another cause than what it gives without.
    clipped += [replace(one, clipping=CLIPPING) for one in with_controls]
    return [*clipped, *with_controls, replace(of_base, warmup=0.35), replace(of_base, beta2=0.98)]


def follow_up(size: str, rows: Sequence[Row]) -> list[Setting]:
    """Rates, their half steps and the reported seeds: of each twin and its base, then of their variants.

    A twin and its base share all that one of them has tried or calls for, so that their grids are equal. Variants are
    tuned at beta1 = 0.9, and clipped twin and base at the best beta1, too.
    """
    if size != FULL:
        return []
    by_arm: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        by_arm.setdefault(arm_of(row), []).append(row)
    found: list[Setting] = []
    for task, base in _compared():
        pair = _pair(_setting(task, base), base)
        of_pair = [by_arm.get(arm_of(vars(one)), []) for one in pair]
        called = [_search(rows, task.betas, RATES[base]) for rows in of_pair]
        shared = [call for known in (*map(_points, of_pair), *called) for call in known if call[-1] in TUNING]
        for one, own in zip(pair, called, strict=True):
            calls = [*shared, *(call for call in own if call[-1] in REPORTED)]
            found += [replace(one, beta1=beta1, rate=rate, seed=seed) for beta1, rate, seed in calls]
        if base not in task.controlled:
            continue
        for variant in _variants(_setting(task, base), base, task.controls):
            of_original, of_variant = of_pair[variant.optimizer == base], by_arm.get(arm_of(vars(variant)), [])
            if not _complete(of_original, called[variant.optimizer == base]):
                continue
            is_tuned = variant.clipping and variant.control == NO_CONTROL
            at_best = best_point(of_original, task.betas)[0] if is_tuned else BETA1
            for beta1 in dict.fromkeys((BETA1, at_best)):
                _, rate = best_point(of_original, (beta1,))
                calls = _search([row for row in of_variant if row["beta1"] == beta1], (beta1,), rate)
                found += [replace(variant, beta1=beta1, rate=each, seed=seed) for _, each, seed in calls]
    return list(dict.fromkeys(found))


Call = tuple[float, float, int]  # beta1, rate, seed


def _points(rows: Sequence[Row]) -> dict[Call, None]:
    """Return what was tried, in the order of the rows."""
    return dict.fromkeys((row["beta1"], row["rate"], row["seed"]) for row in rows)


def _complete(rows: Sequence[Row], called: Sequence[Call]) -> bool:
    """Return whether the reported seeds were called for, and nothing that was called for is missing."""
    return called[-1][-1] in REPORTED and _points(rows).keys() >= set(called)


def _search(rows: Sequence[Row], betas: Sequence[float], start: float) -> list[Call]:
    """Return the beta1, rate and seed that the rows of one optimizer call for; a stage begins when the last is done.

    By factors of two from ``start`` at every beta1; half steps about the best, at beta1 = 0.9 and over all; and the
    best of these with the reported seeds.
    """
    tried = _points(rows).keys()
    coarse = [row for row in rows if row["seed"] in TUNING and math.log2(row["rate"] / start).is_integer()]
    called: list[Call] = []
    for beta1 in betas:
        of_beta1 = [row for row in coarse if row["beta1"] == beta1]
        calls = tune(of_beta1, "rate", worth, (start,), seeds=TUNING) or [(start, TUNING[0])]
        called += [(beta1, rate, seed) for rate, seed in calls]
    compared = list(dict.fromkeys([betas[:1], betas]))
    if tried >= set(called):
        points = [best_point(coarse, among) for among in compared]
        steps = [(beta1, rate * step) for beta1, rate in points for step in (HALF_STEP / 2.0, HALF_STEP)]
        called += [(*step, seed) for step in steps for seed in TUNING]
    if tried >= set(called):
        called += [(*best_point(rows, among), seed) for among in compared for seed in REPORTED]
    return called


def train(setting: Setting, text: Text) -> Row:
    """Train on a text and evaluate.

    Returns:
        ``curve``: update, held-out loss in nats per predicted token, and of a twin, else null, the mean raw ratio and
        the fractions clamped low and high. ``final``: the last loss, NaN if it is not finite. ``entropy``: that of the
        same tokens under their frequencies. ``updates``.
    """
    micro_batch = setting.batch // setting.k
    model = make_model(setting.model, text, setting.objective, setting.seed, [micro_batch], compiled=True)
    optimizer = make_optimizer(setting.optimizer, model, setting.rate, setting.beta1, setting.beta2)
    control = None if setting.control == NO_CONTROL else Control(setting.control, setting.seed)
    seen = drawn_rows(text, setting.examples, setting.seed)
    examples = inputs_and_labels(seen, setting.objective, text.mask, setting.seed)
    held_out = inputs_and_labels(text.held_out[: setting.held_out], setting.objective, text.mask, HELD_OUT_SEED)
    updates = setting.examples // setting.batch
    final = math.nan
    evaluated = {round((point + 1) * updates / CURVE) for point in range(CURVE)} | {updates}
    curve: list[list[float | None]] = []
    for update in range(1, updates + 1):
        for group in optimizer.param_groups:
            group["lr"] = warmup_polynomial_lr(
                update - 1, total_steps=updates, peak_lr=setting.rate, warmup_steps=round(setting.warmup * updates)
            )
        accumulate(model, examples, (update - 1) * setting.batch, setting.batch, setting.k)
        if setting.clipping is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clipping)
        with controlled(control):
            optimizer.step()
        if update in evaluated:
            final = held_out_loss(model, held_out, micro_batch)
            curve.append([update, final, *_ratios(setting, optimizer)])
            if not math.isfinite(final):
                break
        optimizer.zero_grad(set_to_none=False)
    return {"curve": curve, "final": final, "entropy": text.entropy(held_out[1]), "updates": updates}


def _ratios(setting: Setting, optimizer: torch.optim.Optimizer) -> list[float | None]:
    if not setting.optimizer.startswith("VR"):
        return [None, None, None]
    means = ds_vrgd.gsnr_stats(optimizer).means()
    return [means.mean_ratio, means.clamped_low, means.clamped_high]


EXPERIMENT = Experiment(
    "A language model: twins, bases and controls of the ratio",
    settings,
    on_text(train),
    tables,
    draw,
    (14.0, 9.0),
    follow_up,
    prepare,
    kind=lambda setting: (setting.model, setting.batch, setting.k),
)
