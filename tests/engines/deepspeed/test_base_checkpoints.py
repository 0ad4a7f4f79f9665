"""Checkpoints of base optimizers in a DeepSpeed engine continue with GSNR, and the other way round."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vrgd.doctor.chunks import chunk_gradients
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from ds_vrgd.engines.deepspeed import to_universal
from tests.support.model import batches, make_model
from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences, train, whole_state
from tests.support.trajectory import Case, build, reference_groups, relative_error

WORLD, ACCUMULATION, BEFORE, AFTER = 2, 4, 3, 2
ADAMW = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.1, "torch_adam": True}}
ENGINES: tuple[tuple[str, int, str, str | None], ...] = (
    ("VRAdamW", 0, "fp32", None),
    ("VRLAMB", 0, "bf16", None),
    ("VRAdamW", 1, "fp32", None),
    ("VRAdamW", 1, "bf16", "fp32"),
    ("VRAdamW", 2, "fp32", None),
    ("VRLAMB", 2, "fp32", None),
    ("VRAdamW", 3, "fp32", None),
    ("VRLAMB", 3, "fp32", None),
)
CASES = {
    f"{name}-z{stage}-{dtype}": Case(name, stage, dtype, ACCUMULATION, accum) for name, stage, dtype, accum in ENGINES
}
BEGINS = "no exp_avg_gsnr: the moments continue, and the running mean of the ratio begins anew"
DROPPED = "the checkpoint's exp_avg_gsnr was dropped, for GSNR is off here"


def engine_of(case: Case, optimizer: dict[str, Any], universal: bool = False) -> Any:
    more: dict[str, Any] = {"checkpoint": {"load_universal": True}} if universal else {}
    return build(case, WORLD, case.config(WORLD) | {"optimizer": optimizer} | more)


def load(engine: Any, folder: Path) -> list[str]:
    """Load a checkpoint, and return the warnings of ds_vrgd on this rank."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.load_checkpoint(str(folder))
    return [str(w.message) for w in said if "exp_avg_gsnr" in str(w.message)]


def moments(engine: Any) -> list[dict[str, torch.Tensor]]:
    """Return this rank's state of any optimizer, tensor by tensor, as it is stored."""
    return [{key: value.cpu().clone() for key, value in of.items()} for of in engine.basic_optimizer.state.values()]


def go_on(engine: Any, case: Case, rank: int) -> float:
    """Train some more steps and follow with the reference, which begins where the engine does; return the error."""
    state = whole_state(engine)
    start = {n: weight for n, weight in make_model().named_parameters() if weight.requires_grad}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    for name, weight in reference.params.items():
        weight.copy_(state["fp32"][name].view_as(weight))
        own = {key: state[key][name].double().view_as(weight) for key in ("exp_avg", "exp_avg_sq")}
        reference.state[name] |= own | {"step": BEFORE}
    plain = make_model()
    for step in range(BEFORE, BEFORE + AFTER):
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        reference.step(chunk_gradients(plain, batches(step, ACCUMULATION * WORLD), 1.0))
        train(engine, case, rank, WORLD, range(step, step + 1))
    return relative_error(master_weights(engine), reference)


def to_and_fro(rank: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name, case in CASES.items():
        ours = {"type": case.optimizer, "params": case.given()}
        base = ADAMW if case.optimizer == "VRAdamW" else {"type": "LAMB", "params": case.hyper()}
        off = {"type": "VRAdamW", "params": case.given() | {"gamma": 1.0}} if case.optimizer == "VRAdamW" else base
        engine = engine_of(case, base)
        train(engine, case, rank, WORLD, range(BEFORE))
        engine.save_checkpoint(str(folder / name / "base"))
        saved = moments(engine)
        engine.destroy()

        engine = engine_of(case, ours)
        said = load(engine, folder / name / "base")
        engine.save_checkpoint(str(folder / name / "no step"))
        again = load(engine, folder / name / "no step")
        answer: dict[str, Any] = {"begins": said, "begins_again": again, "moments": differences(saved, moments(engine))}
        if case.dtype == "fp32":
            answer["error"] = go_on(engine, case, rank)
        else:
            train(engine, case, rank, WORLD, range(BEFORE, BEFORE + AFTER))
        engine.save_checkpoint(str(folder / name / "ours"))
        continued, whole = moments(engine), whole_state(engine)
        engine.destroy()

        if case.stage > 0:
            if rank == 0:
                to_universal(folder / name / "base", folder / name / "universal")
            torch.distributed.barrier()
            engine = engine_of(case, ours, universal=True)
            answer["begins_universal"] = load(engine, folder / name / "universal")
            train(engine, case, rank, WORLD, range(BEFORE, BEFORE + AFTER))
            answer["universal"] = differences(whole, whole_state(engine))
            engine.destroy()

        engine = engine_of(case, off)
        answer["dropped"] = load(engine, folder / name / "ours")
        without = [{key: value for key, value in of.items() if key != "exp_avg_gsnr"} for of in continued]
        answer["back"] = differences(without, moments(engine))
        answer["had"] = all("exp_avg_gsnr" in of for of in continued)
        train(engine, case, rank, WORLD, range(BEFORE + AFTER, BEFORE + AFTER + 1))
        engine.destroy()
        found[name] = answer
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, to_and_fro, tmp_path_factory.mktemp("checkpoints"))


@pytest.mark.parametrize("name", CASES)
def test_moments_go_on_and_the_average_begins_anew(found: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank[name]["moments"] == []
        for said in ("begins", "begins_again", "begins_universal"):
            assert len(of_rank[name].get(said, [BEGINS][: 1 - rank])) == 1 - rank  # once, on the first rank
            assert all(BEGINS in text for text in of_rank[name].get(said, []))
        assert of_rank[name].get("error", 0.0) <= 8e-7
        assert of_rank[name].get("universal", []) == []


@pytest.mark.parametrize("name", CASES)
def test_the_average_is_dropped_for_the_base_optimizer(found: list[dict[str, Any]], name: str) -> None:
    for rank, of_rank in enumerate(found):
        assert of_rank[name]["had"]
        assert of_rank[name]["back"] == []
        assert len(of_rank[name]["dropped"]) == 1 - rank
        assert all(DROPPED in text for text in of_rank[name]["dropped"])
