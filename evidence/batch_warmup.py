"""Batch warm-up: does a batch that follows the measured noise scale save updates, and how many examples does it cost?

A small causal language model is trained with fixed batches, with a batch that doubles at fixed numbers of examples, and
with a batch that follows ``ds_vrgd.NoiseScaleMeter``. Every policy measures the noise (gamma = 0.999999, so that the
step is the base optimizer's) and has k = 8 micro-batches. Its rate goes with the square root of the batch and is tuned
on one seed: by factors of two until the best has a worse one on either side, then by half steps about the best. Large
fixed batches have a second warm-up, since that of all policies is few of their updates; the better one counts. Three
other seeds are reported. After the warm-up the rate is constant, so that the loss after n examples does not depend on
when the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ds_vrgd
from ds_vrgd.noise import NoiseScale
from ds_vrgd.schedules import square_root_scaled_lr
from evidence.batch_warmup_report import (
    BY_HAND,
    FIXED,
    METER,
    REPORTED,
    TUNING,
    draw,
    policy_of,
    tables,
    worth,
)
from evidence.bert_data import GENERAL_8K, SPEECHES
from evidence.experiment import FULL, Experiment, Row
from evidence.language_model import (
    CAUSAL,
    HELD_OUT_SEED,
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
from evidence.language_report import BETA1
from evidence.meter import ALMOST_1, CHUNKS
from evidence.tuning import best, tune

BATCHES = (32, 64, 128, 256, 512)
#: Of the full size: tried for every policy, at the smallest batch.
RATES = (5e-4, 1e-3, 2e-3)
HALF_STEP = math.sqrt(2.0)
EXAMPLES = 262_144
#: Examples over which the rate rises; of fixed batches also this many updates, where these are more examples.
WARMUP, WARMUP_UPDATES = 8_192, 128
TARGET = 5.0


@dataclass(frozen=True)
class Setting:
    """Attributes:
    model: a name of ``MODELS``.
    text: a name of ``bert_data.TEXTS``.
    examples: the most sequences that the run sees, each once.
    most_updates: a run that takes more is given up.
    target: held-out loss in nats per token; the run ends at the first evaluation that reaches it.
    optimizer: a name of ``MADE``; its twin takes the steps, with gamma = 0.999999.
    policy: ``FIXED``, ``BY_HAND`` or ``METER``.
    batch: sequences in the first update, a power of two.
    largest: batch.
    base_batch: the batch at which ``rate`` is the rate; it goes with the square root of the batch.
    warmup: examples over which the rate rises linearly.
    interval: examples between two evaluations, a multiple of ``largest``.
    held_out: sequences of an evaluation.
    doubled_at: of ``BY_HAND``, the examples at which the batch doubles.
    decay: of the meter.
    every: of ``METER``, updates between two decisions.
    widest: of ``METER``, the largest ratio of the interval's ends at which a decision is made.
    k: micro-batches of an update.
    """

    model: str
    text: str
    sequence_length: int
    examples: int
    most_updates: int
    target: float
    optimizer: str
    policy: str
    batch: int
    largest: int
    base_batch: int
    rate: float
    seed: int
    warmup: int
    interval: int
    held_out: int
    doubled_at: tuple[int, ...] = ()
    decay: float = 0.98
    every: int = 16
    widest: float = 2.0
    k: int = CHUNKS

    def __post_init__(self) -> None:
        if self.interval % self.largest or self.examples % self.interval:
            raise ValueError(
                f"examples={self.examples}, interval={self.interval}, largest={self.largest}: each must be a multiple "
                "of the next one, so that every policy is evaluated after the same examples"
            )


def settings(size: str) -> list[Setting]:
    """The first rates of every policy, those with the most updates first; all seeds at the small size."""
    if size == FULL:
        one = Setting(
            "small", GENERAL_8K, 64, EXAMPLES, 2560, TARGET, "AdamW", FIXED, BATCHES[0], BATCHES[-1], BATCHES[0],
            RATES[0], TUNING, warmup=WARMUP, interval=2048, held_out=512,
        )  # fmt: skip
        policies = _policies(one, BATCHES)
        policies += [replace(policy, warmup=of) for policy in policies
                     if policy.policy == FIXED and (of := WARMUP_UPDATES * policy.batch) > WARMUP]  # fmt: skip
        return [replace(policy, rate=rate) for policy in policies for rate in RATES]
    one = Setting(
        "toy", SPEECHES, 16, 512, 32, 7.4, "AdamW", FIXED, 16, 64, 16, 8e-3, TUNING, warmup=128, interval=64,
        held_out=64, decay=0.9, every=4, widest=4.0,
    )  # fmt: skip
    return [replace(policy, seed=seed) for policy in _policies(one, (16, 64)) for seed in (TUNING, *REPORTED[:2])]


def _policies(one: Setting, batches: Sequence[int]) -> list[Setting]:
    """The fixed batches and both ways to raise the batch from the smallest to the largest."""
    doublings = round(math.log2(batches[-1] / batches[0]))
    doubled_at = tuple(one.examples >> (doublings - number) for number in range(doublings))
    raised = [replace(one, policy=METER), replace(one, policy=BY_HAND, doubled_at=doubled_at)]
    fixed = [replace(one, batch=batch, largest=batch) for batch in batches]
    return [fixed[0], *raised, *fixed[1:]]


def follow_up(size: str, rows: Sequence[Row]) -> list[Setting]:
    """Each policy's further rates, the half steps about its best one, and that one with the reported seeds."""
    if size != FULL:
        return []
    by_policy: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        by_policy.setdefault(policy_of(row), []).append(row)
    found = []
    for one in dict.fromkeys(replace(setting, rate=RATES[0]) for setting in settings(size)):
        called = search(by_policy.get(policy_of(vars(one)), []), RATES)
        found += [replace(one, rate=rate, seed=seed) for rate, seed in called]
    return found


