"""A batch size and a learning rate for the next run, with their reasons, from the log of a short probe run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ds_vrgd.noise import CONFIDENCE, NoiseScale, RatioOfMeans
from ds_vrgd.schedules import legw_warmup_ratio, square_root_scaled_lr
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.log import Record, noise_means, noise_scale_of, read_history

# An interval whose ends differ by more decides between no two powers of two.
WIDEST = 2.0
_FEWEST = 16
# The elements of a layer are correlated, so that its mean ratio is as uncertain as a smaller layer's, which lowers the
# one share and raises the other: by 0.035 each in the demo's BERT, whose chunks had random signs and so no signal
# (docs/BATCH_SIZE.md).
_AS_NOISE = 0.05


class TooUncertain(InputError):
    """The probe run was too short for advice. The message says how many more updates it takes."""


@dataclass(frozen=True)
class ClampedShares:
    """The shares of the elements that were clamped, beside those of pure noise: means over the updates that count.

    Attributes:
        low, high: measured shares clamped to gamma and to 1, means over the layers.
        noise_low, noise_high: both shares for pure noise (``ds_vrgd.clamped_by_noise``).
        is_noise: whether both measured shares are those of pure noise within 0.05. None if they are, but the batch is
            not below the noise scale: a signal that is spread normally over the elements gives the same shares.
    """

    low: float
    high: float
    noise_low: float
    noise_high: float
    is_noise: bool | None

    def line(self) -> str:
        """Return the shares and the verdict in words."""
        verdict = {
            True: "this ratio is noise",
            False: "these are not the shares of noise",
            None: "no verdict, since the batch is not below the noise scale, and a signal can have these shares too",
        }[self.is_noise]
        return (
            f"{self.low:.3f} clamped to gamma and {self.high:.3f} to 1, pure noise {self.noise_low:.3f} and "
            f"{self.noise_high:.3f} (compared within {_AS_NOISE:g}): {verdict}"
        )


@dataclass(frozen=True)
class Suggestion:
    """The result of a probe run.

    Attributes:
        noise_scale: in samples, over the updates that count.
        counted: number of these updates: those after the warm-up of the last phase, or the newer half if it drifted.
        older: the noise scale of the older half, where it differs from that of the newer half beyond both intervals.
        probe_batch, probe_lr: global batch and peak learning rate of the probe.
        warmup: updates of its warm-up.
        batch, lr: what to try next.
        clamped: None up to k = 3, and in the log of an older release.
    """

    noise_scale: NoiseScale
    counted: int
    older: NoiseScale | None
    probe_batch: int
    probe_lr: float
    warmup: int
    batch: int
    lr: float
    clamped: ClampedShares | None

    def examples(self, batch: int) -> float:
        """Return the examples for the same progress, per the fewest that any batch needs: 1 + B / B_noise (eq. 2.7)."""
        return 1.0 + batch / self.noise_scale.value

    def updates(self, batch: int) -> float:
        """Return the updates for the same progress, per the fewest that any batch needs: 1 + B_noise / B (eq. 2.8)."""
        return 1.0 + self.noise_scale.value / batch

    def warmup_ratio(self, examples: int) -> float:
        """Return the warm-up as a fraction of a run over ``examples``, by LEGW.

        Raises:
            InputError: the run would be shorter than its warm-up.
        """
        try:
            return legw_warmup_ratio(self.warmup * self.probe_batch / examples, self.probe_batch, self.batch)
        except ValueError as error:
            raise InputError(
                f"--examples {examples}: the warm-up of {self.warmup} updates of {self.batch} examples is longer than "
                f"such a run; give more examples, or make a probe with a shorter warm-up ({error})"
            ) from error


def suggest(output: Path) -> Suggestion:
    """Return the advice from the log in a probe run's output folder.

    Raises:
        InputError: the log has no noise scale, or is of several batch sizes.
        TooUncertain: more updates are needed for advice.
    """
    history = read_history(output)
    phase = history.updates[-1].get("phase")
    updates = [record for record in history.updates if record.get("phase") == phase]
    if not any("gsnr" in record for record in updates):
        raise InputError(
            f"{output}: no update of its log has a noise scale; probe with an optimizer with GSNR (VR..., gamma < 1)"
        )
    lr = max(record["lr"] for record in updates)
    warmup = next(number for number, record in enumerate(updates) if record["lr"] == lr)
    warmup += 1 if warmup else 0
    first = updates[warmup]["step"] if warmup < len(updates) else math.inf
    steady = [record for record in history.measured if record.get("phase") == phase and record["step"] >= first]
    if len(steady) < _FEWEST:
        raise TooUncertain(
            f"{output}: {len(steady)} updates after the warm-up ({warmup} updates to the peak rate {lr:g}) are too "
            f"few to measure the noise scale; it takes at least {_FEWEST - len(steady)} more"
        )
    batches = {record["gsnr"]["batch"] for record in steady}
    if len(batches) > 1:
        raise InputError(f"{output}: the batch changed within the last phase ({sorted(batches)}); probe with one batch")
    (batch,) = batches
    half = len(steady) // 2
    older, newer = (noise_scale_of(noise_means(part, 1.0)) for part in (steady[:half], steady[half:]))
    drifted = older.high < newer.low or newer.high < older.low
    used = steady[half:] if drifted else steady
    means = noise_means(used, 1.0)
    found = noise_scale_of(means)
    clamped = _clamped(used, below_noise_scale=batch < found.value)
    if not found.low > 0.0 or found.high / found.low > WIDEST:
        of_ratio = f". GSNR: {clamped.line()}" if clamped else ""
        raise TooUncertain(f"{output}: {_too_wide(found, means, len(used), batch)}{of_ratio}")
    return Suggestion(
        found,
        len(used),
        older if drifted else None,
        batch,
        lr,
        warmup,
        _nearest(found.value, batch),
        square_root_scaled_lr(lr, batch, _nearest(found.value, batch)),
        clamped,
    )


def _clamped(updates: Sequence[Record], *, below_noise_scale: bool) -> ClampedShares | None:
    rows = [record["gsnr"] for record in updates if {"noise_low", "noise_high"} <= record["gsnr"].keys()]
    if not rows:
        return None
    low, high, noise_low, noise_high = (
        fmean(row[name] for row in rows) for name in ("clamped_low", "clamped_high", "noise_low", "noise_high")
    )
    alike = max(abs(low - noise_low), abs(high - noise_high)) <= _AS_NOISE
    return ClampedShares(low, high, noise_low, noise_high, (below_noise_scale or None) if alike else False)


def _nearest(noise_scale: float, batch: int) -> int:
    """Return the probe's batch times the power of two that is nearest to the noise scale, as a whole number."""
    power = round(math.log2(noise_scale / batch))
    if power >= 0:
        return batch << power
    odd = batch // (batch & -batch)
    return max(batch >> -power, odd)


