"""Learning-rate rules for large batches, as functions without state.

Every schedule here is a function of the step number alone, so resuming a run needs nothing but the step.
Steps count from 0: step 0 is the first update.
"""

from __future__ import annotations

import math


def square_root_scaled_lr(base_lr: float, base_batch: int, batch: int) -> float:
    """Return the learning rate for ``batch``, given that of ``base_batch``: base_lr * sqrt(batch / base_batch).

    The rule of LAMB's batch-size table (You et al. 2019, "Large Batch Optimization for Deep Learning", table 1)
    and of the VRGD paper's experiments.
    """
    _positive("base_batch", base_batch)
    _positive("batch", batch)
    return base_lr * math.sqrt(batch / base_batch)


def legw_warmup_ratio(base_ratio: float, base_batch: int, batch: int) -> float:
    """Return the warm-up for ``batch``, as a fraction of the run, given that of ``base_batch``.

    Linear-epoch gradual warm-up (LEGW, You et al. 2019): k times the batch warms up over k times the epochs. At
    an unchanged number of epochs that is k times the fraction of the run.

    Raises:
        ValueError: the scaled warm-up would be longer than the run.
    """
    _positive("base_batch", base_batch)
    _positive("batch", batch)
    ratio = base_ratio * batch / base_batch
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(
            f"base_ratio={base_ratio} at batch {base_batch} scales to a warm-up of {ratio:g} of the run at batch "
            f"{batch}; it must lie in [0, 1]: lower base_ratio or the batch"
        )
    return ratio


def warmup_polynomial_lr(
    step: int, *, total_steps: int, peak_lr: float, warmup_steps: int = 0, power: float = 1.0
) -> float:
    """Return the learning rate of update ``step`` (0-based): linear warm-up from zero, polynomial decay to zero.

    ::

        step <  warmup_steps:  peak_lr * (step + 1) / warmup_steps
        step >= warmup_steps:  peak_lr * (1 - (step - warmup_steps) / (total_steps - warmup_steps)) ** power

    No update is spent at a rate of zero: the line starts there one update before the first, and ends there one update
    after the last. Decay starts at the peak. With ``warmup_steps == total_steps`` the rate only rises.

    Raises:
        ValueError: a step outside [0, total_steps), or a warm-up longer than the run.
    """
    _positive("total_steps", total_steps)
    if not 0 <= warmup_steps <= total_steps:
        raise ValueError(f"warmup_steps={warmup_steps} must lie in [0, total_steps={total_steps}]")
    if not 0 <= step < total_steps:
        raise ValueError(f"step={step} must lie in [0, total_steps={total_steps})")
    if step < warmup_steps:
        return peak_lr * (step + 1) / warmup_steps
    decay_steps = total_steps - warmup_steps
    return float(peak_lr * (1.0 - (step - warmup_steps) / decay_steps) ** power)


def warmup_cosine_lr(step: int, *, total_steps: int, peak_lr: float, warmup_steps: int = 0) -> float:
    """Return the learning rate of update ``step`` (0-based): linear warm-up from zero, half a cosine down to zero.

    ::

        step <  warmup_steps:  peak_lr * (step + 1) / warmup_steps
        step >= warmup_steps:  peak_lr * (1 + cos(pi * (step - warmup_steps) / (total_steps - warmup_steps))) / 2

    Loshchilov, Hutter 2017, "SGDR", equation 5, without restarts. As in :func:`warmup_polynomial_lr` no update is spent
    at a rate of zero, and decay starts at the peak.

    Raises:
        ValueError: a step outside [0, total_steps), or a warm-up longer than the run.
    """
    # The line's position, bent.
    line = warmup_polynomial_lr(step, total_steps=total_steps, peak_lr=1.0, warmup_steps=warmup_steps)
    if step < warmup_steps:
        return peak_lr * line
    return peak_lr * 0.5 * (1.0 - math.cos(math.pi * line))


def phase_of_step(step: int, phase_steps: list[int]) -> tuple[int, int]:
    """Return the phase that an update of the whole run belongs to, and its number within that phase.

    Multi-phase runs warm up again from zero in every phase (re-warm-up, You et al. 2019, section 4.1).

    Args:
        step: 0-based update of the whole run; the number of all updates is allowed and means "finished".
        phase_steps: updates of each phase.

    Returns:
        (phase index, step within the phase); (len(phase_steps), 0) for a finished run.
    """
    if not 0 <= step <= sum(phase_steps):
        raise ValueError(f"step={step} must lie in [0, {sum(phase_steps)}], the steps of all phases")
    for phase, steps in enumerate(phase_steps):
        if step < steps:
            return phase, step
        step -= steps
    return len(phase_steps), 0


def _positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name}={value} must be positive")
