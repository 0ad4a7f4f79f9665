"""torch's hooks around ``load_state_dict`` and ``step``: the user's run where torch runs them, and ours after them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_vrgd.optim import LAMB, OPTIMIZERS, VRAdamW, VRMomentum, VROptimizer

State = dict[str, Any]

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning")


def weights(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(index + 2)) for index in range(count)]


def trained(cls: type[Any], params: list[Any], **hyper: Any) -> Any:
    """After one window of two chunks."""
    optimizer = cls(params, lr=0.1, **hyper)
    tensors = [param[1] if isinstance(param, tuple) else param for param in params]
    for value in (1.0, 3.0):
        torch.stack([(value * tensor).sum() for tensor in tensors]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def named(params: list[nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    return [(f"layer{param.numel()}", param) for param in params]


def by_names(optimizer: torch.optim.Optimizer, state: State) -> State:
    """torch's recipe: match the checkpoint's parameters by name; a layer that it lacks begins anew."""
    groups = []
    for own, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        ids = dict(zip(saved["param_names"], saved["params"], strict=True))
        new = [ids.get(name, 1000 + index) for index, name in enumerate(own["param_names"])]
        groups.append({**saved, "params": new, "param_names": own["param_names"]})
    return {**state, "param_groups": groups}


@pytest.mark.parametrize("cls", [*OPTIMIZERS.values(), torch.optim.AdamW])
def test_a_pre_hook_may_add_a_layer_and_turn_the_order(cls: type[Any]) -> None:
    old, new = weights(3), weights(4)[::-1]
    saved = trained(cls, named(old)).state_dict()
    optimizer = cls(named(new), lr=0.5)
    optimizer.register_load_state_dict_pre_hook(by_names)
    optimizer.load_state_dict(saved)
    for index, param in enumerate(old):
        twin = next(other for other in new if other.shape == param.shape)
        for key, value in saved["state"].get(index, {}).items():
            assert torch.equal(optimizer.state[twin][key], value)
    assert not optimizer.state.get(new[0])
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("cls", [VRAdamW, LAMB, VRMomentum])
def test_a_pre_hook_may_unwrap_the_checkpoint(cls: type[VROptimizer]) -> None:
    # two hooks: the one that is registered later with prepend=True runs first, and ours after both
    order: list[str] = []

    def unwrap(optimizer: torch.optim.Optimizer, state: State) -> State:
        order.append("unwrap")
        return state["optimizer"]

    def rename(optimizer: torch.optim.Optimizer, state: State) -> None:
        order.append("rename")
        for own in state["state"].values():
            for key in list(own):
                own[key.removeprefix("old_")] = own.pop(key)

    saved = trained(cls, weights(2)).state_dict()
    file = {
        "optimizer": {
            "state": {key: {f"old_{n}": v for n, v in own.items()} for key, own in saved["state"].items()},
            "param_groups": saved["param_groups"],
        }
    }
    optimizer = cls(weights(2))
    optimizer.register_load_state_dict_pre_hook(rename)
    optimizer.register_load_state_dict_pre_hook(unwrap, prepend=True)
    before = len(optimizer._optimizer_load_state_dict_pre_hooks)
    for _ in range(2):
        optimizer.load_state_dict(file)
        file["optimizer"]["state"] = {
            key: {f"old_{n}": v for n, v in own.items()} for key, own in saved["state"].items()
        }
    assert order == ["unwrap", "rename"] * 2
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == before
    loaded = optimizer.state_dict()
    for key, own in saved["state"].items():
        assert own.keys() == loaded["state"][key].keys()
        assert all(torch.equal(own[n], loaded["state"][key][n]) for n in own)


def test_what_a_pre_hook_made_is_checked_and_nothing_stays_behind() -> None:
    optimizer = VRAdamW(weights(2))
    saved = trained(VRAdamW, weights(2)).state_dict()

    def spoil(optimizer: torch.optim.Optimizer, state: State) -> State:
        return {**state, "state": {0: {"other": torch.ones(2)}}}

    handle = optimizer.register_load_state_dict_pre_hook(spoil)
    with pytest.raises(ValueError, match="VRAdamW has no state other"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state
    handle.remove()
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    optimizer.load_state_dict(saved)
    assert optimizer.state


def test_a_post_hook_sees_what_was_loaded_in_its_own_dtype() -> None:
    params = weights(2)
    saved = trained(VRAdamW, weights(2), gsnr_dtype="bfloat16").state_dict()
    seen: list[Tensor] = []
    optimizer = VRAdamW(params, gsnr_dtype="bfloat16")

    def look(optimizer: torch.optim.Optimizer) -> None:
        seen.append(optimizer.state[params[0]]["exp_avg_gsnr"])
        optimizer.param_groups[0]["lr"] = 7.0

    optimizer.register_load_state_dict_post_hook(look)
    optimizer.load_state_dict(saved)
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[0], saved["state"][0]["exp_avg_gsnr"])
    assert optimizer.param_groups[0]["lr"] == 7.0


def test_hooks_around_step_run_once_and_see_the_closure() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    optimizer = VRMomentum([weight], lr=0.1)
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", args[-1], weight.detach().clone())))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", args[-1], weight.detach().clone())))

    def closure() -> None:
        for value in (1.0, 3.0):
            (value * weight).sum().backward()

    optimizer.step(closure)
    assert [(when, last) for when, last, _ in seen] == [("before", closure), ("after", closure)]
    assert torch.equal(seen[0][2], torch.ones(2))
    assert not torch.equal(seen[1][2], torch.ones(2))
