"""The undocumented names of FSDP2 that ``ds_vrgd/engines/fsdp/units.py`` reads, and what is relied on besides.

When one of these fails, FSDP2 has changed: read its new code, and mend ``units.py`` (``exchange.py`` for the calls).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ds_vrgd.moments import local
from tests.support.ranks import DEVICE, run_on_ranks

PUBLIC = {
    "set_custom_reduce_scatter": ["self", "comm"],
    "set_reduce_scatter_unused_params": ["self", "reduce_scatter_unused_params", "recurse"],
}


class Recorder:
    """A communication that notes how FSDP2 calls it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        self.calls.append(("allocate", numel, dtype, device.type))
        return torch.empty(numel, dtype=torch.float32 if len(self.calls) % 3 == 2 else dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        self.calls.append(("reduce", output_tensor.numel(), input_tensor.numel(), op == dist.ReduceOp.AVG))
        output_tensor.fill_(1.0 + 2.0**-20)


def seen(rank: int) -> dict[str, Any]:
    layer = nn.Linear(3, 5).to(DEVICE)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(layer, mesh=init_device_mesh(DEVICE, (2,)), mp_policy=policy)
    state: Any = layer._get_fsdp_state()  # type: ignore[operator]
    (group,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    found = {
        "communication": type(group._reduce_scatter_comm).__name__,
        "params": [of_param.sharded_param is param
                   for of_param, param in zip(group.fsdp_params, layer.parameters(), strict=True)],
        "mesh": (dist.get_world_size(group.mesh_info.shard_process_group),
                 getattr(group.mesh_info, "replicate_process_group", None)),
        "divisor": group.gradient_divide_factor,
        "policy": group.mp_policy == policy,
        "device": torch.device(group.device).type,
    }  # fmt: skip
    found["whole"] = [hasattr(of_param, "unsharded_accumulated_grad") for of_param in group.fsdp_params]
    found["partial"] = group._partial_reduce_output
    recorder = Recorder()
    layer.set_custom_reduce_scatter(recorder)  # type: ignore[operator]
    layer(torch.ones(2, 3, device=DEVICE)).sum().backward()
    found["calls"] = recorder.calls
    found["waits"] = (state._state_ctx.post_backward_final_callback_queued, state._state_ctx.all_states == [state])
    found["root"] = (state._is_root, hasattr(state, "_reset_iter_state"))
    found["kept in fp32"] = bool((layer.weight.grad.to_local() == 1.0 + 2.0**-20).all())  # type: ignore[union-attr, operator]
    parts = [(local(weight), weight.to_local()) for weight in (layer.weight, layer.weight.grad)]  # type: ignore[operator, union-attr]
    found["parts"] = [
        (part.data_ptr() == theirs.data_ptr(), part.shape == theirs.shape, part.requires_grad) for part, theirs in parts
    ]
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(2, seen)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_methods(name: str) -> None:
    if name == "set_reduce_scatter_unused_params" and torch.__version__ < "2.13":
        pytest.skip("new in torch 2.13; without it a parameter without a gradient is an error")
    method = getattr(FSDPModule, name, None)
    assert method is not None, f"FSDPModule.{name} is gone: ds_vrgd/engines/fsdp/units.py"
    assert list(inspect.signature(method).parameters) == PUBLIC[name], f"FSDPModule.{name} has other parameters"


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("communication", "DefaultReduceScatter"),
        ("params", [True, True]),
        ("mesh", (2, None)),
        ("divisor", None),
        ("policy", True),
        ("device", DEVICE),
        ("whole", [True, True]),
        ("partial", None),
        ("waits", (False, True)),
        ("root", (True, hasattr(FSDPModule, "reset_iter_state"))),
    ],
)
def test_what_a_unit_is_read_from(found: list[dict[str, Any]], name: str, right: Any) -> None:
    for of_rank in found:
        assert of_rank[name] == right, f"FSDPParamGroup has changed ({name}): ds_vrgd/engines/fsdp/units.py"


def test_a_part_of_a_dtensor_is_what_to_local_returns(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert of_rank["parts"] == [(True, True, False)] * 2, (
            "DTensor._local_tensor is another: moments/layout.py, local"
        )


def test_how_the_communication_is_called(found: list[dict[str, Any]]) -> None:
    """Memory for the padded buffer, memory for the shard, then the reduction; and the shard keeps its dtype."""
    width = 3 * 3 + 3  # of 5 rows, ceil(5 / 2) of the weight and of the bias
    for of_rank in found:
        assert of_rank["calls"] == [
            ("allocate", 2 * width, torch.bfloat16, DEVICE),
            ("allocate", width, torch.bfloat16, DEVICE),
            ("reduce", width, 2 * width, True),
        ], "FSDP2 calls its reduce-scatter in another way: ds_vrgd/engines/fsdp/exchange.py"
        assert of_rank["kept in fp32"], "FSDP2 rounds the result: ds_vrgd/engines/fsdp/exchange.py, allocate"
