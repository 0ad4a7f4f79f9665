"""What is sharded is not taken for whole: FSDP, tensor parallelism and sharded optimizers, with GSNR and without."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ds_vrgd.optim import LAMB, LARS, OPTIMIZERS, VRLAMB, VRLARS, VRSGD, VRAdam, VRAdamW, VRMomentum
from tests.support.ranks import run_on_ranks

WORLD, STEPS = 2, 3

#: Update rules that sum over layers, each of them.
SUMMING: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "LAMB": LAMB,
    "LARS": LARS,
    "prenormalized LAMB": functools.partial(LAMB, prenormalize=True),
    "VRLAMB, gamma=1": functools.partial(VRLAMB, gamma=1.0),
    "VRLARS, gamma=1": functools.partial(VRLARS, gamma=1.0),
    "VRLAMB, one group at 1": lambda params: VRLAMB([{"params": list(params), "gamma": 1.0}]),
    **{name: OPTIMIZERS[name] for name in ("VRSGD", "VRMomentum", "VRAdam", "VRAdamW", "VRLARS", "VRLAMB")},
}
#: Update rules that do not, with torch's optimizer that they must equal.
ELEMENTWISE: dict[str, tuple[Callable[[Iterable[Any]], Any], Callable[[Iterable[Any]], Any]]] = {
    "VRSGD": (
        functools.partial(VRSGD, lr=0.1, momentum=0.9, gamma=1.0),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "VRMomentum": (
        functools.partial(VRMomentum, lr=0.1, gamma=1.0),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "VRAdam": (functools.partial(VRAdam, lr=0.01, gamma=1.0), functools.partial(torch.optim.Adam, lr=0.01)),
    "VRAdamW": (functools.partial(VRAdamW, lr=0.01, gamma=1.0), functools.partial(torch.optim.AdamW, lr=0.01)),
}


def needs_chunks(rule: str) -> bool:
    """Return whether a rule of :data:`SUMMING` has GSNR."""
    return rule.startswith("VR") and "1" not in rule


def net() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def fsdp(model: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)


def per_layer(model: nn.Module, **options: Any) -> nn.Module:
    for index in (0, 2):
        model[index] = fsdp(model[index], **options)  # type: ignore[index, operator]
    return fsdp(model, **options)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


#: Ways to shard a model, and what the refusal calls them.
SHARDED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "FSDP1": (fsdp, "FullyShardedDataParallel"),
    "FSDP1 with original parameters": (functools.partial(fsdp, use_orig_params=True), "FullyShardedDataParallel"),
    "FSDP1, each layer": (functools.partial(per_layer, use_orig_params=True), "FullyShardedDataParallel"),
    "FSDP1, gradients only": (
        functools.partial(fsdp, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "FullyShardedDataParallel",
    ),
    "FSDP1, nothing sharded, layers joined": (
        functools.partial(fsdp, sharding_strategy=ShardingStrategy.NO_SHARD),
        "FullyShardedDataParallel",
    ),
}


def refusal(step: Callable[[], Any]) -> str:
    try:
        step()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "no error"


def made_after(shard: Callable[[nn.Module], Any], make: Callable[[Iterable[Any]], Any]) -> str:
    model = net()
    sharded = shard(model) or model
    return refusal(lambda: make(sharded.parameters()))


def made_before(make: Callable[[Iterable[Any]], Any], **options: Any) -> str:
    """The optimizer keeps the model's parameters, which FSDP then cuts where they are."""
    model = net()
    optimizer = make(model.parameters())
    sharded = fsdp(model, **options)
    for _ in range(2):
        sharded(torch.ones(3, 6)).square().sum().backward()
    return refusal(optimizer.step)


def added_later() -> tuple[str, int]:
    whole = nn.Parameter(torch.ones(3))
    optimizer = LAMB([whole])
    sharded = fsdp(net())
    return refusal(lambda: optimizer.add_param_group({"params": sharded.parameters()})), len(optimizer.param_groups)


