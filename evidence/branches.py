"""The critical batch size measured by branching a run, and the noise scale that the meter reports at the branch.

After Merrill et al. (2025, "Critical Batch Size Revisited", arXiv 2505.23971), who reject the gradient noise scale as a
proxy of the critical batch size. A trunk runs at a small batch and, after a warm-up, at a constant rate. At some of its
updates the state of model and optimizer is kept. Branches continue from it over the same examples with other batches,
each at the trunk's rate and at that rate times the square root of the batches' ratio. The critical batch is the largest
one whose held-out loss after these examples is that of the trunk's batch, up to a tolerance.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import ds_vrgd
from ds_vrgd.schedules import square_root_scaled_lr
from evidence.bert_data import GENERAL_8K, HELD_OUT_BATCH, SPEECHES
from evidence.bert_report import worth
from evidence.branches_report import SAME, SQUARE_ROOT, draw, tables
from evidence.experiment import FULL, Experiment, Row
from evidence.language_model import (
    CAUSAL,
    Examples,
    LanguageModel,
    Text,
    accumulate,
    chunks,
    drawn_rows,
    inputs_and_labels,
    make_model,
    make_optimizer,
    on_text,
    prepare,
)
from evidence.language_report import BETA1, BETA2
from evidence.meter import ALMOST_1, CHUNKS
from evidence.tuning import SEEDS, best, tune

TUNE, BRANCH = "tune", "branch"
#: The rate of each optimizer at the full size from which the grid begins, at a batch of 32.
RATES = {"AdamW": 5e-4, "LAMB": 2.5e-3}
GRID = (0.5, 1.0, 2.0)
LARGEST_MICRO_BATCH = 256


@dataclass(frozen=True)
class Setting:
    """Attributes:
    kind: "tune" runs the trunk alone, "branch" the trunk with all its branches.
    model: a name of ``MODELS``.
    text: a name of ``bert_data.TEXTS``.
    optimizer: AdamW or LAMB.
    rate: of the trunk, after ``warmup`` updates.
    batch: sequences in an update of the trunk.
    points: updates of the trunk after which it branches, none of them within the warm-up.
    batches: of the branches; ``batch`` is one of them.
    window: sequences that a branch sees, a multiple of each batch.
    evaluations: held-out losses whose mean is compared: at the end of the window and before it, each a largest batch
        after the last.
    metered: updates of the trunk after a point over which the noise scale is averaged.
    k: micro-batches of these updates.
    held_out: sequences of an evaluation.
    """

    kind: str
    model: str
    text: str
    sequence_length: int
    optimizer: str
    rate: float
    seed: int
    batch: int
    warmup: int
    points: tuple[int, ...]
    batches: tuple[int, ...]
    window: int
    evaluations: int
    metered: int
    held_out: int
    k: int = CHUNKS
    beta1: float = BETA1
    beta2: float = BETA2


def settings(size: str) -> list[Setting]:
    """The trunks at each rate of the grid at the full size; at the small one branches at one rate."""
    if size == FULL:
        return [replace(of, kind=TUNE, rate=factor * of.rate, seed=SEEDS[0]) for of in _starts() for factor in GRID]
    toy = Setting(
        BRANCH, "toy", SPEECHES, 8, "AdamW", 4e-3, SEEDS[0], 16, 8, (8, 24, 48), (8, 16, 32), 64, 2, 4, 64
    )  # fmt: skip
    return [replace(toy, optimizer=name, rate=8.0 * rate) for name, rate in RATES.items()]


def _starts() -> list[Setting]:
    """Return the branches of each model and optimizer at the middle of the grid."""
    batches = (16, 32, 64, 128, 256, 512, 1024)
    return [
        Setting(
            BRANCH, model, GENERAL_8K, 64, optimizer, rate, SEEDS[0], 32, 64,
            (128, 512, 2048), batches, 8192, 2, 128, 1024,
        )
        for model in ("small", "wide")
        for optimizer, rate in RATES.items()
    ]  # fmt: skip


def follow_up(size: str, rows: Sequence[Row]) -> list[Setting]:
    """More rates of a trunk whose best one is at the edge of the grid; then all seeds' branches at the best rate."""
    found: list[Setting] = []
    if size != FULL:
        return found
    for start in _starts():
        tried = [
            row for row in rows if (row["kind"], row["model"], row["optimizer"]) == (TUNE, start.model, start.optimizer)
        ]
        starts = [factor * start.rate for factor in GRID]
        if not {row["rate"] for row in tried} >= set(starts):
            continue
        calls = tune(tried, "rate", worth, starts, seeds=SEEDS[:1])
        found += [replace(start, kind=TUNE, rate=rate, seed=seed) for rate, seed in calls]
        if not calls:
            rate, _ = best(tried, "rate", worth)
            found += [replace(start, rate=rate, seed=seed) for seed in SEEDS]
    return found