def _too_wide(found: NoiseScale, means: RatioOfMeans, counted: int, batch: int) -> str:
    between = f"between {_rounded(found.low)} and {_rounded(found.high)} samples" if math.isfinite(found.high) else (
        f"at least {_rounded(found.low)} samples"
    )  # fmt: skip
    needed = _updates_needed(means, counted)
    if needed is None:
        more = (
            "the signal cannot be told from the noise at all, nor how many more updates it takes; make the probe with "
            f"a batch larger than {batch}"
        )
    else:
        more = f"some {max(needed - counted, 1)} more updates like these would do, or a batch larger than {batch}"
    return (
        f"the noise scale is {between} after {counted} updates, too uncertain to choose a batch by (the ends of the "
        f"interval may differ by a factor of {WIDEST:g}); {more}"
    )


def _rounded(samples: float) -> str:
    """Return a number of samples with three digits that count: 1,840, and not 1.84e+03."""
    return f"{float(f'{samples:.3g}'):,.10g}"


def _updates_needed(means: RatioOfMeans, counted: int) -> int | None:
    """Estimate the updates that give a narrow enough interval; None if far more than were counted."""
    for sixths in range(1, 61):
        longer = math.pow(2.0, sixths / 6)
        low, high = (float(end) for end in means.intervals(CONFIDENCE, longer)[1:, 0])
        if low > 0.0 and high / low <= WIDEST:
            return math.ceil(longer * counted)
    return None


def lines(found: Suggestion, examples: int | None) -> Sequence[str]:
    """Return the advice in words.

    Args:
        examples: of the planned run, for its updates and the share of its warm-up; None if not known.

    Raises:
        InputError: the planned run is shorter than its warm-up.
    """
    scale = found.noise_scale
    text = [
        f"noise scale   {_rounded(scale.value)} samples ({_rounded(scale.low)} to {_rounded(scale.high)}, 95 %), over "
        f"{found.counted} updates after the warm-up",
        *([f"GSNR          {found.clamped.line()}"] if found.clamped else []),
        f"batch         {found.batch:,}, where the probe had {found.probe_batch:,}",
        f"learning rate {found.lr:.3g} at the peak: {found.probe_lr:.3g}, times the square root of "
        f"{found.batch / found.probe_batch:g}",
        f"warm-up       {found.warmup:,} updates, as in the probe: n times the batch warms up over n times the "
        "examples (LEGW)",
    ]
    if examples is not None:
        text.append(
            f"the run       {examples // found.batch:,} updates for {examples:,} examples, "
            f"warmup_ratio {found.warmup_ratio(examples):.3g}"
        )
    text += [
        "",
        "Why: a batch of one noise scale needs twice the examples of a tiny batch and twice the updates of a huge one",
        "(McCandlish et al. 2018). For the same progress:",
        "",
        f"{'batch':>12}  {'examples':>10}  {'updates':>10}   (the probe's batch: 1)",
    ]
    for power in range(-2, 3):
        batch = int(found.batch * 2.0**power)
        if batch >= 1:
            per_example = found.examples(batch) / found.examples(found.probe_batch)
            per_update = found.updates(batch) / found.updates(found.probe_batch)
            mark = "  <- suggested" if power == 0 else ""
            text.append(f"{batch:>12,}  {per_example:>10.2f}  {per_update:>10.2f}{mark}")
    text += ["", "What this does not know:"]
    if found.older is not None:
        text.append(
            f"- The noise scale has moved during the probe, from {_rounded(found.older.value)} to "
            f"{_rounded(scale.value)} samples; only the newer half counts here."
        )
    return [
        *text,
        "- It usually grows as the loss falls, so a long run bears a larger batch later; measure again from its log.",
        f"- Whether {found.probe_lr:.3g} was the best rate at {found.probe_batch:,}. A poor one scales to a poor one: "
        "try half and double.",
        "- Where it was too low, the noise scale comes out too large (docs/RESULTS.md).",
        "- What Adam's and LAMB's preconditioning changes: this is the simple noise scale of the plain gradient.",
        "- What a step costs on your hardware: below the batch that fills it, a smaller one saves nothing.",
        "- Whether the result generalises as well.",
    ]
