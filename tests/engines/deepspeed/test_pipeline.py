"""DeepSpeed's pipeline: the trajectory of the same model without one, tied weights included."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.schedule import BackwardPass, OptimizerStep, ReduceTiedGrads, TrainSchedule
from torch import Tensor

from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.engines.deepspeed import CheckpointError, to_universal
from ds_vrgd.engines.deepspeed.pipeline import (
    ObservedSchedule,
    SumCopies,
    tied_weights,
)
from ds_vrgd.engines.deepspeed.refusals import _of_pipeline
from ds_vrgd.engines.stages import StageStatistics
from ds_vrgd.moments import Layer, LayerTable, ShardLayout
from ds_vrgd.optim import OPTIMIZERS, LayerStatistics
from tests.engines.deepspeed.pipelines import Outcome, Staged, build, follow, guarded, masters_by_stage, resume
from tests.support.logs import Log
from tests.support.model import param_groups
from tests.support.pipeline import loss_of, pipeline, plain_model, samples, shares
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, chunk_gradients, reference_groups, relative_error

pytestmark = pytest.mark.slow

WORLD = 4
OF_WEIGHTS, OF_DISTANCE = 8e-7, 5e-3
#: (stage, dtype, accumulation dtype) and the wrapper that DeepSpeed builds for it around a pipeline.
WRAPPERS = {
    (0, "fp32", None): "VRLAMB",
    (1, "fp32", None): "DeepSpeedZeroOptimizer",
    (0, "bf16", None): "BF16_Optimizer",
    (1, "bf16", None): "DeepSpeedZeroOptimizer",
    (1, "bf16", "fp32"): "BF16_Optimizer",
    (1, "fp16", None): "DeepSpeedZeroOptimizer",
}


def some() -> dict[str, Staged]:
    """Return cases of every wrapper, clipping, accumulation shorter than the pipeline, and untied weights."""
    found = {}
    names = ["VRLAMB", "VRLAMB", "VRAdamW", "VRLARS", "VRLAMB", "VRMomentum"]
    for optimizer, (stage, dtype, accum) in zip(names, WRAPPERS, strict=True):
        found[f"{optimizer}-{stage}-{dtype}-{accum}"] = Staged(Case(optimizer, stage, dtype, 3, accum))
    found["clipped"] = Staged(Case("VRSGD", 1, "fp32", 3, clip=0.3))
    found["clipped-bf16"] = Staged(Case("VRSGD", 1, "bf16", 3, clip=0.3))
    found["prenormalized"] = Staged(Case("LAMB", 0, "fp32", 3, arguments={"prenormalize": True}))
    found["short"] = Staged(Case("VRLAMB", 1, "fp32", 1))
    found["plain-copies"] = Staged(Case("VRLAMB", 1, "fp32", 2), matrices={"gamma": 1.0})
    found["untied"] = Staged(Case("VRAdam", 1, "fp32", 3), tied=False)
    return found


def others() -> dict[str, Staged]:
    """Return cases of every optimizer, four stages and one, activation checkpointing, offload, two levels of ranks."""
    found = {}
    for optimizer, (stage, dtype, accum) in ((o, w) for o in OPTIMIZERS for w in WRAPPERS):
        if optimizer.startswith("VR") or dtype == "fp32":
            found[f"{optimizer}-{stage}-{dtype}-{accum}"] = Staged(Case(optimizer, stage, dtype, 3, accum))
    for stage, dtype, accum in WRAPPERS:
        case = Case("VRLAMB", stage, dtype, 6, accum)
        found[f"four-stages-{stage}-{dtype}-{accum}"] = Staged(case, stages=4, blocks=5)
        found[f"one-stage-{stage}-{dtype}-{accum}"] = Staged(replace(case, accumulation=2), stages=1)
        options = {"activation_checkpoint_interval": 1, "checkpointable_layers": ["Block"]}
        found[f"checkpointed-{stage}-{dtype}-{accum}"] = Staged(
            replace(case, accumulation=2), blocks=3, options=options
        )
    offload = {"offload_optimizer": {"device": "cpu"}}
    for dtype in ("fp32", "bf16"):
        found[f"offloaded-{dtype}"] = Staged(Case("VRLAMB", 1, dtype, 3, zero=offload))
    found["two-levels"] = Staged(Case("VRLAMB", 1, "fp32", 2, ranks_per_node=2), stages=1)
    found["few-micro-batches"] = Staged(Case("VRLAMB", 1, "fp32", 2), stages=4, blocks=5)
    return found


def follow_all(rank: int, cases: dict[str, Staged]) -> dict[str, Outcome | str]:
    return {name: guarded(follow, staged) for name, staged in cases.items()}


def all_of(rank: int, folder: Path) -> dict[str, Any]:
    """Return everything that is examined on four ranks, in one spawn."""
    found: dict[str, Any] = {"follow": follow_all(rank, some())}
    found["resume"] = {name: guarded(resume, staged, folder / name) for name, staged in resumed().items()}
    found["nonfinite"] = {policy: guarded(spoil, rank, policy) for policy in ("skip", "error")}
    found["refused"] = {name: guarded(attempt, name) for name in REFUSED}
    found["broken"] = guarded(break_off)
    found["names"] = guarded(privates)
    found["measured"] = [guarded(measured_by, rank, stages) for stages in ((), (0,), (1, 3), (0, 1, 2, 3))]
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def found(checkpoints: Path) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, all_of, checkpoints)


@pytest.fixture(scope="module")
def found_slowly() -> list[dict[str, Outcome | str]]:
    return run_on_ranks(WORLD, follow_all, others())


def check(name: str, staged: Staged, outcomes: list[Outcome | str]) -> None:
    case = staged.case
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), outcome
        assert outcome.moved > 5e-3, "the steps are too small to tell anything"
        if case.clip and case.dtype != "fp32":
            assert outcome.of_distance <= OF_DISTANCE
        else:
            assert outcome.of_weights <= OF_WEIGHTS
        assert outcome.alike
        assert outcome.copies <= 1e-6
        assert outcome.evaluated
        if outcome.mean_ratios is not None:
            measured, right = outcome.mean_ratios
            assert measured == pytest.approx(right, rel=2e-3), "every rank has the layers of all stages"
            assert outcome.noise is not None
            assert outcome.noise[0] == pytest.approx(outcome.noise[1], rel=2e-3)
    wrapper = WRAPPERS[case.stage, case.dtype, case.accum_dtype]
    assert outcomes[0].wrapper == (case.optimizer if wrapper == "VRLAMB" else wrapper), name


@pytest.mark.parametrize("name", some())
def test_follows_the_reference_of_the_undivided_model(found: list[dict[str, Any]], name: str) -> None:
    check(name, some()[name], [of_rank["follow"][name] for of_rank in found])


@pytest.mark.parametrize("name", others())
def test_every_optimizer_and_more_stages(found_slowly: list[dict[str, Any]], name: str) -> None:
    check(name, others()[name], [of_rank[name] for of_rank in found_slowly])


def resumed() -> dict[str, Staged]:
    names = ("VRLAMB", "VRAdam", "", "VRLARS", "VRLAMB", "VRAdamW")
    cases = [Case(name, *wrapper[:2], 2, wrapper[2]) for name, wrapper in zip(names, WRAPPERS, strict=True) if name]
    return {f"{case.optimizer}-{case.stage}-{case.dtype}-{case.accum_dtype}": Staged(case) for case in cases}


@pytest.mark.parametrize("name", resumed())
def test_a_resumed_run_is_the_one_that_never_stopped(found: list[dict[str, Any]], name: str) -> None:
    assert [of_rank["resume"][name] for of_rank in found] == [(True, True)] * WORLD


def test_a_checkpoint_of_stages_is_not_converted(found: list[dict[str, Any]], checkpoints: Path) -> None:
    with pytest.raises(CheckpointError, match="model-parallel"):
        to_universal(checkpoints / "VRAdam-1-fp32-None", checkpoints / "universal")


# -- a gradient that is not finite ------------------------------------------------------------------------------------

SPOILED = "1.up.weight"  # of the first stage
AT = f"rank 1, micro-batch 2 of the window: NaN in '{SPOILED}'"


def spoil(rank: int, policy: str) -> list[dict[str, Any]]:
    """Put a NaN into one chunk of one layer of the first stage, in the second of three steps."""
    engines = ((0, "fp32"), (1, "fp32"), (1, "bf16")) if policy == "skip" else ((0, "fp32"), (1, "bf16"))
    return [spoil_one(rank, Case("VRLAMB", stage, dtype, 2, nonfinite=policy)) for stage, dtype in engines]


def spoil_one(rank: int, case: Case) -> dict[str, Any]:
    engine, log = build(Staged(case)), Log()
    logging.getLogger("ds_vrgd").addHandler(log)
    plain = plain_model(1)
    start = {name: param.detach().double() for name, param in plain.named_parameters()}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    calls = [0]

    def nan(grad: Tensor) -> Tensor | None:
        calls[0] += 1
        return grad * float("nan") if (rank, calls[0]) == (1, 4) else None

    own = dict(engine.module.named_parameters()).get(SPOILED)
    if own is not None:
        hooks = list(own._backward_hooks.items())
        own._backward_hooks.clear()
        own.register_hook(nan)
        own._backward_hooks.update(hooks)
    error, unchanged = "", False
    for step in range(3):
        before = masters_by_stage(engine)
        try:
            mine = shares(step, 2, case.accumulation)[engine.grid.get_data_parallel_rank()]
            engine.train_batch(samples(mine))
        except FloatingPointError as raised:
            error = str(raised)
        if step == 1:
            after = masters_by_stage(engine)
            unchanged = all(torch.equal(a, after[n][s]) for n, of in before.items() for s, a in of.items())
        elif case.dtype == "fp32":
            weights = {name: of[min(of)].view_as(start[name]) for name, of in before.items()}
            plain.load_state_dict(weights)
            reference.step(
                chunk_gradients(
                    plain, [tokens for share in shares(step, 2, case.accumulation) for tokens in share], 1.0
                )
            )
    masters = masters_by_stage(engine)
    distance = relative_error({name: of[min(of)] for name, of in masters.items()}, reference)
    logging.getLogger("ds_vrgd").removeHandler(log)
    counts = {float(state["step"]) for state in engine.basic_optimizer.state.values()}
    answer = {"error": error, "unchanged": unchanged, "skipped": engine.skipped_steps, "counts": counts}
    engine.destroy()
    told = [line for line in log.lines if "not finite" in line]
    return answer | {"told": told, "distance": distance if case.dtype == "fp32" else 0.0}


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_all_stages_skip_a_window_with_a_bad_chunk(found: list[dict[str, Any]], policy: str) -> None:
    for rank, of_rank in enumerate(found):
        assert not isinstance(of_rank["nonfinite"][policy], str), of_rank["nonfinite"][policy]
        for run in of_rank["nonfinite"][policy]:
            assert run["unchanged"]
            assert (run["skipped"], run["counts"]) == (1, {2.0})
            assert (AT in run["error"]) == (policy == "error"), run["error"]
            assert [AT in line for line in run["told"]] == ([True] if (policy, rank) == ("skip", 0) else [])
            assert run["distance"] <= OF_WEIGHTS  # what follows is as if the window had never been


# -- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "clipping without ZeRO": "gradient_clipping=1.0 with PipelineModule and zero_optimization.stage=0 in fp32",
    "copies unsummed": "data_types.grad_accum_dtype=fp32 with TiedLayerSpec at stage 1",
    "universal": "checkpoint.load_universal=true with PipelineModule",
    "saving": "PipelineModule in bf16 with zero_optimization.stage=0: DeepSpeed cuts the optimizer's state",
    "fused": 'reduction="fused" cannot serve this configuration: PipelineModule',
    "DualPipeV": "DualPipeVEngine: it follows a schedule of its own",
    "options of copies": "weight_decay of weight 0 tied as 'tokens' is 0.1 on rank 0, 0.0 on rank 2",
    "number of groups": "the number of param groups is 2 on ranks 0, 1, 1 on ranks 2, 3",
    "nothing reduced": "whether it trains anything with gamma below 1 is True on ranks 0, 1, False on ranks 2, 3",
}


def attempt(name: str) -> str:
    case = Case("VRLAMB", 1, "fp32", 2)
    change: dict[str, Case] = {
        "clipping without ZeRO": replace(case, stage=0, clip=1.0),
        "copies unsummed": replace(case, dtype="fp16", accum_dtype="fp32"),
        "saving": replace(case, stage=0, dtype="bf16"),
        "fused": replace(case, reduction="fused"),
        "nothing reduced": replace(case, stage=0),
    }
    case = change.get(name, case)
    config = case.config(2)
    if name == "universal":
        config["checkpoint"] = {"load_universal": True}
    if name == "DualPipeV":
        layers: list[Any] = [torch.nn.Linear(3, 3) for _ in range(4)]
        config |= {"gradient_accumulation_steps": 4, "train_batch_size": 32}
        module = DualPipeVModule(layers=layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    else:
        module = pipeline(1, 2, tied=name != "nothing reduced")
    groups = param_groups(module)
    is_last = module._grid.get_stage_id() == 1
    if is_last and name == "options of copies":
        groups[0]["weight_decay"] = 0.0
    if is_last and name == "number of groups":
        groups = [{"params": groups[0]["params"] + groups[1]["params"]}]
    if is_last and name == "nothing reduced":
        for group in groups:
            group["gamma"] = 1.0
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
    if name == "saving":
        engine.save_checkpoint("/nowhere")
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_on_every_rank(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        assert REFUSED[name] in of_rank["refused"][name]


@pytest.mark.parametrize(("size", "reasons"), [(1, []), (2, ["PipelineModule with sequence_parallel_size=2"])])
def test_sequence_parallelism_in_a_pipeline_is_refused(size: int, reasons: list[str]) -> None:
    engine = object.__new__(PipelineEngine)
    engine.__dict__ |= {
        "sequence_parallel_size": size, "gradient_clipping": lambda: 0.0, "load_universal_checkpoint": lambda: False,
        "get_data_types": lambda: (torch.float32, torch.float32),
    }  # fmt: skip
    assert [reason.partition(":")[0] for reason in _of_pipeline(engine)] == reasons


def break_off() -> str:
    """Return the error of training after an exception in the second of three micro-batches, on all ranks at once."""
    calls = [0]

    def failing(logits: Tensor, labels: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 2:
            raise MemoryError("out of memory")
        return loss_of(logits, labels)

    engine = build(Staged(Case("VRLAMB", 1, "fp32", 3), stages=1, options={"loss_fn": failing}))
    with pytest.raises(MemoryError):
        engine.train_batch(samples(shares(0, 1, 3)[0]))
    return str(guarded(engine.train_batch, samples(shares(1, 1, 3)[0])))


def test_a_batch_that_broke_off_is_not_trained_on(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "the batch before this one broke off" in of_rank["broken"]


def measured_by(rank: int, stages: tuple[int, ...]) -> list[tuple[int, dict[str, list[float]]]]:
    """Return k, and every stage's gamma and mean ratio, where some stages have had a gradient and others have not."""
    layer = Layer(f"of stage {rank}", 3)
    statistics = StageStatistics([layer], torch.distributed.group.WORLD, torch.device("cpu"))
    gamma, *columns = [torch.tensor([value], dtype=torch.float64) for value in [0.1 * (rank + 1)] + 5 * [rank + 1.0]]
    table = LayerTable([ShardLayout((layer,), (), 0)], torch.device("cpu"))
    parts = [LayerStatistics(table, 12, gamma, *columns)] if rank in stages else []
    merged = statistics.merge(parts)
    return [
        (part.k, dict(zip(part.table.names, torch.stack([part.gamma, part.mean_ratio], 1).tolist(), strict=True)))
        for part in merged
    ]


