"""Fused mode beyond the trajectories: when it is chosen, what it leaves of DeepSpeed, and who else reads gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_grad, safe_set_full_grad
from torch import Tensor

from ds_vrgd.doctor.chunks import chunk_gradients
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from ds_vrgd.engines.deepspeed import fused
from tests.support.model import batches, make_model, param_groups
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import (
    DTYPES,
    Case,
    build,
    reference_groups,
    relative_error,
)  # fmt: skip

WORLD = 2
PLAIN = Case("VRLAMB", 2, "fp32", 2)

#: Cases that reduction="fused" cannot serve, with what the error must say.
UNFIT: dict[str, tuple[Case, tuple[str, ...]]] = {
    "stage 0": (replace(PLAIN, stage=0), ("stage=0", "Use stage 1, 2 or 3")),
    "fp32 accumulation": (replace(PLAIN, stage=1, dtype="bf16", accum_dtype="fp32"), ("BF16_Optimizer", "leave out")),
    "offload": (
        replace(PLAIN, zero={"offload_optimizer": {"device": "cpu"}}),
        ("zero_optimization.offload_optimizer", "Remove that section"),
    ),
    "offload at stage 3": (
        replace(PLAIN, stage=3, zero={"offload_optimizer": {"device": "cpu"}}),
        ("zero_optimization.offload_optimizer", "Remove that section"),
    ),
    "no hooks": (
        replace(PLAIN, stage=1, zero={"contiguous_gradients": False, "overlap_comm": False}),
        ("contiguous_gradients=false", "Set either to true"),
    ),
}


def is_fused(engine: Any) -> bool:
    return isinstance(engine.optimizer, (fused.FusedZeroOptimizer, fused.FusedZeroOptimizerStage3))


def train_one_window(engine: Any, case: Case, rank: int, world: int) -> None:
    """Run every backward pass of a window; its step is left to the caller."""
    tokens = batches(0, case.accumulation * world)
    for index in range(case.accumulation):
        if index:
            engine.step()  # DeepSpeed counts micro-batches here
        engine.backward(engine(tokens[index * world + rank].to(engine.device)))


def chosen_mode(rank: int, world: int) -> dict[str, Any]:
    """Return each unfit case's mode under auto and error under fused, and each fit case's mode under each word."""
    found: dict[str, Any] = {}
    for name, (case, _) in UNFIT.items():
        engine = build(case, world)
        found[name, "auto"] = is_fused(engine)
        train_one_window(engine, case, rank, world)
        engine.step()
        engine.destroy()
        try:
            build(replace(case, reduction="fused"), world)
        except ValueError as error:
            found[name, "fused"] = str(error)
    for stage in (1, 2, 3):
        for reduction in ("auto", "fused", "observe"):
            engine = build(replace(PLAIN, stage=stage, reduction=reduction), world)
            found[stage, reduction] = is_fused(engine)
            engine.destroy()
        # A DeepSpeed whose methods take something else.
        wrapper = DeepSpeedZeroOptimizer_Stage3 if stage == 3 else DeepSpeedZeroOptimizer
        kept = wrapper.unscale_and_clip_grads
        wrapper.unscale_and_clip_grads = lambda self, something_else: None
        try:
            engine = build(replace(PLAIN, stage=stage), world)
            found[stage, "changed"] = is_fused(engine), fused.unfit(engine)
        finally:
            wrapper.unscale_and_clip_grads = kept
        engine.destroy()
    return found


def gamma_one(rank: int, world: int) -> dict[str, Any]:
    """Return what an engine around gamma = 1 holds that the plain wrapper does not."""
    found: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        engine = build(replace(PLAIN, optimizer="VRAdamW", stage=stage, arguments={"gamma": 1.0}), world)
        observer = engine.basic_optimizer.observer
        found[f"stage {stage}"] = {
            "class": type(engine.optimizer).__module__.split(".")[0],
            "hooks": sum(len(param._backward_hooks or {}) for param in engine.module.parameters()),
            "moments": observer._moments,
        }
        train_one_window(engine, PLAIN, rank, world)
        engine.step()
        found[f"stage {stage}"]["state"] = sorted(
            {key for state in engine.basic_optimizer.state.values() for key in state}
        )
        engine.destroy()
    return found


def mean_alone(rank: int, world: int) -> dict[int, Any]:
    """Return what the exchange of LAMB holds, and what came of the weights with it and with VRLAMB at gamma = 1."""
    found: dict[int, Any] = {}
    for stage in (1, 2, 3):
        weights = []
        for case in (
            replace(PLAIN, optimizer="LAMB", stage=stage, dtype="bf16"),
            replace(PLAIN, stage=stage, dtype="bf16", arguments={"gamma": 1.0}),
        ):
            engine = build(case, world)
            observer = engine.basic_optimizer.observer
            train_one_window(engine, case, rank, world)
            held = [observer.moments(tensor) for tensor in observer.tensors]
            engine.step()
            weights.append([tensor.detach().clone() for tensor in observer.tensors])
            found[stage] = {
                "fused": is_fused(engine),
                "sums": sum(moments.total.numel() for moments in held),
                "squares": sum(moments.m2.numel() for moments in held),
                "collective for hooks": observer._moments.before_first_bucket is not None,
            }
            engine.destroy()
        found[stage]["alike"] = all(torch.equal(*pair) for pair in zip(*weights, strict=True))
    return found


def readers(rank: int, world: int) -> dict[str, Any]:
    """Compare DeepSpeed's gradient readers and writers at the boundary with the mean of plain chunk gradients."""
    found: dict[str, Any] = {}
    for stage, dtype in ((1, "fp32"), (2, "fp32"), (2, "bf16"), (3, "fp32"), (3, "bf16")):
        case = replace(PLAIN, stage=stage, dtype=dtype)
        engine = build(case, world)
        assert is_fused(engine) == (stage > 0)
        plain = make_model().to(engine.device, DTYPES[dtype])
        tokens = [t.to(engine.device) for t in batches(0, case.accumulation * world)]
        chunks = chunk_gradients(plain, tokens, 1.0 / case.accumulation)
        train_one_window(engine, case, rank, world)
        errors: dict[str, float] = {}
        for name, param in engine.module.named_parameters():
            if param.requires_grad:
                grad: Tensor = safe_get_full_grad(param)
                mean = torch.stack([chunk[name] for chunk in chunks]).mean(0)
                errors[name] = float((grad.double().cpu() - mean).norm() / mean.norm())
        buckets = [bucket for bucket in engine.optimizer.ipg_buckets.values() if bucket.buffer is not None]
        allocated = [bucket for bucket in buckets if stage < 3 and len(bucket.buffer)]
        written = True
        if stage < 3:  # at stage 3 DeepSpeed cannot write a gradient that its ranks do not share equally
            weight = next(param for param in engine.module.parameters() if param.requires_grad)
            safe_set_full_grad(weight, torch.full_like(safe_get_full_grad(weight), 2.0))
            written = bool((safe_get_full_grad(weight) == 2.0).all())
        engine.step()
        found[f"stage {stage}, {dtype}"] = {"errors": errors, "buckets": len(allocated), "written": written}
        engine.destroy()
    return found


