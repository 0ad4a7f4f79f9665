"""FSDP2 checkpoints through ``torch.distributed.checkpoint``: bitwise resume, other numbers of ranks, AdamW's."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.moments import local
from tests.engines.fsdp.training import Case, build, full, sharded, window
from tests.support.model import param_groups
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow

#: The same for every number of ranks: six micro-batches on two, and so on.
CHUNKS = 12
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "VRLAMB": {},
    "VRAdamW": {},
    "VRMomentum": {},
    "VRLARS": {},
    "LAMB": {},
    "VRLAMB, bf16 average": {"gsnr_dtype": "bfloat16"},
}


def case_of(name: str, ranks: int) -> Case:
    return Case(name.split(",")[0], "fp32", ranks, CHUNKS // ranks, arguments=OPTIMIZERS[name])


def train(case: Case, model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        window(case, model, step)
        optimizer.step()
        optimizer.zero_grad()


def save(folder: Path, model: nn.Module, optimizer: Any) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def load(folder: Path, model: nn.Module, optimizer: Any, *, partial: bool = False) -> None:
    weights, states = get_state_dict(model, optimizer)
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder, planner=planner)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def everything(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """Return whole weights and whole state, by name; a collective."""
    found = full(model)
    for name, param in model.named_parameters():
        for key, value in optimizer.state.get(param, {}).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            found[f"{name} {key}"] = whole.cpu().clone()
    return found


def saved(rank: int, folder: Path, ranks: int) -> dict[str, dict[str, Tensor]]:
    """Train two steps, save, and train two more."""
    found = {}
    for name in OPTIMIZERS:
        case = case_of(name, ranks)
        model, optimizer = build(case)
        train(case, model, optimizer, range(2))
        save(folder / name, model, optimizer)
        found[f"{name} saved"] = everything(model, optimizer)
        train(case, model, optimizer, range(2, 4))
        found[name] = everything(model, optimizer)
    return found


def resumed(rank: int, folder: Path, ranks: int) -> dict[str, dict[str, Tensor]]:
    """Load what was saved, perhaps by another number of ranks, and train two steps."""
    found = {}
    for name in OPTIMIZERS:
        case = case_of(name, ranks)
        model, optimizer = build(case)
        train(case, model, optimizer, range(7, 8))  # something else, to be overwritten
        load(folder / name, model, optimizer)
        found[f"{name} saved"] = everything(model, optimizer)
        train(case, model, optimizer, range(2, 4))
        found[name] = everything(model, optimizer)
    return found


def from_base(rank: int, folder: Path) -> dict[str, Any]:
    """Continue torch's AdamW with VRAdamW, and VRAdamW with AdamW's twin of ours, gamma 1."""
    case = Case("VRAdamW", "fp32", 2, 2)
    model = sharded(case)
    base = torch.optim.AdamW(param_groups(model), lr=5e-3)
    train(case, model, base, range(2))
    save(folder / "adamw", model, base)
    right = {name: local(base.state[param]["exp_avg"]).clone() for name, param in model.named_parameters()
             if param in base.state}  # fmt: skip
    model, optimizer = build(case)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder / "adamw", model, optimizer, partial=True)
    told = [str(warning.message) for warning in caught if "begins anew" in str(warning.message)]
    states = {name: optimizer.state[param] for name, param in model.named_parameters() if param in optimizer.state}
    same = all(torch.equal(local(states[name]["exp_avg"]), moment) for name, moment in right.items())
    counted = {float(state["step"]) for state in states.values()}
    train(case, model, optimizer, range(2, 4))
    # As the reference begins a mean late: debiased by the steps that it has seen.
    least = min(
        float(local(state["exp_avg_gsnr"]).min()) for state in states.values() if local(state["exp_avg"]).numel()
    )
    return {"same": same, "counted": counted, "told": len(told), "layers": len(states), "least": least >= 0.03,
            "k": optimizer.layer_statistics[0].k}  # fmt: skip


def with_a_short_window(rank: int, folder: Path, before: int) -> list[str]:
    """Save after a window of one chunk; return what differs between the run that went on and the loaded one."""
    case = Case("VRLAMB", "fp32", 1, 4)
    model, optimizer = build(case)
    train(case, model, optimizer, range(before))
    train(replace(case, accumulation=1), model, optimizer, range(2, 3))
    save(folder, model, optimizer)
    train(case, model, optimizer, range(3, 5))
    right = everything(model, optimizer)
    model, optimizer = build(case)
    load(folder, model, optimizer)
    train(case, model, optimizer, range(3, 5))
    found = everything(model, optimizer)
    return [name for name, value in right.items() if not torch.equal(found[name], value)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def went_on(folder: Path) -> dict[str, dict[str, Tensor]]:
    return run_on_ranks(2, saved, folder, 2)[0]  # type: ignore[no-any-return]


def test_a_loaded_run_is_the_run_that_went_on(went_on: dict[str, dict[str, Tensor]], folder: Path) -> None:
    for of_rank in run_on_ranks(2, resumed, folder, 2):
        for name, right in went_on.items():
            assert set(of_rank[name]) == set(right)
            differ = [key for key, value in right.items() if not torch.equal(of_rank[name][key], value)]
            assert not differ, (name, differ)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_another_number_of_ranks_continues(went_on: dict[str, dict[str, Tensor]], folder: Path, ranks: int) -> None:
    found = run_on_ranks(ranks, resumed, folder, ranks)[0]
    for name in OPTIMIZERS:
        for key, value in went_on[f"{name} saved"].items():
            assert torch.equal(found[f"{name} saved"][key], value), (name, key)
        # The same chunks on other ranks: only the order of sums differs.
        bound = 1e-3 if "bf16" in name else 1e-6
        for key, value in went_on[name].items():
            difference = norm_of([found[name][key].double() - value.double()])
            assert difference <= bound * norm_of([value.double()]), (name, key)


def test_a_run_that_four_ranks_saved_continues_on_two(tmp_path: Path) -> None:
    went_on = run_on_ranks(4, saved, tmp_path, 4)[0]
    found = run_on_ranks(2, resumed, tmp_path, 2)[0]
    for name in OPTIMIZERS:
        for key, value in went_on[f"{name} saved"].items():
            assert torch.equal(found[f"{name} saved"][key], value), (name, key)


def test_adamw_is_continued(tmp_path: Path) -> None:
    for rank, of_rank in enumerate(run_on_ranks(2, from_base, tmp_path)):
        assert of_rank == {"same": True, "counted": {2.0}, "told": int(rank == 0), "layers": 9, "least": True, "k": 4}


@pytest.mark.parametrize("before", [0, 2])
def test_the_number_of_ratios_is_saved(tmp_path: Path, before: int) -> None:
    assert run_on_ranks(1, with_a_short_window, tmp_path, before) == [[]]