def test_statistics_where_a_stage_has_had_no_gradient_yet(found: list[dict[str, Any]]) -> None:
    def of(*stages: int) -> list[tuple[int, dict[str, list[float]]]]:
        measured = [[0.1 * (stage + 1), stage + 1.0] if stage in stages else [0.0, 0.0] for stage in range(WORLD)]
        return [(12, {f"of stage {stage}": values for stage, values in enumerate(measured)})]

    for of_rank in found:
        assert of_rank["measured"] == [[], of(0), of(1, 3), of(0, 1, 2, 3)]


# -- the schedule, and DeepSpeed's names ------------------------------------------------------------------------------


SCHEDULES = [(stages, micro_batches) for stages in (1, 2, 3, 4, 7) for micro_batches in (1, 2, 3, 8)]


def _together(steps: Iterable[Iterable[list[Any]]]) -> Iterator[tuple[list[Any], ...]]:
    """Yield the instructions of all stages, step by step."""
    return zip(*steps, strict=True)


@pytest.mark.parametrize(("stages", "micro_batches"), SCHEDULES)
def test_copies_meet_when_all_of_them_have_the_micro_batch(stages: int, micro_batches: int) -> None:
    """They meet in the same step on every stage, so nobody waits; no stage keeps more than half a pipeline's."""
    plain = [TrainSchedule(micro_batches, stages, stage) for stage in range(stages)]
    first_stages = {"ends": 0} if stages > 1 else {}
    ours = [ObservedSchedule(schedule, first_stages).steps() for schedule in plain]
    ended = [0] * stages
    met, most = 0, 0
    for theirs, observed in zip(_together(p.steps() for p in plain), _together(ours), strict=True):
        meets = set()
        for stage, (commands, own) in enumerate(zip(theirs, observed, strict=True)):
            assert [repr(c) for c in own if not isinstance(c, SumCopies)] == [repr(c) for c in commands]
            kinds = [type(command) for command in own]
            ended[stage] += kinds.count(BackwardPass)
            meets.add(kinds.count(SumCopies))
            if SumCopies in kinds:  # after the backward pass of this step, and before anything is reduced
                after = kinds[kinds.index(SumCopies) :]
                assert BackwardPass not in after
                assert (ReduceTiedGrads in after) == (ReduceTiedGrads in kinds)
            assert (ReduceTiedGrads in kinds) == (kinds[-1:] == [OptimizerStep])
        assert len(meets) == 1
        most = max(most, max(ended) - met)
        met += meets.pop()
        assert not first_stages or met <= min(ended)
    assert ended == [micro_batches] * stages
    if first_stages:
        assert met == micro_batches
        assert most <= stages // 2 + 1


