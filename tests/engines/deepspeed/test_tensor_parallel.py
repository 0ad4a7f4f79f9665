"""Tensor x data parallelism on four ranks: the result is that of the undivided model, on every rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch

import ds_vrgd.engines.deepspeed.attach
from ds_vrgd.engines.deepspeed import CheckpointError, to_universal
from ds_vrgd.optim import OPTIMIZERS
from tests.engines.deepspeed import auto_tensor_parallel
from tests.engines.deepspeed.cases import ENGINES, identify
from tests.engines.deepspeed.tensor_parallel import WORLD, Mpu, ParallelLM, build, close, groups, run_case, train
from tests.engines.deepspeed.test_exactness import OF_DISTANCE, OF_NOISE, OF_WEIGHTS, same_ratio
from tests.support.logs import Log
from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences, everything
from tests.support.trajectory import Case, Result

pytestmark = pytest.mark.slow

#: DeepSpeed's norm leaves out parts at stage 0 in bf16: refused.
EXACT = [engine for engine in ENGINES if engine[:2] != (0, "bf16")]
IN_TURN = [engine for engine in EXACT if engine not in ((1, "fp16", None), (3, "fp32", None), (1, "bf16", "bf16"))]
K = 4


def micro_batches(tp: int) -> int:
    """Return the accumulation that makes :data:`K` chunks per step, the same ones under every split."""
    return K * tp // WORLD


def some() -> Iterator[tuple[int, str, Case]]:
    """Return cases of the optimizers under most engines in turn, clipping, observe mode, and the other splits."""
    for optimizer, (stage, dtype, accum_dtype) in zip(OPTIMIZERS, IN_TURN, strict=True):
        case = Case(optimizer, stage, dtype, micro_batches(2), accum_dtype)
        yield 2, identify(case), case
    base = Case("VRLAMB", 2, "fp32", micro_batches(2))
    for stage, reduction in ((0, "auto"), (2, "auto"), (2, "observe"), (3, "auto")):
        case = replace(base, stage=stage, reduction=reduction, clip=0.05)
        yield 2, identify(case, "clipped"), case
    case = replace(base, stage=1, dtype="bf16", accum_dtype="fp32", clip=0.05)
    yield 2, identify(case, "clipped"), case
    case = replace(base, stage=0, arguments={"prenormalize": True})
    yield 2, identify(case, "prenormalize"), case
    for tp in (1, 2, 4):
        for stage, reduction in ((0, "auto"), (2, "auto"), (2, "observe")):
            case = replace(base, stage=stage, reduction=reduction, accumulation=micro_batches(tp))
            yield tp, identify(case, "base"), case
    case = replace(base, stage=1, dtype="bf16", optimizer="LAMB", accumulation=micro_batches(4))
    yield 4, identify(case), case


def all_others() -> Iterator[tuple[int, str, Case]]:
    for tp, optimizer, (stage, dtype, accum_dtype) in product((1, 2, 4), OPTIMIZERS, EXACT):
        for reduction in ("auto", "observe") if OPTIMIZERS[optimizer].reduces_variance and stage else ("auto",):
            case = Case(optimizer, stage, dtype, micro_batches(tp), accum_dtype, reduction=reduction)
            yield tp, identify(case), case
    offloaded = {"offload_optimizer": {"device": "cpu"}}
    for optimizer, (stage, dtype, accum_dtype) in product(("VRLAMB", "LAMB"), EXACT):
        case = Case(optimizer, stage, dtype, micro_batches(2), accum_dtype, clip=0.05)
        yield 2, identify(case, "clipped"), case
        if stage and accum_dtype is None:
            yield 2, identify(case, "offloaded"), replace(case, zero=offloaded)


def trajectories(rank: int, cases: list[tuple[int, str, Case]]) -> dict[tuple[int, str], Result]:
    mpus = {tp: Mpu(tp) for tp in (1, 2, 4)}
    return {(tp, name): run_case(copy.deepcopy(case), mpus[tp]) for tp, name, case in cases}


@dataclass(frozen=True)
class Spoiled:
    """Put a NaN into one rank's gradient of one weight.

    Attributes:
        case: the engine.
        weight: which; all but ``down.weight`` are copies, which DeepSpeed's norm counts on the first tensor-parallel
            rank alone.
        rank: global rank, (data-parallel, tensor-parallel) in base 2.
        second_group: further options of the group of biases and normalisation.
        unchecked: whether DeepSpeed's own check for infinities is turned off.
    """

    case: Case
    weight: str = "down.weight"
    rank: int = 1
    second_group: Mapping[str, Any] = field(default_factory=dict)
    unchecked: bool = False


def spoiled(mpu: Mpu, given: Spoiled) -> dict[str, Any]:
    """Return what every rank does about it, and what the first rank reports."""
    case, model, spoiling, log = given.case, ParallelLM(mpu), [False], Log()
    if torch.distributed.get_rank() == given.rank:
        weight = model.get_parameter(given.weight)
        weight.register_hook(lambda grad: grad * float("nan") if spoiling[0] else grad)
    more = {"bf16": {"enabled": True, "check_grad_overflow": False}} if given.unchecked else {}
    engine = build(case, mpu, model, given.second_group, **more)
    train(engine, case, mpu, 0)
    before = everything(engine, schedule=False)
    spoiling[0] = True
    logging.getLogger("ds_vrgd").addHandler(log)
    train(engine, case, mpu, 1)
    logging.getLogger("ds_vrgd").removeHandler(log)
    after = everything(engine, schedule=False)
    spoiling[0] = False
    train(engine, case, mpu, 2)
    counters = {"steps": 0, "loss_scale": 0}
    found = {
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "changed": differences(before | counters, after | counters),
        "overflow": bool(engine.optimizer.overflow),
        "log": log.lines,
    }
    close(engine)
    return found


def resumed(mpu: Mpu, case: Case, folder: Path) -> list[str]:
    """Return where a run that was saved and loaded differs from the run that never stopped."""
    engine = build(case, mpu)
    for step in range(4):
        if step == 2:
            engine.save_checkpoint(str(folder))
        train(engine, case, mpu, step)
    right = everything(engine, schedule=False)
    close(engine)
    engine = build(case, mpu)
    engine.load_checkpoint(str(folder))
    for step in (2, 3):
        train(engine, case, mpu, step)
    found = differences(right, everything(engine, schedule=False))
    close(engine)
    with pytest.raises(CheckpointError, match="is of a model-parallel or unknown kind"):
        to_universal(folder, folder / f"universal {torch.distributed.get_rank()}")
    return found


def warnings_of_attach() -> Any:
    return mock.patch.object(ds_vrgd.engines.deepspeed.attach.logger, "warning")


def auto() -> tuple[dict[str, Any], int]:
    """Return the errors of each case, and the warnings of all."""
    with warnings_of_attach() as warning:
        found = {name: auto_tensor_parallel.run_case(copy.deepcopy(case)) for name, case in AUTO.items()}
    return found, warning.call_count


def warned(mpu: Mpu, *, marked: bool) -> list[str]:
    with warnings_of_attach() as warning:
        close(build(Case("VRLAMB", 2, "fp32", 2), mpu, ParallelLM(mpu, marked=marked)))
    return [call.args[0] for call in warning.call_args_list]


def refused(build_it: Callable[[], Any]) -> str:
    try:
        close(build_it())
    except (ValueError, RuntimeError) as error:
        groups.mpu = None
        return f"{type(error).__name__}: {error}"
    return "built"


def refusals(mpu: Mpu) -> dict[str, str]:
    case = Case("VRLAMB", 2, "fp32", 2)

    def sequence_parallel() -> Any:
        model = ParallelLM(mpu)
        model.norm.weight.sequence_parallel = True  # type: ignore[assignment]
        return build(case, mpu, model)

    def pipelined() -> Any:
        longer = copy.copy(mpu)
        longer.get_model_parallel_world_size = lambda: 4  # type: ignore[method-assign]
        return build(case, longer)

    def renamed() -> Any:
        model = ParallelLM(mpu)
        if mpu.tp_rank:
            model.before = model._modules.pop("norm")
            model.norm = model.before.forward  # type: ignore[assignment]
        return build(case, mpu, model)

    def cut_by_init() -> Any:
        with deepspeed.zero.Init():
            model = torch.nn.Linear(8, 8)
        return build(replace(case, stage=3), mpu, model)

    return {
        "zero.Init": refused(cut_by_init),
        "stage 0": refused(lambda: build(replace(case, stage=0, dtype="bf16"), mpu)),
        "universal": refused(lambda: build(case, mpu, checkpoint={"load_universal": True})),
        "sequence parallel": refused(sequence_parallel),
        "pipeline": refused(pipelined),
        "lr": refused(lambda: build(replace(case, arguments={"lr": 1e-3 + mpu.tp_rank}), mpu)),
        "name": refused(renamed),
    }


def _engine(stage: int, dtype: str, reduction: str, accum_dtype: str | None = None, **more: Any) -> Case:
    return Case("VRLAMB", stage, dtype, 2, accum_dtype, reduction=reduction, **more)


COPY = "norm.weight"
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
SPOILED = {
    "stage 0": Spoiled(_engine(0, "fp32", "auto")),
    "stage 1": Spoiled(_engine(1, "bf16", "auto", "fp32")),
    "stage 2, fused": Spoiled(_engine(2, "fp32", "auto")),
    "stage 2, observe": Spoiled(_engine(2, "bf16", "observe")),
    "stage 2, fp16": Spoiled(_engine(2, "fp16", "auto")),
    "stage 3, fp16": Spoiled(_engine(3, "fp16", "auto")),
    "copy, stage 0": Spoiled(_engine(0, "fp32", "auto"), COPY),
    "copy, stage 1, fused": Spoiled(_engine(1, "fp32", "auto"), "tokens.weight"),
    "copy, stage 1, observe": Spoiled(_engine(1, "fp32", "observe"), COPY),
    "copy, stage 1, BF16_Optimizer, last rank": Spoiled(_engine(1, "bf16", "auto", "fp32"), "tokens.weight", 3),
    "copy, stage 2, fused, last rank": Spoiled(_engine(2, "fp32", "auto"), COPY, 3),
    "copy, stage 2, fused, bf16 unchecked": Spoiled(_engine(2, "bf16", "auto"), COPY, unchecked=True),
    "copy, stage 2, observe, bf16 unchecked": Spoiled(_engine(2, "bf16", "observe"), COPY, 3, unchecked=True),
    "copy, stage 2, CPU offload": Spoiled(_engine(2, "fp32", "auto", zero=OFFLOADED), COPY),
    "copy, stage 3, fused": Spoiled(_engine(3, "fp32", "auto"), COPY, 3),
    "copy, stage 3, observe": Spoiled(_engine(3, "fp32", "observe"), COPY, 3),
    "copy in a group with gamma 1, fused": Spoiled(_engine(3, "fp32", "auto"), COPY, 3, {"gamma": 1.0}),
    "copy beside a group with gamma 1, bf16 unchecked": Spoiled(
        _engine(2, "bf16", "auto"), "tokens.weight", 2, {"gamma": 1.0}, unchecked=True
    ),
    "copy behind a group with gamma 1, bf16 unchecked": Spoiled(
        _engine(1, "bf16", "observe", arguments={"gamma": 1.0}), COPY, 3, {"gamma": 0.1}, unchecked=True
    ),
    "copy in a group with gamma 1, observe": Spoiled(_engine(2, "fp32", "observe"), COPY, 3, {"gamma": 1.0}),
}


#: Under DeepSpeed's AutoTP.
AUTO = {
    identify(case): case
    for case in (
        Case("VRLARS", 0, "fp32", micro_batches(2)),
        Case("VRLAMB", 2, "fp32", micro_batches(2), clip=0.05),
        Case("VRAdamW", 1, "bf16", micro_batches(2), "fp32"),
        Case("VRLAMB", 3, "bf16", micro_batches(2), reduction="observe"),
    )
}


def on_rank(rank: int, folder: Path) -> dict[str, Any]:
    mpu = Mpu(2)
    return {
        "trajectories": trajectories(rank, list(some())),
        "spoiled": {name: spoiled(mpu, case) for name, case in SPOILED.items()},
        "resumed": resumed(mpu, Case("VRLAMB", 2, "bf16", 2, arguments={"gsnr_dtype": "bfloat16"}), folder),
        "unmarked": warned(mpu, marked=False),
        "marked": warned(mpu, marked=True),
        "refusals": refusals(mpu),
        "auto": auto(),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, on_rank, tmp_path_factory.mktemp("checkpoint"))


def check(outcomes: list[Result], case: Case) -> None:
    for outcome in outcomes:
        assert outcome.moved > 5e-3, "the steps are too small to tell anything"
        if case.clip and case.dtype != "fp32" and not case.is_fused():
            assert outcome.of_distance <= OF_DISTANCE
        else:
            assert outcome.of_weights <= OF_WEIGHTS
        assert outcome.stats == outcomes[0].stats
        assert outcome.of_noise is None or outcome.of_noise <= OF_NOISE
        assert outcome.stats is None or outcome.stats.k == K


@pytest.mark.parametrize(("tp", "name", "case"), [pytest.param(*one, id=f"tp{one[0]}-{one[1]}") for one in some()])
def test_trajectory_follows_the_undivided_reference(
    found: list[dict[str, Any]], tp: int, name: str, case: Case
) -> None:
    check([of_rank["trajectories"][tp, name] for of_rank in found], case)


@pytest.mark.parametrize("name", [name for tp, name, _ in some() if tp == 1])
def test_ratio_does_not_depend_on_the_split(found: list[dict[str, Any]], name: str) -> None:
    outcomes = found[0]["trajectories"]
    names = {tp: identify(replace(case, accumulation=micro_batches(tp)), "base")
             for tp in (1, 2, 4) for t, n, case in some() if (t, n) == (1, name)}  # fmt: skip
    same_ratio(outcomes[1, names[1]], outcomes[2, names[2]])
    same_ratio(outcomes[1, names[1]], outcomes[4, names[4]])


@pytest.mark.parametrize("name", SPOILED)
def test_all_ranks_skip_a_step_that_one_rank_must_skip(found: list[dict[str, Any]], name: str) -> None:
    given = SPOILED[name]
    for rank, of_rank in enumerate(found):
        seen = of_rank["spoiled"][name]
        assert (seen["skipped"], seen["steps"], seen["changed"], seen["overflow"]) == (1, 3, [], False)
        told = [line for line in seen["log"] if "not finite" in line]
        if rank > 0 or given.case.dtype == "fp16":  # a loss scale skips steps without a word
            assert told == []
        else:
            at = [f"rank {given.rank}, micro-batch {index} of the window: NaN in '{given.weight}'" for index in (1, 2)]
            assert [line.endswith(f": {at[0]}; {at[1]}") for line in told] == [True], told


def test_a_loaded_run_is_the_run_that_went_on(found: list[dict[str, Any]]) -> None:
    assert [of_rank["resumed"] for of_rank in found] == [[]] * WORLD


def test_a_weight_that_looks_split_and_is_not_marked_is_named(found: list[dict[str, Any]]) -> None:
    (message,) = found[0]["unmarked"]
    assert "3 weights differ between tensor-parallel ranks and are not marked" in message
    assert "'up.weight', 'up.bias', 'down.weight'" in message
    assert "Set tensor_model_parallel=True" in message
    assert [of_rank["unmarked"] for of_rank in found[1:]] == [[]] * (WORLD - 1)
    assert [of_rank["marked"] for of_rank in found] == [[]] * WORLD


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stage 0", "bf16.enabled=true and zero_optimization.stage=0: DeepSpeed's norm of the gradient leaves out"),
        ("universal", "checkpoint.load_universal=true with tensor parallelism"),
        ("sequence parallel", "'norm.weight' are marked sequence_parallel"),
        ("pipeline", "a model-parallel group of 4 ranks with 2 in the tensor-parallel group"),
        ("zero.Init", "'weight' was cut over tensor-parallel ranks by deepspeed.zero.Init"),
        ("lr", "lr of param group 0 is 0.001 on ranks 0, 2, 1.001 on ranks 1, 3"),
        ("name", "'norm.weight' is float32 of 1 dimensions"),
    ],
)
def test_what_could_not_be_exact_is_refused_on_every_rank(found: list[dict[str, Any]], name: str, message: str) -> None:
    for of_rank in found:
        assert message in of_rank["refusals"][name]


@pytest.mark.parametrize("name", AUTO)
def test_a_model_cut_by_deepspeed_follows_the_undivided_reference(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        outcomes, warnings = of_rank["auto"]
        outcome = outcomes[name]
        assert warnings == 0
        assert outcome["moved"] > 5e-3, "the steps are too small to tell anything"
        assert max(outcome["of_weights"]) <= OF_WEIGHTS
        assert outcome["apart"] <= (1e-6 if AUTO[name].dtype == "fp32" else 2e-2), "chunks are not the whole model's"


def test_every_optimizer_under_every_engine_and_split() -> None:
    cases = list(all_others())
    outcomes = run_on_ranks(WORLD, trajectories, cases)
    for tp, name, case in cases:
        check([of_rank[tp, name] for of_rank in outcomes], case)