def search(rows: Sequence[Row], starts: Sequence[float]) -> list[tuple[float, int]]:
    """Return the rates, each with a seed, that one policy's rows call for; a stage begins when the last is done."""
    tried = {(row["rate"], row["seed"]) for row in rows}
    tuned = [row for row in rows if row["seed"] == TUNING]
    coarse = [row for row in tuned if math.log2(row["rate"] / starts[0]).is_integer()]
    called = [(rate, TUNING) for rate in starts]
    called += tune(coarse, "rate", worth, starts, seeds=(TUNING,))
    if tried.issuperset(called):
        rate, _ = best(coarse, "rate", worth)
        called += [(rate * step, TUNING) for step in (HALF_STEP / 2.0, HALF_STEP)]
    if tried.issuperset(called):
        rate, _ = best(tuned, "rate", worth)
        called += [(rate, seed) for seed in REPORTED]
    return called


def batch_of_meter(batch: int, found: NoiseScale, *, largest: int, widest: float) -> int:
    """Return the next batch: the power of two nearest to the noise scale, at least ``batch``, at most twice that.

    It remains ``batch`` while the ends of the interval differ by more than the factor ``widest``.
    """
    if not 0.0 < found.low <= found.high <= widest * found.low:
        return batch
    nearest: int = 2 ** max(round(math.log2(found.value)), 0)
    return max(batch, min(nearest, 2 * batch, largest))


def batch_by_hand(first: int, seen: int, doubled_at: Sequence[int]) -> int:
    """Return the batch after ``seen`` examples."""
    return first << sum(seen >= examples for examples in doubled_at)


def train(setting: Setting, text: Text) -> Row:
    """Train to the target.

    Returns:
        ``curve``: at every evaluation the examples so far, the updates, the batch, the held-out loss in nats per
        token, and the noise scale with its interval, null before the first update. ``batches``: for each batch, the
        examples at which it began. ``final``: the last loss. ``entropy``: that of the same tokens under their
        frequencies. ``updates``: their number.
    """
    doublings = round(math.log2(setting.largest // setting.batch))
    sizes = [(setting.batch << number) // setting.k for number in range(doublings + 1)]
    model = make_model(setting.model, text, CAUSAL, setting.seed, sizes)
    optimizer = make_optimizer(f"VR{setting.optimizer}", model, setting.rate, BETA1, gamma=ALMOST_1)
    examples = inputs_and_labels(drawn_rows(text, setting.examples, setting.seed), CAUSAL, text.mask, setting.seed)
    held_out = inputs_and_labels(text.held_out[: setting.held_out], CAUSAL, text.mask, HELD_OUT_SEED)
    batch = wanted = setting.batch
    meter = _meter(setting, batch)
    seen = updates = 0
    final = held_out_loss(model, held_out, sizes[-1])
    curve: list[list[float | None]] = [[0, 0, batch, final, None, None, None]]
    batches = [[0, batch]]
    while seen < setting.examples and updates < setting.most_updates and final > setting.target:
        if setting.policy == BY_HAND:
            wanted = batch_by_hand(setting.batch, seen, setting.doubled_at)
        elif setting.policy == METER and wanted == batch and updates and updates % setting.every == 0:
            wanted = batch_of_meter(batch, meter.estimate(), largest=setting.largest, widest=setting.widest)
        # A batch ends at a multiple of itself, so that every policy is evaluated after the same examples.
        if wanted != batch and seen % wanted == 0:
            batch = wanted
            meter = _meter(setting, batch, meter)
            batches.append([seen, batch])
        accumulate(model, examples, seen, batch, setting.k)
        seen, updates = seen + batch, updates + 1
        peak = square_root_scaled_lr(setting.rate, setting.base_batch, batch)
        for group in optimizer.param_groups:
            group["lr"] = peak * min(1.0, seen / setting.warmup)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        meter.update(optimizer)
        if seen % setting.interval == 0:
            final, noise = held_out_loss(model, held_out, sizes[-1]), meter.estimate()
            curve.append([seen, updates, batch, final, noise.value, noise.low, noise.high])
            if not math.isfinite(final):
                break
    return {
        "curve": curve,
        "batches": batches,
        "final": final,
        "entropy": text.entropy(held_out[1]),
        "updates": updates,
    }


def _meter(setting: Setting, batch: int, before: ds_vrgd.NoiseScaleMeter | None = None) -> ds_vrgd.NoiseScaleMeter:
    """Return a meter for one batch, which continues another batch's: both measure single examples."""
    meter = ds_vrgd.NoiseScaleMeter(decay=setting.decay, chunk_size=batch / setting.k)
    if before is not None:
        meter.load_state_dict(before.state_dict())
    return meter


EXPERIMENT = Experiment(
    "Batch warm-up: fixed batches, a schedule made by hand, and the meter",
    settings,
    on_text(train),
    tables,
    draw,
    (14.0, 4.2),
    follow_up,
    prepare,
    kind=lambda setting: (setting.policy, setting.batch),
)