def privates() -> dict[str, bool]:
    module = pipeline(1, 2)
    comm = module.tied_comms["tokens"]
    (tied,) = tied_weights(module)
    grid = module.mpu()
    return {
        "PipelineModule.tied_comms": {"ranks", "group", "weight_attr", "module"} <= comm.keys(),
        "PipelineModule.topology": tied.first_stage == 0,
        "PipelineModule._recursive_getattr": tied.params[0] is module.tied_modules["tokens"].weight,
        "grid.get_pipe_parallel_group": torch.distributed.get_world_size(grid.get_pipe_parallel_group()) == 2,
        "a stage's copies are marked": tied.params[0].ds_pipe_replicated == (grid.get_stage_id() > 0),
    }


def test_deepspeed_names_that_the_pipeline_leans_on(found: list[dict[str, Any]]) -> None:
    """See test_privates.py; ds_vrgd/engines/deepspeed/pipeline.py needs them."""
    for of_rank in found:
        assert isinstance(of_rank["names"], dict), of_rank["names"]
        assert [name for name, right in of_rank["names"].items() if not right] == []
    for name in ("_train_schedule", "_INSTRUCTION_MAP", "_exec_schedule", "train_batch", "was_step_applied"):
        assert hasattr(PipelineEngine, name), name
    assert hasattr(PipelineModule, "_synchronize_tied_weights")