def backward_passes(engine: Any, way: str, tokens: list[Tensor], rank: int, world: int) -> None:
    """Run the two micro-batches of a window, and its step."""
    if way == "coalesced":
        with engine.coalesce_grad_reduction():
            for index in range(2):
                engine.backward(engine(tokens[index * world + rank]))
    elif way == "no_sync":
        with engine.no_sync():
            engine.backward(engine(tokens[rank]))
        engine.backward(engine(tokens[world + rank]))
    else:
        engine.backward(engine(tokens[rank]))
        engine.step()
        engine.backward(engine(tokens[world + rank]))
    engine.step()


ODD = [
    ("coalesced", 1), ("coalesced", 2), ("coalesced", 3), ("no_sync", 0), ("no_sync", 1), ("mixed gamma", 2),
    ("mixed gamma", 3),
]  # fmt: skip


def odd_windows(rank: int, world: int) -> dict[tuple[str, int], tuple[float, int]]:
    """Follow windows that DeepSpeed reduces in ways of its own, and a group without GSNR."""
    found: dict[tuple[str, int], tuple[float, int]] = {}
    for way, stage in ODD:
        counted = way == "mixed gamma"  # otherwise DeepSpeed divides by 1, and the step is the micro-batches' sum
        case = replace(PLAIN, stage=stage, accumulation=2 if counted else 1, clip=0.05)
        model = make_model()
        groups = param_groups(model, **case.without_decay())
        start = {name: weight.double() for name, weight in model.named_parameters() if weight.requires_grad}
        expected = reference_groups(start, case)
        if way == "mixed gamma":
            groups[1]["gamma"] = expected[1]["gamma"] = 1.0
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=case.config(world))
        assert is_fused(engine) == (stage > 0)
        plain = make_model().to(engine.device)
        reference = DenseOptimizer(case.optimizer, start, expected, **case.hyper())
        for step in range(3):
            tokens = [t.to(engine.device) for t in batches(step, 2 * world)]
            with whole_weights(engine) as weights:
                plain.load_state_dict(weights, strict=False)
            chunks = chunk_gradients(plain, tokens, 0.5)
            if not counted:
                chunks = [{name: grad * 2 for name, grad in chunk.items()} for chunk in chunks]
            reference.step(chunks, clip=case.clip)
            backward_passes(engine, way, tokens, rank, world)
        statistics = engine.basic_optimizer.layer_statistics
        found[way, stage] = relative_error(master_weights(engine), reference), statistics[0].k
        engine.destroy()
    return found


