"""The Trainer with FSDP2, two ranks: against the reference, and without the mixin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import ds_vrgd
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.moments import local
from tests.support.hf import (
    LR,
    STEPS,
    Case,
    Corpus,
    Result,
    attempt,
    chunk_gradients,
    follow_noise,
    fresh,
    labels_in,
    make_model,
    make_trainer,
    run_case,
    weights_of,
)
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import relative_error

pytestmark = pytest.mark.slow

WORLD = 2
WRAPPED = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "reshard_after_forward": True}
BASE = Case(None, fsdp=WRAPPED)
CASES = {
    "VRLAMB": BASE,
    "VRLAMB, clipped": replace(BASE, clip=0.05),
    "VRAdamW, no resharding": replace(BASE, optimizer="VRAdamW", fsdp={**WRAPPED, "reshard_after_forward": False}),
    "VRMomentum, means": replace(BASE, optimizer="VRMomentum", counts=False),
}


#: Accelerate's forms of a checkpoint.
KINDS = ("FULL_STATE_DICT", "SHARDED_STATE_DICT")


def merged(output: Path) -> Any:
    """Train as the Trainer does by itself: it reduces once for each step."""
    from ds_vrgd.noise import find_optimizer

    with fresh(fsdp=True):
        trainer = make_trainer(BASE, output, accelerator_config={})
        callback, expected = follow_noise(trainer)
        trainer.train()
        same_noise = callback.meter.state_dict() == expected.state_dict()
        return find_optimizer(trainer.optimizer).layer_statistics[0].k, same_noise


def without_mixin(output: Path) -> Any:
    with fresh(fsdp=True):
        make_trainer(replace(BASE, mixin=False), output).train()


def resumed(output: Path, kind: str) -> list[str]:
    """Train five steps, and the last three anew from the checkpoint of the second; return the weights that differ."""
    from ds_vrgd.noise import find_optimizer

    found = []
    case = replace(BASE, fsdp={**WRAPPED, "state_dict_type": kind})
    for start in (None, str(output / kind / "checkpoint-2")):
        with fresh(fsdp=True):
            saving = {"save_strategy": "steps", "save_steps": 2} if start is None else {}
            trainer = make_trainer(case, output / kind, **saving)
            trainer.train(resume_from_checkpoint=start)
            state = find_optimizer(trainer.optimizer).state_dict()["state"]
            found.append(weights_of(trainer) | {f"state {key}": of for key, of in state.items()})
    right, again = found
    return [name for name, value in right.items() if not same(value, again[name])]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool((local(one) == local(other)).all()) if isinstance(one, Tensor) else bool(one == other)


def accelerated(rank: int) -> dict[str, Any]:
    """Train with Accelerate alone, which shards after the optimizer was made; return the error and k."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with fresh(fsdp=True):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )
        accelerator = Accelerator(fsdp_plugin=plugin)
        plain, data = make_model(), Corpus()
        model: Any = make_model()
        made = ds_vrgd.VRAdamW(model.parameters(), lr=LR)
        model, optimizer = accelerator.prepare(model, made)
        ds_vrgd.attach(model, optimizer)
        start = {name: param.detach().double() for name, param in plain.named_parameters()}
        reference = DenseOptimizer("VRAdamW", start, lr=LR)
        for step in range(3):
            chunks = []
            for index in range(2 * WORLD):
                batch = {key: value[None] for key, value in data[step * 2 * WORLD + index].items()}
                chunks.append(chunk_gradients(plain, batch, 1.0 / labels_in(batch)))
                if index % WORLD == rank:
                    accelerator.backward(model(**batch).loss / 2)
            optimizer.step()
            optimizer.zero_grad()
            reference.step(chunks)
            weights = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
            plain.load_state_dict(weights, strict=False)
        return {"error": relative_error({n: w.flatten() for n, w in weights.items()}, reference),
                "k": made.layer_statistics[0].k}  # fmt: skip


def everything(rank: int, output: Path) -> dict[str, Any]:
    return {
        **{name: attempt(run_case, case, output) for name, case in CASES.items()},
        "merged": attempt(merged, output),
        "without": attempt(without_mixin, output),
        "accelerated": attempt(accelerated, rank),
        "resumed": {kind: attempt(resumed, output, kind) for kind in KINDS},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, everything, tmp_path_factory.mktemp("trainer"))


@pytest.mark.parametrize("name", CASES)
def test_follows_the_reference(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        result = of_rank[name]
        assert isinstance(result, Result), result
        assert result.moved > 1e-3
        assert result.error <= 8e-7
        assert result.k == WORLD * CASES[name].accumulation
        assert [entry["gsnr_k"] for entry in result.log if "gsnr_k" in entry] == [result.k] * STEPS


def test_one_reduction_a_step_is_one_chunk_a_rank(found: list[dict[str, Any]]) -> None:
    assert [of_rank["merged"] for of_rank in found] == [(WORLD, True)] * WORLD


def test_a_plain_trainer_gets_an_error_before_anything_is_updated(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "Call ds_vrgd.attach(model, optimizer)" in of_rank["without"]


def test_accelerate_shards_what_the_optimizer_already_has(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert isinstance(of_rank["accelerated"], dict), of_rank["accelerated"]
        assert of_rank["accelerated"]["error"] <= 8e-7
        assert of_rank["accelerated"]["k"] == 2 * WORLD


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_training_is_the_one_that_never_stopped(found: list[dict[str, Any]], kind: str) -> None:
    assert [of_rank["resumed"][kind] for of_rank in found] == [[]] * WORLD
