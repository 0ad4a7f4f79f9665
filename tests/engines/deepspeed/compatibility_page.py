"""docs/COMPATIBILITY.md from what scripts/compatibility.py has measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from ds_vrgd.engines.deepspeed.versions import DEEPSPEED, MEASURED, OVERRIDE, TORCH
from tests.engines.deepspeed.compatibility import Outcome, cases
from tests.engines.deepspeed.test_exactness import OF_DISTANCE, OF_MEAN, OF_WEIGHTS
from tests.support.trajectory import Case

PREFACE = f"""\
# Compatibility

The supported releases are

    deepspeed{DEEPSPEED}
    torch{TORCH}

`import ds_vrgd` works with every release of DeepSpeed, and without it. The release is checked when
`deepspeed.initialize` is given one of these optimizers:

- A release older than {DEEPSPEED[2:]} is refused with an error that names its fault, also by `ds-vrgd doctor`,
  `ds-vrgd to-universal` and `import ds_vrgd.engines.deepspeed`.
- {MEASURED["DeepSpeed"]} works: the figures are below.
- A newer release is compared with a table of the private parts of DeepSpeed that ds_vrgd relies on
  (`ds_vrgd/engines/deepspeed/versions.py`). If they are as measured, it works, with one warning that asks for
  `ds-vrgd doctor`. If a part is missing that fused mode alone needs, the engine is in observe mode. Otherwise an error
  names the part.

`{OVERRIDE}=1` in the environment turns the errors into warnings: gradients, statistics and updates may then be
silently wrong, and checkpoints may not load. The package has no upper limit, so pip never downgrades DeepSpeed for it.

DeepSpeed before 0.19.8 reduces gradients wrongly in several configurations: stage 1 with another `grad_accum_dtype`
hands each rank its own gradient, and on the CPU stage 3 computes with weights that are not all there, and
`contiguous_gradients: false` reduces nothing. Before 0.19 more configurations are wrong, other ones in each release.

DeepSpeed issue 8224 reports wrong gradients of ZeRO-2 in bf16 from 0.18.3 to 0.19.3, where a submodule runs more than
once in a step on several ranks. The floor is above these releases. The fault did not show here with 0.19.0 and 0.19.3
on two CPU ranks. A block ran twice in 32 cases of torch's SGD at stage 2 in bf16: one and two passes of the engine, 1
and 3 micro-batches, one bucket and several, with and without `overlap_comm` and non-reentrant checkpointing. The update
was within 0.9 % of a plain model's by norm, as with 0.19.8. With reentrant checkpointing of that block, all three
releases end in an AssertionError. Several GPUs were not tried.

This page is written by `scripts/compatibility.py`, which installs each release, runs it, and holds it against the
dense float64 reference:

    python scripts/compatibility.py {{versions}}

It covers training. Checkpoints, `ds-vrgd doctor` and the BERT run were tested with 0.19.8 alone.
"""

READING = f"""
Two ranks, 1 and 4 micro-batches, VRLAMB, VRSGD and LAMB, with all settings of [EXACTNESS.md](EXACTNESS.md) that two
ranks run. A cell is the worst norm-wise error of the fp32 (master) weights after 5 steps; the bound is
{OF_WEIGHTS:.0e}. Where DeepSpeed clips by the norm of its own, rounded mean, the bound is {OF_DISTANCE:.0e} of the
distance moved, and the case is not in the figure. Where LAMB (gamma = 1) takes the mean that DeepSpeed hands over,
the reference is given that mean in bf16 and fp16, and it must itself be within {OF_MEAN:.0e} of the mean of the chunks.

