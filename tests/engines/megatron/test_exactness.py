"""One trajectory under Megatron-Core: each configuration against the dense float64 reference."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import replace
from importlib import metadata

import pytest
import torch

from ds_vrgd.optim import OPTIMIZERS
from tests.engines.megatron.cases import Case
from tests.engines.megatron.ranks import on_ranks
from tests.support import exactness

# As for the other engines: norm-wise after 5 steps, given the chunk gradients in the dtype of the buffers.
OF_WEIGHTS = 8e-7
OF_NOISE = 1e-6

COMMAND = "make test-full PYTEST_ARGS='tests/engines/megatron/test_exactness.py --write-exactness'"
PREFACE = """
A GPT of Megatron-Core's own classes through `ds_vrgd.megatron.get_optimizer`, with the distributed optimizer unless a
row says "unsharded". A chunk is what a data-parallel rank has accumulated in its gradient buffer, and the reference is
given the buffers' contents. The number after the dtype is that of accumulated micro-batches. Ranks that are not TP or
PP are data-parallel. `-` stands for k = 1, which is refused.
"""

OVERLAP = {"overlap_grad_reduce": True}
FP32_BUFFERS = {"grad_reduce_in_fp32": True}
UNSHARDED = {"use_distributed_optimizer": False}
BF16 = Case(dtype="bf16", accumulation=4)

QUICK = {
    "VRLAMB, bf16, overlap": replace(BF16, ddp=OVERLAP),
    "VRAdamW, fp32": Case("VRAdamW"),
    "LAMB, bf16": replace(BF16, optimizer="LAMB"),
}
TWO_RANKS = {
    **{f"{name}, {dtype}, 4": Case(name, dtype, 4) for name in OPTIMIZERS for dtype in ("fp32", "bf16")},
    "fp32, 1": Case(),
    "bf16, 1": Case(dtype="bf16"),
    "bf16, 1, fp32 buffers": Case(dtype="bf16", ddp=FP32_BUFFERS),
    "bf16, fp32 buffers, overlap": replace(BF16, ddp={**FP32_BUFFERS, **OVERLAP}),
    "fp16 and its loss scale": Case(dtype="fp16", accumulation=2, config={"initial_loss_scale": 64.0}),
    "overlapping gather": replace(BF16, ddp={**OVERLAP, "overlap_param_gather": True}),
    "overlapping gather, fp32": Case(ddp={**OVERLAP, "overlap_param_gather": True}),
    "average in the collective": Case(accumulation=4, ddp={"average_in_collective": True}),
    "clipping": replace(BF16, config={"clip_grad": 0.1}),
    "prenormalized": replace(BF16, arguments={"prenormalize": True}),
    "bf16 and fp32 accumulation": replace(BF16, ddp={"reduce_scatter_with_fp32_accumulation": True}),
    "unsharded, fp32": Case(accumulation=4, ddp=UNSHARDED),
    "unsharded, bf16, overlap": replace(BF16, ddp={**UNSHARDED, **OVERLAP}),
    "unsharded, LARS, bf16": replace(BF16, optimizer="LARS", ddp=UNSHARDED),
    "tied embeddings": Case(accumulation=4, tied=True),
    "LAMB, per-token loss": Case("LAMB", accumulation=4, model={"calculate_per_token_loss": True}),
    "VRAdamW with gamma 1": Case("VRAdamW", arguments={"gamma": 1.0}),
    "TP 2: VRLAMB": Case(tensor=2),
    **{f"TP 2: LAMB, {dtype}, {accumulation}": Case("LAMB", dtype, accumulation, tensor=2)
       for dtype in ("fp32", "bf16") for accumulation in (1, 4)},
    "TP 2: LAMB, sequence parallelism": Case("LAMB", tensor=2, model={"sequence_parallel": True}),
    "PP 2: LARS, tied embeddings": Case("LARS", accumulation=4, pipeline=2, tied=True),
}  # fmt: skip
FOUR_RANKS = {
    f"{name}, {dtype}, {accumulation}{note}": Case(optimizer, dtype, accumulation, ddp=ddp, **sizes)
    for name, sizes in {"TP 2 x DP 2": {"tensor": 2}, "PP 2 x DP 2": {"pipeline": 2}, "DP 4": {}}.items()
    for dtype in ("fp32", "bf16")
    for accumulation in (1, 4)
    for note, optimizer, ddp in (("", "VRLAMB", {}), (", overlap", "VRLARS", OVERLAP))
} | {
    "TP 2 x DP 2: LAMB, sequence parallelism": Case("LAMB", tensor=2, model={"sequence_parallel": True}),
    "PP 2 x DP 2: LAMB, tied embeddings": Case("LAMB", accumulation=4, pipeline=2, tied=True),
    "TP 2 x PP 2": Case("LAMB", "bf16", 4, tensor=2, pipeline=2),
    "TP 2 x DP 2, unsharded": Case(dtype="bf16", tensor=2, ddp=UNSHARDED),
    "TP 2 x DP 2, clipping, prenormalized": Case(tensor=2, config={"clip_grad": 0.1}, arguments={"prenormalize": True}),
    "PP 2 x DP 2, clipping, prenormalized": Case(pipeline=2, config={"clip_grad": 0.1},
                                                 arguments={"prenormalize": True}),
}  # fmt: skip


def check(case: Case, outcome: object, world: int) -> None:
    ranks = world // (case.tensor * case.pipeline)
    if ranks == 1 and case.optimizer.startswith("VR"):
        assert isinstance(outcome, str)
        assert "k = 1" in outcome
        return
    assert not isinstance(outcome, str), outcome
    result: dict[str, float | None] = vars(outcome)
    assert result["moved"] > 5e-3, "the steps are too small to tell anything"  # type: ignore[operator]
    assert result["of_weights"] <= OF_WEIGHTS  # type: ignore[operator]
    with_gsnr = case.optimizer.startswith("VR") and case.arguments.get("gamma") != 1.0
    assert result["k"] == (ranks if with_gsnr else None)
    assert not with_gsnr or result["of_noise"] <= OF_NOISE  # type: ignore[operator]
    assert result["layers"] == (29 - case.tied if with_gsnr else 0), "every rank reports the layers of the whole model"
    if case.ddp.get("overlap_grad_reduce") and case.pipeline == 1:  # later stages have one bucket
        assert result["buckets"] > 1  # type: ignore[operator]


@pytest.fixture(scope="module")
def quick() -> dict[str, object]:
    return on_ranks(2, "training.run_cases", QUICK)[-1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", QUICK)
def test_trajectory_follows_the_reference(quick: dict[str, object], name: str) -> None:
    check(QUICK[name], quick[name], 2)


@pytest.fixture(scope="module")
def of_two() -> dict[str, object]:
    return on_ranks(2, "training.run_cases", TWO_RANKS)[-1]  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_follow_the_reference(of_two: dict[str, object], name: str) -> None:
    check(TWO_RANKS[name], of_two[name], 2)


@pytest.fixture(scope="module")
def of_four() -> dict[str, object]:
    return on_ranks(4, "training.run_cases", FOUR_RANKS)[-1]  # type: ignore[no-any-return]


def section(outcomes: Mapping[str, object]) -> str:
    """Return a section of docs/EXACTNESS.md."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    versions += f", Megatron-Core {metadata.version('megatron-core')}, CPU, gloo"
    lines = [exactness.MEGATRON + PREFACE, f"Measured with {versions}:\n\n    {COMMAND}\n"]
    lines += ["| configuration | ranks | of the weights |", "| --- | --- | --- |"]
    for ranks, cases in ((2, TWO_RANKS), (4, FOUR_RANKS)):
        for name in cases:
            error = getattr(outcomes.get(name), "of_weights", None)
            refused = isinstance(outcomes.get(name), str) and "k = 1" in str(outcomes[name])
            lines.append(f"| {name} | {ranks} | {'-' if refused else 'FAILED' if error is None else f'{error:.1e}'} |")
    return "\n".join([*lines, ""])


@pytest.mark.slow
def test_section_is_complete_and_written_on_request(
    of_two: dict[str, object], of_four: dict[str, object], pytestconfig: pytest.Config
) -> None:
    written = section(of_two | of_four)
    assert "FAILED" not in written
    if pytestconfig.getoption("--write-exactness"):
        exactness.write(written)


def test_section_lists_every_case() -> None:
    kept, fresh = exactness.rows(exactness.parts()[exactness.MEGATRON]), exactness.rows(section({}))
    assert kept == fresh, f"docs/EXACTNESS.md lists other cases: {COMMAND}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_follow_the_reference(of_four: dict[str, object], name: str) -> None:
    check(FOUR_RANKS[name], of_four[name], 4)
