"""docs/COMPATIBILITY.md from what scripts/compatibility.py has measured."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from ds_vrgd.zero.versions import DEEPSPEED, FUSED, OVERRIDE, TORCH, is_among
from tests.support.trajectory import Case
from tests.zero.compatibility import Outcome, cases
from tests.zero.test_exactness import OF_DISTANCE, OF_MEAN, OF_WEIGHTS

PREFACE = f"""\
# Compatibility

Supported are

    deepspeed{DEEPSPEED}
    torch{TORCH}

`import ds_vrgd` ends with an error under any other release. `{OVERRIDE}=1` in the environment makes a warning of the
error: gradients, statistics and updates may then be silently wrong, and checkpoints may not load. Fused mode needs
deepspeed{FUSED}; under the others `"reduction": "auto"` means observe mode.

This page is written by `scripts/compatibility.py`, which installs each release, runs it, and holds it against the
dense float64 reference:

    python scripts/compatibility.py {{versions}}

It tells of training. Checkpoints, `ds-vrgd doctor` and the BERT run were tested with 0.19.8 alone.
"""

READING = f"""
Two ranks, 1 and 4 micro-batches, VRLAMB, VRSGD and LAMB, with all settings of [EXACTNESS.md](EXACTNESS.md) that two
ranks run. A cell is the worst norm-wise error of the fp32 (master) weights after 5 steps; the bound is
{OF_WEIGHTS:.0e}. Where DeepSpeed clips by the norm of its own, rounded mean, the bound is {OF_DISTANCE:.0e} of the
distance moved, and the case is not in the figure. LAMB (gamma = 1) takes the mean that DeepSpeed hands over: in bf16
and fp16 the reference is given that mean, and it must itself be within {OF_MEAN:.0e} of the mean of the chunks.

`refused`: all cases of the cell are, by name, with the way out. `wrong n/m`: n of m cases are over the bound or end in
an error, and nothing refuses them, so the release is not supported. Both are listed below, with what was measured.
`-`: the release has no such mode. DeepSpeed passes over most settings that a release does not know yet, and such a case
comes out wrong.