`wrong n/m`: n of m cases are over the bound or end in an error, so the release is not supported. They are listed below,
with what was measured. No release but those in EXACTNESS.md and RESULTS.md was run on GPUs.
"""

Run = dict[str, Any]
Named = tuple[str, Case, Outcome]


def document(runs: list[Run]) -> str:
    """Return the whole page."""
    versions = " ".join(dict.fromkeys(run["DeepSpeed"] for run in runs))
    lines = [PREFACE.format(versions=versions), "## Releases\n", *releases(runs), READING]
    lines += ["## Worst error\n", *table(runs), ""]
    faults = [line for run in runs for line in particulars(run)]
    return "\n".join(lines + (["## What is wrong\n", *faults] if faults else []))


def releases(runs: list[Run]) -> Iterator[str]:
    """Yield a row for each release."""
    yield "| DeepSpeed | measured with | cases | exact | wrong |"
    yield "| --- | --- | --- | --- | --- |"
    for run in runs:
        found = list(results(run))
        wrong = sum(is_wrong(case, one) for _, case, one in found)
        where = f"torch {run['torch']}, Python {run['Python']}, {run['where']}"
        yield f"| {run['DeepSpeed']} | {where} | {len(found)} | {len(found) - wrong} | {wrong} |"


def results(run: Run) -> Iterator[Named]:
    """Yield the cases and their outcomes."""
    for name, case in cases():
        yield name, case, Outcome(**run["outcomes"][name])


def is_exact(case: Case, outcome: Outcome) -> bool:
    """Return whether a case is within the bounds of tests/engines/deepspeed/test_exactness.py."""
    if outcome.error or outcome.moved <= OF_DISTANCE or (outcome.of_mean or 0.0) > OF_MEAN:
        return False
    if by_rounded_norm(case, outcome):
        return outcome.of_distance <= OF_DISTANCE
    return outcome.of_weights <= OF_WEIGHTS


def by_rounded_norm(case: Case, outcome: Outcome) -> bool:
    """Return whether DeepSpeed clips by the norm of its own mean in half precision."""
    return bool(case.clip) and case.dtype != "fp32" and not outcome.wrapper.startswith("Fused")


def is_wrong(case: Case, outcome: Outcome) -> bool:
    return not is_exact(case, outcome)


def table(runs: list[Run]) -> Iterator[str]:
    """Yield a row for each stage, dtype and mode, with a column for each release."""
    rows: dict[tuple[int, str, str], dict[str, list[tuple[Case, Outcome]]]] = {}
    for run in runs:
        for _, case, outcome in results(run):
            row = rows.setdefault((case.stage, dtypes(case), mode(case)), {})
            row.setdefault(label(run), []).append((case, outcome))
    columns = [label(run) for run in runs]
    yield "| stage | dtype | mode | " + " | ".join(columns) + " |"
    yield "| --- | --- | --- |" + " --- |" * len(columns)
    for (stage, dtype, how), by_release in sorted(rows.items()):
        cells = [cell(by_release.get(column, [])) for column in columns]
        yield f"| {stage} | {dtype} | {how} | " + " | ".join(cells) + " |"


def label(run: Run) -> str:
    return f"{run['DeepSpeed']}, torch {run['torch'].partition('+')[0]}"


def dtypes(case: Case) -> str:
    return f"{case.dtype}, {case.accum_dtype} accumulation" if case.accum_dtype else case.dtype


def mode(case: Case) -> str:
    if not case.optimizer.startswith("VR"):
        return "gamma = 1"
    return "fused" if case.is_fused() else "observe"


def cell(found: list[tuple[Case, Outcome]]) -> str:
    if not found:
        return "-"
    wrong = sum(is_wrong(case, outcome) for case, outcome in found)
    if wrong:
        return f"wrong {wrong}/{len(found)}"
    return f"{max(one.of_weights for case, one in found if not by_rounded_norm(case, one)):.1e}"


def particulars(run: Run) -> Iterator[str]:
    """Yield what is wrong under a release, with what it gave."""
    lines = list(wrong(run))
    if lines:
        yield f"### DeepSpeed {label(run)}\n"
        yield from ("\n".join(textwrap.wrap(f"- {line}", 110, subsequent_indent="  ")) for line in lines)
        yield ""


def wrong(run: Run) -> Iterator[str]:
    bad = [(name, case, outcome) for name, case, outcome in results(run) if is_wrong(case, outcome)]
    for error, group in grouped([one for one in bad if one[2].error], lambda one: first_line(one[2])):
        stages = ", ".join(sorted({str(case.stage) for _, case, _ in group}))
        yield f'Ends in an error, cases: {len(group)}, stages: {stages} ({some(group)}): "{error}".'
    for (stage, dtype, how), group in grouped(
        [one for one in bad if not one[2].error], lambda one: (one[1].stage, dtypes(one[1]), mode(one[1]))
    ):
        told = given([(case, outcome) for _, case, outcome in group])
        yield f"Wrong, cases: {len(group)}. Stage {stage}, {dtype}, {how} ({some(group)}): {told}"


def grouped(found: list[Named], key: Callable[[Named], Any]) -> Iterator[tuple[Any, list[Named]]]:
    for value, group in groupby(sorted(found, key=key), key=key):
        yield value, list(group)


def some(found: list[Named]) -> str:
    """Return the first names."""
    return ", ".join(f"`{name}`" for name, _, _ in found[:3]) + (" and others" if len(found) > 3 else "")


def first_line(outcome: Outcome) -> str:
    return outcome.error.strip().splitlines()[0][:150]


def given(found: list[tuple[Case, Outcome]]) -> str:
    """Return what cases that are not exact gave at worst."""
    bad = [outcome for case, outcome in found if not is_exact(case, outcome)]
    means = [outcome.of_mean for outcome in bad if outcome.of_mean is not None]
    distances = [outcome.of_distance for outcome in bad if outcome.of_weights > OF_WEIGHTS]
    errors = sorted({first_line(outcome) for outcome in bad if outcome.error})
    parts = [f"{len(bad)} of {len(found)} not exact"]
    if means and max(means) > OF_MEAN:
        parts.append(f"DeepSpeed's mean off by up to {max(means):.0%}")
    if distances:
        parts.append(f"weights off by up to {max(distances):.1e} of the distance moved")
    parts += [f'"{error}"' for error in errors[:3]]
    return "; ".join(parts) + "."