@dataclass(frozen=True)
class State:
    """The state of a run, shared with nothing that changes."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]


class Run:
    """A model and its optimizer, whose state can be kept, and restored as often as wanted.

    Args:
        twin: whether the optimizer is the variance-reducing one at a gamma of almost 1, which measures the noise and
            otherwise updates as its base does.
    """

    def __init__(self, setting: Setting, text: Text, *, twin: bool = False) -> None:
        name = f"VR{setting.optimizer}" if twin else setting.optimizer
        sizes = {setting.batch // setting.k} if twin else {min(of, LARGEST_MICRO_BATCH) for of in setting.batches}
        self.model: LanguageModel = make_model(setting.model, text, CAUSAL, setting.seed, sizes)
        self.optimizer = make_optimizer(name, self.model, setting.rate, setting.beta1, setting.beta2, gamma=ALMOST_1)

    def keep(self) -> State:
        """Return a copy of the state between two updates."""
        return State(copy.deepcopy(self.model.state_dict()), copy.deepcopy(self.optimizer.state_dict()))

    def restore(self, state: State) -> None:
        """Continue from a state. The optimizer takes copies: torch's would update the tensors that it loads."""
        self.model.load_state_dict(state.model)
        self.optimizer.load_state_dict(copy.deepcopy(state.optimizer))

    def advance(
        self,
        examples: Examples,
        batch: int,
        rates: Sequence[float],
        k: int | None = None,
        meter: ds_vrgd.NoiseScaleMeter | None = None,
    ) -> None:
        """Update once at each rate, each time with the next ``batch`` examples, in k micro-batches.

        Args:
            k: None for as few as fit.
            meter: counts each update.
        """
        k = k or math.ceil(batch / LARGEST_MICRO_BATCH)
        for update, rate in enumerate(rates):
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            accumulate(self.model, examples, update * batch, batch, k)
            self.optimizer.step()
            if meter is not None:
                meter.update(self.optimizer)
            self.optimizer.zero_grad(set_to_none=False)


@torch.no_grad()
def losses(model: LanguageModel, examples: Examples) -> Tensor:
    """Return the loss of each sequence in nats a token, ``(n,)`` float64, on the device."""
    parts = [
        model.loss(ids, labels, "none").view(len(ids), -1).double().mean(1)
        for ids, labels in chunks(examples, 0, len(examples[0]), HELD_OUT_BATCH)
    ]
    return torch.cat(parts)


def run_trunk(setting: Setting, text: Text) -> Row:
    """Run a trunk on a text, and its branches if the setting has some.

    Returns:
        ``final``: the held-out loss of the trunk at the last point. ``at_points``: the results of :func:`branch_off`
        at each point, an empty list if the setting only tunes.
    """
    seen = drawn_rows(text, setting.batch * setting.points[-1] + setting.window, setting.seed)
    examples, held_out = next_tokens(seen), next_tokens(text.held_out[: setting.held_out])
    run, done = Run(setting, text), 0
    at_points: list[Row] = []
    metered = Run(setting, text, twin=True) if setting.kind == BRANCH else None
    for point in setting.points:
        rates = [setting.rate * min(1.0, (update + 1) / setting.warmup) for update in range(done, point)]
        run.advance(_from(examples, done * setting.batch), setting.batch, rates)
        if metered is not None:
            state = run.keep()
            rows = seen[point * setting.batch :][: setting.window]
            at_points.append({"update": point, **branch_off(setting, run, metered, state, rows, held_out)})
            run.restore(state)
        done = point
    return {"final": float(losses(run.model, held_out).mean()), "at_points": at_points}