def trained(rank: int, shard: Callable[[nn.Module], Any] | None, make: Callable[[Iterable[Any]], Any]) -> list[Tensor]:
    """The weights after some steps, those of this rank alone where they are sharded."""
    model = net()
    wrapped = DistributedDataParallel(model) if shard is None else (shard(model) or model)
    optimizer = make(wrapped.parameters())
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(WORLD * step + rank)
        wrapped(torch.randn(5, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [getattr(weight, "_local_tensor", weight).detach().clone() for weight in wrapped.parameters()]


def over_dtensors(make: Callable[[Iterable[Any]], Any]) -> tuple[str, float]:
    """Train a whole model and a tensor-parallel one on the same data; return the latter's error, and the difference."""
    trained = []
    for model in (net(), tensor_parallel(net())):
        optimizer = make(model.parameters())
        for step in range(STEPS):
            model(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            error = refusal(optimizer.step)
            optimizer.zero_grad()
        weights: list[Any] = [weight.detach() for weight in model.parameters()]
        trained.append([weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights])
    return error, max(float((one - other).abs().max()) for one, other in zip(*trained, strict=True))


def over_sequences(rank: int, make: Callable[[Iterable[Any]], Any]) -> float:
    """Train a whole model and one with sequence parallelism; return the difference. One layer's gradient is a sum."""
    plan = {"0": SequenceParallel(), "1": ColwiseParallel(input_layouts=Shard(1)), "3": RowwiseParallel()}
    trained = []
    for is_cut in (False, True):
        model: nn.Module = nn.Sequential(nn.LayerNorm(6), *net())
        if is_cut:
            parallelize_module(model, init_device_mesh("cpu", (WORLD,)), plan)
        optimizer = make(model.parameters())
        for step in range(STEPS):
            x = torch.randn(5, 2 * WORLD, 6, generator=torch.Generator().manual_seed(step))
            model(x.chunk(WORLD, 1)[rank] if is_cut else x).square().mean().backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        weights: list[Any] = [weight.detach() for weight in model.parameters()]
        trained.append([weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights])
    return max(float((one - other).abs().max()) for one, other in zip(*trained, strict=True))


def sharded_optimizer(rank: int, make: Callable[[Iterable[Any]], Any], **options: Any) -> Any:
    """Under ZeroRedundancyOptimizer each rank steps whole layers, but not all of them."""
    try:
        return trained(rank, None, lambda params: ZeroRedundancyOptimizer(params, make, **options))
    except RuntimeError as error:
        return str(error)


def everything(rank: int) -> dict[Any, Any]:
    warnings.simplefilter("ignore")
    found: dict[Any, Any] = {}
    for way, (shard, _) in SHARDED.items():
        for rule, make in SUMMING.items():
            found[way, rule] = made_after(shard, make)
    for rule, make in SUMMING.items():
        found["before", rule] = made_before(make, use_orig_params=True)
    found["added"] = added_later()
    for rule, (ours, torchs) in ELEMENTWISE.items():
        for way in ("FSDP1", "FSDP1 with original parameters", "FSDP2"):
            shard = fully_shard if way == "FSDP2" else SHARDED[way][0]
            found["same", way, rule] = [trained(rank, shard, make) for make in (ours, torchs)]
    for rule, make in SUMMING.items():
        found["DTensors", rule] = over_dtensors(make)
    without_chunks = {rule: make for rule, make in SUMMING.items() if not needs_chunks(rule)}
    for rule, make in {**without_chunks, **{rule: ours for rule, (ours, _) in ELEMENTWISE.items()}}.items():
        found["sequences", rule] = over_sequences(rank, make)
    found["whole"] = [
        trained(rank, None, LAMB_AT_A_TENTH),
        sharded_optimizer(rank, LAMB_AT_A_TENTH),
        sharded_optimizer(rank, LAMB_AT_A_TENTH, parameters_as_bucket_view=True),
    ]
    found["norm"] = sharded_optimizer(rank, functools.partial(LAMB, lr=0.1, prenormalize=True))
    found["norm, whole"] = trained(rank, None, functools.partial(LAMB, lr=0.1, prenormalize=True))
    return found


LAMB_AT_A_TENTH = functools.partial(LAMB, lr=0.1)


@pytest.fixture(scope="module")
def found() -> list[dict[Any, Any]]:
    return run_on_ranks(WORLD, everything)


@pytest.mark.parametrize("way", SHARDED)
def test_sharded_parameters_are_refused_when_the_optimizer_is_made(found: list[dict[Any, Any]], way: str) -> None:
    for rule in SUMMING:
        name = rule.replace("prenormalized ", "").split(",")[0]
        for of_rank in found:
            assert of_rank[way, rule].startswith(f"{name}: 'parameter 0' is "), of_rank[way, rule]
            assert SHARDED[way][1] in of_rank[way, rule]
            assert "DeepSpeed ZeRO stage 0 to 3" in of_rank[way, rule]


def test_parameters_that_fsdp_takes_over_later_are_refused_at_the_first_step(found: list[dict[Any, Any]]) -> None:
    # with use_orig_params; without it FSDP trains other parameters, and no optimizer that has the old ones does
    for rule in SUMMING:
        for of_rank in found:
            assert "is in the flat parameter of FullyShardedDataParallel" in of_rank["before", rule], rule


def test_a_sharded_group_that_is_added_later_is_refused_and_not_kept(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        message, groups = of_rank["added"]
        assert "FullyShardedDataParallel" in message
        assert groups == 1


@pytest.mark.parametrize("rule", SUMMING)
def test_sums_over_dtensors_are_whole_layers(found: list[dict[Any, Any]], rule: str) -> None:
    for of_rank in found:
        error, difference = of_rank["DTensors", rule]
        if needs_chunks(rule):
            assert "is a DTensor, and nobody has seen the ranks' gradients of it" in error
        else:
            assert error == "no error"
            assert difference <= 1e-6


@pytest.mark.parametrize("rule", [*(rule for rule in SUMMING if not needs_chunks(rule)), *ELEMENTWISE])
def test_a_gradient_of_which_each_rank_has_a_summand_is_summed(found: list[dict[Any, Any]], rule: str) -> None:
    assert all(of_rank["sequences", rule] <= 1e-6 for of_rank in found)


@pytest.mark.parametrize("way", ["FSDP1", "FSDP1 with original parameters", "FSDP2"])
@pytest.mark.parametrize("rule", ELEMENTWISE)
def test_rules_without_sums_are_torchs_bit_for_bit(found: list[dict[Any, Any]], way: str, rule: str) -> None:
    for of_rank in found:
        ours, torchs = of_rank["same", way, rule]
        assert ours
        assert all(torch.equal(*pair) for pair in zip(ours, torchs, strict=True))
    moved = torch.cat([w.flatten() for of_rank in found for w in of_rank["same", way, rule][0]])
    start = torch.cat([w.flatten() for w in net().parameters()])
    assert not torch.isin(moved, start).all()


def test_whole_layers_on_some_ranks_are_no_shards(found: list[dict[Any, Any]]) -> None:
    # ZeroRedundancyOptimizer gives each rank whole layers, also as views into one buffer: LAMB is exact there
    for of_rank in found:
        whole, *parted = of_rank["whole"]
        for weights in parted:
            assert all(torch.equal(*pair) for pair in zip(whole, weights, strict=True))


def test_the_norm_of_a_model_that_no_rank_has_whole_is_refused(found: list[dict[Any, Any]]) -> None:
    for of_rank in found:
        assert "the ranks differ in what they train" in of_rank["norm"]
        assert "ZeroRedundancyOptimizer" in of_rank["norm"]
    assert all(torch.equal(*pair) for pair in zip(*(of_rank["norm, whole"] for of_rank in found), strict=True))


def test_megatrons_mark_is_read_where_no_engine_has_taken_the_weights_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class State:
        ranks = 2

        @classmethod
        def get_tensor_model_parallel_world_size(cls) -> int:
            assert cls.ranks, "tensor model parallel group is not initialized"
            return cls.ranks

    weight = nn.Parameter(torch.ones(4))
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight.grad = torch.ones(4)
    with pytest.raises(ValueError, match="'parameter 0' is cut over Megatron's tensor-parallel ranks"):
        LAMB([weight]).step()
    monkeypatch.setitem(__import__("sys").modules, "megatron.core.parallel_state", State)
    with pytest.raises(ValueError, match="cut over Megatron's"):
        LARS([weight]).step()
    State.ranks = 0
    with pytest.raises(ValueError, match="cut over Megatron's"):
        LARS([weight]).step()
    State.ranks = 1
    LAMB([weight]).step()  # Megatron marks such weights, too, where one rank has all of them
    VRAdam([weight], gamma=1.0).step()