def everything(rank: int, world: int) -> dict[str, Any]:
    return {
        "mode": chosen_mode(rank, world),
        "gamma": gamma_one(rank, world),
        "mean": mean_alone(rank, world),
        "readers": readers(rank, world),
        "odd": odd_windows(rank, world),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return run_on_ranks(WORLD, everything, WORLD)[0]


@pytest.mark.parametrize("name", UNFIT)
def test_auto_falls_back_and_fused_refuses(found: dict[str, Any], name: str) -> None:
    assert found["mode"][name, "auto"] is False
    message = found["mode"][name, "fused"]
    for part in ('reduction="fused"', *UNFIT[name][1]):
        assert part in message


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_mode_is_what_was_asked_for(found: dict[str, Any], stage: int) -> None:
    assert [found["mode"][stage, word] for word in ("auto", "fused", "observe")] == [True, True, False]
    is_used, reason = found["mode"][stage, "changed"]
    assert not is_used
    assert "unscale_and_clip_grads takes other arguments" in reason


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gamma_one_installs_nothing(found: dict[str, Any], stage: int) -> None:
    held = found["gamma"][f"stage {stage}"]
    assert held["class"] == "deepspeed" or (stage == 0 and held["class"] == "ds_vrgd")
    assert held["hooks"] == 0
    assert held["moments"] is None
    assert held["state"] == ["exp_avg", "exp_avg_sq", "step"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_lamb_takes_the_mean_alone_from_the_exchange(found: dict[str, Any], stage: int) -> None:
    held = found["mean"][stage]
    assert held.pop("sums") > 0
    assert held == {"fused": True, "squares": 0, "collective for hooks": False, "alike": True}


@pytest.mark.parametrize("name", ["stage 1, fp32", "stage 2, fp32", "stage 2, bf16", "stage 3, fp32", "stage 3, bf16"])
def test_deepspeeds_readers_see_the_mean(found: dict[str, Any], name: str) -> None:
    seen = found["readers"][name]
    assert len(seen["errors"]) == 9
    assert max(seen["errors"].values()) < 1e-6, seen["errors"]
    assert seen["written"]
    assert seen["buckets"] == 0, "DeepSpeed's own buckets were allocated"


@pytest.mark.parametrize(("way", "stage"), ODD)
def test_odd_windows_follow_the_reference(found: dict[str, Any], way: str, stage: int) -> None:
    error, k = found["odd"][way, stage]
    assert error <= 8e-7
    assert k == 4


@pytest.mark.parametrize("wrapper", fused.FUSED, ids=lambda wrapper: wrapper.__name__)
def test_deepspeed_has_the_methods_that_are_replaced(wrapper: type) -> None:
    assert fused.changed_methods(wrapper) == [], "DeepSpeed changed: see ds_vrgd/engines/deepspeed/fused.py"