def next_tokens(rows: Tensor) -> Examples:
    """Return input ids and labels of a causal model, views of the rows."""
    return inputs_and_labels(rows, CAUSAL, 0, 0)  # neither a mask nor a seed is used


def _from(examples: Examples, first: int) -> Examples:
    return examples[0][first:], examples[1][first:]


def branch_off(setting: Setting, run: Run, metered: Run, state: State, rows: Tensor, held_out: Examples) -> Row:
    """Measure the noise scale, then run all branches over the same examples.

    Args:
        run: a run whose state is ``state``; it ends in that of the last branch.
        metered: a run with the variance-reducing twin, in any state.
        rows: tokens of the ``window`` sequences after the point.

    Returns:
        ``before``, the held-out loss at the point; ``scale``, ``low`` and ``high`` of the noise scale, in sequences;
        ``loss`` after the window with the trunk's batch; and ``branches``, each with ``batch``, ``rate`` ("same",
        "sqrt"), ``order`` ("same", or "other" for the branch that repeats the trunk's batch with the examples in
        another order), ``excess`` over ``loss``, and ``error``, the standard error of this difference over the
        held-out sequences.
    """
    examples, before = next_tokens(rows), losses(run.model, held_out)
    scale = measure_noise(setting, metered, state, examples)
    reference = branch(setting, run, state, examples, held_out, setting.batch, setting.rate)
    order = torch.randperm(setting.window, generator=torch.Generator().manual_seed(setting.seed))
    shuffled = next_tokens(rows[order.to(rows.device)])
    again = branch(setting, run, state, shuffled, held_out, setting.batch, setting.rate)
    names: list[Row] = [{"batch": setting.batch, "rate": SAME, "order": "other"}]
    differences = [again - reference]
    for batch in setting.batches:
        if batch != setting.batch:
            scaled = square_root_scaled_lr(setting.rate, setting.batch, batch)
            for name, rate in ((SAME, setting.rate), (SQUARE_ROOT, scaled)):
                found = branch(setting, run, state, examples, held_out, batch, rate)
                names.append({"batch": batch, "rate": name, "order": "same"})
                differences.append(found - reference)
    stacked = torch.stack(differences)
    errors = stacked.std(1) / math.sqrt(len(before))
    numbers = torch.stack([stacked.mean(1), errors], 1).tolist()
    return {
        "before": float(before.mean()),
        **scale,
        "loss": float(reference.mean()),
        "branches": [
            {**name, "excess": excess, "error": error} for name, (excess, error) in zip(names, numbers, strict=True)
        ],
    }


def branch(
    setting: Setting, run: Run, state: State, examples: Examples, held_out: Examples, batch: int, rate: float
) -> Tensor:
    """Return the held-out loss of each sequence, ``(n,)``, the mean over the evaluations at the end of the window."""
    run.restore(state)
    apart = max(setting.batches)
    evaluated = [setting.window - back * apart for back in reversed(range(setting.evaluations))]
    found, done = [], 0
    for place in evaluated:
        run.advance(_from(examples, done), batch, [rate] * ((place - done) // batch))
        found.append(losses(run.model, held_out))
        done = place
    return torch.stack(found).mean(0)


def measure_noise(setting: Setting, metered: Run, state: State, examples: Examples) -> Row:
    """Return ``scale``, ``low`` and ``high`` of the noise scale, averaged while the trunk continues from a state."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* the running mean of the ratio begins anew")  # nothing else has one
        metered.restore(state)
    meter = ds_vrgd.NoiseScaleMeter(decay=1.0, chunk_size=setting.batch / setting.k)
    metered.advance(examples, setting.batch, [setting.rate] * setting.metered, setting.k, meter)
    found = meter.estimate()
    return {"scale": found.value, "low": found.low, "high": found.high}


EXPERIMENT = Experiment(
    "The critical batch size, by branching a run",
    settings,
    on_text(run_trunk),
    tables,
    draw,
    (13.0, 8.0),
    follow_up,
    prepare,
    kind=lambda setting: (setting.kind, setting.model),
)
