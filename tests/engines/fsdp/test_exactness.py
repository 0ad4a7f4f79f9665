"""One trajectory under FSDP2: each configuration against the dense float64 reference."""

from __future__ import annotations

import platform
from collections.abc import Mapping

import pytest
import torch

from ds_vrgd.optim import OPTIMIZERS
from tests.engines.fsdp.cases import ACCUMULATIONS, DTYPES, SETTINGS, UNATTACHED, WORLDS, identify, is_slow, matrix
from tests.engines.fsdp.training import Case, Result, run_cases
from tests.support import exactness
from tests.support.ranks import MOST_RANKS, run_on_ranks

# As for DeepSpeed: norm-wise after 5 steps, given the chunk gradients in the dtype of computation.
OF_WEIGHTS = 8e-7
OF_NOISE = 1e-6
# A running mean of the ratio in bf16, which the reference keeps in fp64.
OF_WEIGHTS_BF16_AVERAGE = 2e-4

COMMAND = "make test-full PYTEST_ARGS='tests/engines/fsdp/test_exactness.py --write-exactness'"
PREFACE = """
The same model and reference under PyTorch's `fully_shard`, with `ds_vrgd.attach`. The weights are fp32; the dtype is
that of computation and reduction (`MixedPrecisionPolicy`). Columns: ranks x accumulated micro-batches; "2 x 2" is HSDP,
two copies of shards on two ranks each. LAMB and LARS take the exchange's mean, in bf16, too: their reference is given
the chunks. `-` stands for k = 1 in every window, which is refused. The 90 cases of one and two ranks also passed on two
H200 (NCCL, torch 2.11).
"""

ALL = {identify(case): case for case in matrix()}
QUICK = {name: case for name, case in ALL.items() if not is_slow(case)}


def outcomes_of(cases: Mapping[str, Case]) -> dict[str, Result | str]:
    """Run the cases; those that need more GPUs than there are have no outcome."""
    found: dict[str, Result | str] = {}
    for world in sorted({case.world for case in cases.values() if case.world <= MOST_RANKS}, reverse=True):
        mine = {name: case for name, case in cases.items() if case.world == world}
        found |= run_on_ranks(world, run_cases, mine)[0]
    return found


def check(case: Case, outcome: Result | str | None) -> None:
    if case.world > MOST_RANKS:
        pytest.skip(f"needs {case.world} GPUs")
    if case.k == 1 and case.optimizer.startswith("VR"):
        assert isinstance(outcome, str)
        assert "k = 1" in outcome
        return
    assert isinstance(outcome, Result), outcome
    assert outcome.moved > 5e-3, "the steps are too small to tell anything"
    bf16 = case.arguments.get("gsnr_dtype") == "bfloat16"
    assert outcome.of_weights <= (OF_WEIGHTS_BF16_AVERAGE if bf16 else OF_WEIGHTS)
    if outcome.k is not None:
        assert outcome.k == case.k
    if outcome.of_noise is not None:
        assert outcome.of_noise <= OF_NOISE


@pytest.fixture(scope="module")
def quick() -> dict[str, Result | str]:
    return outcomes_of(QUICK)


@pytest.fixture(scope="module")
def settings() -> dict[str, Result | str]:
    return outcomes_of(SETTINGS | UNATTACHED)


@pytest.mark.parametrize("name", QUICK)
def test_trajectory_follows_the_reference(quick: dict[str, Result | str], name: str) -> None:
    check(QUICK[name], quick.get(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_fsdp2_change_nothing(settings: dict[str, Result | str], name: str) -> None:
    check(SETTINGS[name], settings.get(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", UNATTACHED)
def test_lamb_and_lars_need_no_attach(settings: dict[str, Result | str], name: str) -> None:
    check(UNATTACHED[name], settings.get(name))


@pytest.fixture(scope="module")
def rest() -> dict[str, Result | str]:
    return outcomes_of({name: case for name, case in ALL.items() if name not in QUICK})


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in QUICK])
def test_trajectory_of_every_optimizer_mesh_and_window(rest: dict[str, Result | str], name: str) -> None:
    check(ALL[name], rest.get(name))


def cell(outcome: Result | str | None) -> str:
    if isinstance(outcome, Result):
        return f"{outcome.of_weights:.1e}"
    return "-" if outcome is not None and "k = 1" in outcome else "FAILED"


def section(outcomes: Mapping[str, Result | str]) -> str:
    """The last section of docs/EXACTNESS.md."""
    columns = [(*world, accumulation) for world in WORLDS for accumulation in ACCUMULATIONS]
    heads = [f"{ranks if replicas == 1 else f'({replicas} x {ranks})'} x {a}" for ranks, replicas, a in columns]
    lines = ["| optimizer | dtype | " + " | ".join(heads) + " |", "| --- | --- |" + " --- |" * len(columns)]
    for optimizer in OPTIMIZERS:
        for dtype in DTYPES:
            cases = [Case(optimizer, dtype, ranks, a, replicas) for ranks, replicas, a in columns]
            cells = [cell(outcomes.get(identify(case))) for case in cases]
            lines.append(f"| {optimizer} | {dtype} | " + " | ".join(cells) + " |")
    lines += ["", "Settings of FSDP2 around VRLAMB, on 2 ranks in bf16 with 4 micro-batches unless they say otherwise:"]
    lines += ["", "| setting | of the weights |", "| --- | --- |"]
    lines += [f"| {name} | {cell(outcomes.get(name))} |" for name in SETTINGS]
    lines += ["", "Without `attach`, fp32, two micro-batches, the gradient that FSDP2 hands over:", ""]
    lines += ["| optimizer, ranks x copies | of the weights |", "| --- | --- |"]
    lines += [f"| {name} | {cell(outcomes.get(name))} |" for name in UNATTACHED]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, CPU, gloo"
    return "\n".join([exactness.FSDP2 + PREFACE, f"Measured with {versions}:\n\n    {COMMAND}\n", *lines, ""])


@pytest.mark.slow
def test_section_is_complete_and_written_on_request(
    quick: dict[str, Result | str],
    settings: dict[str, Result | str],
    rest: dict[str, Result | str],
    pytestconfig: pytest.Config,
) -> None:
    if MOST_RANKS < 4:
        pytest.skip("needs 4 GPUs")
    written = section(quick | settings | rest)
    assert "FAILED" not in written
    if pytestconfig.getoption("--write-exactness"):
        exactness.write(written)


def test_section_lists_every_case() -> None:
    kept, fresh = exactness.rows(exactness.parts()[exactness.FSDP2]), exactness.rows(section({}))
    assert kept == fresh, f"docs/EXACTNESS.md lists other cases: {COMMAND}"