Before 0.19.8, stage 3 on the CPU does not wait for all of its all-gathers. For the figures of stage 3 each was waited
for, so that they tell of the rest. NCCL carries out one after the other, and this defect does not reach it; no release
but those in EXACTNESS.md and RESULTS.md was run on GPUs.
"""

Run = dict[str, Any]
Named = tuple[str, Case, Outcome]


def document(runs: list[Run]) -> str:
    """The whole page."""
    versions = " ".join(dict.fromkeys(run["DeepSpeed"] for run in runs))
    return "\n".join(
        [PREFACE.format(versions=versions), "## Releases\n", *releases(runs), READING]
        + ["## Worst error\n", *table(runs), "\n## What is refused, and what is wrong\n"]
        + [line for run in runs for line in particulars(run)]
    )


def releases(runs: list[Run]) -> Iterator[str]:
    """A line for each."""
    yield "| DeepSpeed | supported | fused mode | measured with | cases | exact | refused | wrong |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for run in runs:
        found = list(results(run))
        refused = sum(bool(one.refused) for _, _, one in found)
        wrong = sum(is_wrong(case, one) for _, case, one in found)
        yes = [" yes" if is_among(run["DeepSpeed"], asked) else " no" for asked in (DEEPSPEED, FUSED)]
        where = f"torch {run['torch']}, Python {run['Python']}, {run['where']}"
        yield (
            f"| {run['DeepSpeed']} |{yes[0]} |{yes[1]} | {where} | {len(found)} | {len(found) - refused - wrong} | "
            f"{refused} | {wrong} |"
        )


def results(run: Run) -> Iterator[Named]:
    """Without the cases whose setting the release does not have."""
    for name, case in cases():
        outcome = Outcome(**run["outcomes"][name])
        if "Extra inputs are not permitted" not in outcome.error:
            yield name, case, outcome


def is_exact(case: Case, outcome: Outcome) -> bool:
    """The bounds of tests/zero/test_exactness.py."""
    if outcome.error or outcome.moved <= OF_DISTANCE or (outcome.of_mean or 0.0) > OF_MEAN:
        return False
    if by_rounded_norm(case, outcome):
        return outcome.of_distance <= OF_DISTANCE
    return outcome.of_weights <= OF_WEIGHTS


def by_rounded_norm(case: Case, outcome: Outcome) -> bool:
    """Whether DeepSpeed clips by the norm of its own mean in half precision."""
    return bool(case.clip) and case.dtype != "fp32" and not outcome.wrapper.startswith("Fused")


def is_wrong(case: Case, outcome: Outcome) -> bool:
    return not outcome.refused and not is_exact(case, outcome)


def table(runs: list[Run]) -> Iterator[str]:
    """A row for each stage, dtype and mode, a column for each release."""
    rows: dict[tuple[int, str, str], dict[str, list[tuple[Case, Outcome]]]] = {}
    for run in runs:
        for _, case, outcome in results(run):
            row = rows.setdefault((case.stage, dtypes(case), mode(case, run)), {})
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


def mode(case: Case, run: Run) -> str:
    if not case.optimizer.startswith("VR"):
        return "gamma = 1"
    return "fused" if case.is_fused() and is_among(run["DeepSpeed"], FUSED) else "observe"


def cell(found: list[tuple[Case, Outcome]]) -> str:
    if not found:
        return "-"
    wrong = sum(is_wrong(case, outcome) for case, outcome in found)
    if wrong:
        return f"wrong {wrong}/{len(found)}"
    kept = [(case, outcome) for case, outcome in found if not outcome.refused]
    figures = [outcome.of_weights for case, outcome in kept if not by_rounded_norm(case, outcome)]
    return f"{max(figures):.1e}" if figures else "refused"


def particulars(run: Run) -> Iterator[str]:
    """What is refused under a release and what is wrong, with what it gave."""
    lines = [*refused(run), *wrong(run)]
    if lines:
        yield f"### DeepSpeed {label(run)}\n"
        yield from ("\n".join(textwrap.wrap(f"- {line}", 110, subsequent_indent="  ")) for line in lines)
        yield ""


def refused(run: Run) -> Iterator[str]:
    found = [(name, case, outcome) for name, case, outcome in results(run) if outcome.refused]
    for reason, group in grouped(found, lambda one: one[2].refused):
        told = given([(case, outcome) for _, case, outcome in group])
        yield f"Refused, cases: {len(group)}: {reason}. {told}"
    repeats = [Outcome(**one) for one in run["repeats"]]
    inexact = [one for one in repeats if one.error or one.of_weights > OF_WEIGHTS]
    if inexact:
        yield f"LAMB at stage 3 in fp32, {len(repeats)} times over, as released: {len(inexact)} times wrong."


def wrong(run: Run) -> Iterator[str]:
    bad = [(name, case, outcome) for name, case, outcome in results(run) if is_wrong(case, outcome)]
    for error, group in grouped([one for one in bad if one[2].error], lambda one: first_line(one[2])):
        stages = ", ".join(sorted({str(case.stage) for _, case, _ in group}))
        yield f'Ends in an error, cases: {len(group)}, stages: {stages} ({some(group)}): "{error}".'
    for (stage, dtype, how), group in grouped(
        [one for one in bad if not one[2].error], lambda one: (one[1].stage, dtypes(one[1]), mode(one[1], run))
    ):
        told = given([(case, outcome) for _, case, outcome in group])
        yield f"Wrong, cases: {len(group)}. Stage {stage}, {dtype}, {how} ({some(group)}): {told}"


def grouped(found: list[Named], key: Callable[[Named], Any]) -> Iterator[tuple[Any, list[Named]]]:
    for value, group in groupby(sorted(found, key=key), key=key):
        yield value, list(group)


def some(found: list[Named]) -> str:
    """The first names."""
    return ", ".join(f"`{name}`" for name, _, _ in found[:3]) + (" and others" if len(found) > 3 else "")


def first_line(outcome: Outcome) -> str:
    return outcome.error.strip().splitlines()[0][:150]


def given(found: list[tuple[Case, Outcome]]) -> str:
    """What cases that are not exact gave at worst."""
    bad = [outcome for case, outcome in found if not is_exact(case, outcome)]
    if not bad:
        return "Run all the same, they came out exact."
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
