"""Optimizer offload: what lives where, and what DeepSpeed's offload to NVMe lacks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model import batches
from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.trajectory import Case, build

WAYS = tuple(product((1, 2, 3), (False, True)))


def places(rank: int) -> dict[tuple[int, bool], dict[str, Any]]:
    """Devices of an engine's tensors, in the middle of ``step()``, by stage and ``pin_memory``."""
    found = {}
    for stage, pin_memory in WAYS:
        offload = {"device": "cpu", "pin_memory": pin_memory}
        case = replace(Case("VRLAMB", stage, "bf16", 2), zero={"offload_optimizer": offload})
        engine = build(case, 1)
        optimizer = engine.basic_optimizer
        observer = optimizer.observer
        seen: dict[str, Any] = {"mode": observer.mode, "copies": [], "pinned": [], "held": []}

        def note(tensor: Any, moments_of: Any = observer.moments, seen: Any = seen, observer: Any = observer) -> Any:
            moments = moments_of(tensor)
            held = observer._moments._store.of(tensor)
            seen["held"] += [moment.device.type for moment in held]
            seen["copies"] += [moments.total.device.type, moments.m2.device.type]
            seen["pinned"] += [moments.total.is_pinned(), moments.m2.is_pinned()]
            seen["shared"] = moments.total.data_ptr() == held[0].data_ptr()
            return moments

        observer.moments = note
        for tokens in batches(0, 2):
            engine.backward(engine(tokens.to(engine.device)))
            engine.step()
        entries = [entry for state in optimizer.state.values() for entry in state.values()]
        seen["state"] = [entry.device.type for entry in entries]
        seen["weights"] = [tensor.device.type for tensor in observer.tensors]
        seen["after"] = observer.held_bytes()[0]
        found[stage, pin_memory] = seen
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, bool], dict[str, Any]]:
    answer: dict[tuple[int, bool], dict[str, Any]] = run_on_ranks(1, places)[0]
    return answer


@pytest.mark.parametrize(("stage", "pin_memory"), WAYS)
def test_what_lives_where(found: dict[tuple[int, bool], dict[str, Any]], stage: int, pin_memory: bool) -> None:
    seen = found[stage, pin_memory]
    assert seen["mode"] == "observe"
    assert set(seen["state"]) == set(seen["weights"]) == {"cpu"}
    assert set(seen["held"]) == {DEVICE}, "moments are formed where the gradients are"
    assert set(seen["copies"]) == {"cpu"}
    assert seen["shared"] is (DEVICE == "cpu"), "a copy on the same device"
    assert seen["after"] == 0, "the window's moments outlive it"
    if DEVICE != "cpu":
        assert set(seen["pinned"]) == {pin_memory}


def train_on_nvme(rank: int, folder: str, resumes: bool) -> dict[str, Any]:
    """Three steps of DeepSpeed's engine around torch's AdamW, saved, or what a new process finds in the checkpoint."""
    import deepspeed

    torch.manual_seed(int(resumes))
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024, bias=False), torch.nn.Linear(1024, 8, bias=False))
    offload = {"device": "nvme", "nvme_path": f"{folder}/{resumes}", "buffer_count": 5}
    zero = {"stage": 3, "sub_group_size": 1_000_000, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": zero | {"offload_optimizer": offload},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if resumes:
        engine.load_checkpoint(f"{folder}/saved", tag="it")
    else:
        for step in range(3):
            inputs = torch.randn(4, 1024, generator=torch.Generator().manual_seed(step)).to(engine.device).bfloat16()
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
        engine.save_checkpoint(f"{folder}/saved", tag="it")
    found = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(param):
            found[name] = param.detach().float().cpu().clone()
    return {"weights": found, "states": len(engine.optimizer.optimizer.state)}


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="shown on the CPU")
def test_deepspeed_still_resumes_from_nvme_without_state_and_weights(tmp_path: Path) -> None:
    # the reason for the refusal; runs where DeepSpeed's async_io can be built (libaio with its header)
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's async_io needs libaio")
    saved = run_on_ranks(1, train_on_nvme, str(tmp_path), False)[0]
    resumed = run_on_ranks(1, train_on_nvme, str(tmp_path), True)[0]
    assert torch.equal(saved["weights"]["0.weight"], resumed["weights"]["0.weight"]), "of the large sub-group"
    lost = not torch.equal(saved["weights"]["1.weight"], resumed["weights"]["1.weight"]), resumed["states"] == 0
    assert saved["states"] == 2
    assert lost == (True, True), (
        "DeepSpeed resumes from NVMe now: lift the refusal in ds_vrgd/engines/deepspeed/refusals.py"
    )
