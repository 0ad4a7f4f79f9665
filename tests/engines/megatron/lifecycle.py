"""The programs of the ranks, for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from torch import Tensor

import ds_vrgd.megatron
from ds_vrgd.engines.megatron.exchange import BucketExchange
from tests.engines.megatron.cases import Case
from tests.engines.megatron.training import Run, build, initialize, standard_overrides, states, weights
from tests.support.ranks import DEVICE


def train(run: Run, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        run.window(step)
        assert run.step()


def state_of(run: Run) -> dict[str, list[Tensor]]:
    """Return copies of all state tensors of this rank, in the order of the param groups."""
    inner = run.optimizer.optimizer
    found: dict[str, list[Tensor]] = {}
    for group in inner.param_groups:
        for tensor in group["params"]:
            for key, value in inner.state[tensor].items():
                found.setdefault(key, []).append(torch.as_tensor(value).clone())
    return found


def sharded(run: Run, way: str, loading: bool) -> dict[str, Any]:
    """Return what ``dist_checkpointing`` takes of model and optimizer."""
    model = unwrap_model(run.model).sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": way}
    return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model, loading, metadata=metadata)}


def save(run: Run, way: str, folder: str) -> None:
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(run, way, False), folder)


def end_writer() -> None:
    """End the writer's process: it would outlive the rank, which does not clean up, and keep its output open."""
    filesystem_async._results_queue = None


def load(run: Run, way: str, folder: str) -> None:
    found = dist_checkpointing.load(sharded(run, way, True), folder)
    unwrap_model(run.model).load_state_dict(found["model"])
    run.optimizer.load_state_dict(found["optimizer"])


def same(ours: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    if ours.keys() != others.keys():
        return False
    flat = [(a, b) for key in ours for a, b in zip(_list(ours[key]), _list(others[key]), strict=True)]
    return all(torch.equal(a, b) for a, b in flat)


def _list(value: Any) -> list[Tensor]:
    return value if isinstance(value, list) else [value]


def resume(rank: int, cases: Mapping[str, tuple[Case, str]], folder: str) -> dict[str, tuple[bool, bool, bool] | str]:
    """Save after three steps, take two more; load into a new model and optimizer, and take the same two.

    Returns:
        By case, whether the weights and the state are the same bits, and whether the weights had moved; or the error.
    """
    found: dict[str, Any] = {}
    for number, (name, (case, way)) in enumerate(cases.items()):
        initialize(case.tensor, case.pipeline)
        try:
            found[name] = _resume(case, way, f"{folder}/{number}")
        except ValueError as error:
            found[name] = str(error)
    end_writer()
    return found


def _resume(case: Case, way: str, folder: str) -> tuple[bool, bool, bool]:
    run, file = build(case), f"{folder}-{dist.get_rank()}.pt"
    train(run, 0, 3)
    if way == "state_dict":
        torch.save({"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
    else:
        save(run, way, folder)
    train(run, 3, 2)
    expected, state = weights(run), state_of(run)
    again = build(case)
    fresh = weights(again)
    if way == "state_dict":
        found = torch.load(file, weights_only=False)
        again.model.load_state_dict(found["model"])
        again.optimizer.load_state_dict(found["optimizer"])
    else:
        load(again, way, folder)
    again.schedule.step(3)
    train(again, 3, 2)
    end = weights(again)
    moved = any(not torch.equal(end[key], fresh[key]) for key in end)
    return same(end, expected), same(state_of(again), state), moved


def save_and_show(rank: int, cases: Sequence[tuple[Case, str]], folder: str) -> list[dict[str, dict[str, Tensor]]]:
    """Train every case for three steps, save it, and return the whole weights and states."""
    found = []
    for number, (case, way) in enumerate(cases):
        initialize(case.tensor, case.pipeline)
        run = build(case)
        train(run, 0, 3)
        save(run, way, f"{folder}/{number}")
        found.append(states(run))
    end_writer()
    return found


def load_and_show(
    rank: int, cases: Sequence[tuple[Case, str]], folders: Sequence[str]
) -> list[dict[str, dict[str, Tensor]]]:
    """Load every case, return the whole weights and states, and take a step with them."""
    found = []
    for (case, way), folder in zip(cases, folders, strict=True):
        initialize(case.tensor, case.pipeline)
        run = build(case)
        load(run, way, folder)
        found.append(states(run))
        train(run, 3, 1)
    return found


def nonfinite(rank: int, dtype: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Take a step, one with a NaN in a chunk of the last rank, and one more."""
    initialize(1, 1)
    run = build(Case(dtype=dtype, config=config))
    train(run, 0, 1)
    before = weights(run)
    run.model.zero_grad_buffer()
    for param in run.names:
        param.main_grad.normal_()  # type: ignore[attr-defined]
    if rank == 1:
        next(iter(run.names)).main_grad.view(-1)[0] = float("nan")  # type: ignore[attr-defined]
    run.model.finish_grad_sync()
    success = run.step()
    skipped = same(weights(run), before)
    train(run, 2, 1)
    return {"success": success, "skipped": skipped, "moved": not same(weights(run), before),
            "steps": float(state_of(run)["step"][0])}  # fmt: skip


def errors(rank: int) -> dict[str, str]:
    """Do what is an error, and return the messages."""
    initialize(1, 1)
    found: dict[str, str] = {}

    def note(name: str, run: Run) -> None:
        try:
            run.step()
            found[name] = "none"
        except RuntimeError as error:
            found[name] = str(error)

    run = build(Case(ddp={"overlap_grad_reduce": True, "check_for_nan_in_grad": False}))
    run.model.zero_grad_buffer()
    for param in run.names:
        param.main_grad.normal_()  # type: ignore[attr-defined]
    note("nothing reduced", run)
    run.model.bucket_groups[0].finish_grad_sync()
    note("a part reduced", run)
    run.window(0)
    run.model.zero_grad_buffer()
    note("thrown away", run)
    second = ds_vrgd.megatron.get_optimizer(run.wrapper.config, [run.model], optimizer="VRLAMB")
    run.window(1)
    note("another optimizer", run)
    found["detached"] = str([BucketExchange.of(group) is None for group in run.model.bucket_groups])
    second.optimizer.observer.detach()
    found["detached"] += str([BucketExchange.of(group) is None for group in run.model.bucket_groups])
    try:
        ds_vrgd.megatron.get_optimizer(run.wrapper.config, [run.model.module])
    except ValueError as error:
        found["not wrapped"] = str(error)
    try:
        ds_vrgd.megatron.get_optimizer(run.wrapper.config, [run.model], betas3=0.9)
    except TypeError as error:
        found["an argument"] = str(error)
    try:
        ds_vrgd.megatron.get_optimizer(run.wrapper.config, [run.model], optimizer="Adam")
    except ValueError as error:
        found["a name"] = str(error)
    overrides = {key: {**value, "gamma": 1.0} for key, value in standard_overrides(run.wrapper.config).items()}
    try:
        ds_vrgd.megatron.get_optimizer(run.wrapper.config, [run.model], overrides, optimizer="VRLAMB")
    except ValueError as error:
        found["two gammas"] = str(error)
    try:
        ds_vrgd.megatron.get_optimizer(run.wrapper.config, [_tiny(run)], optimizer="VRLAMB")
    except ValueError as error:
        found["no element"] = str(error)
    return found


def _tiny(run: Run) -> Any:
    """Return a model whose one weight is in the first rank's part of the padded buffer."""
    module = MegatronModule(run.model.config)
    module.weight = torch.nn.Parameter(torch.ones(10, device=DEVICE))
    return type(run.model)(run.model.config, run.model.ddp_config, module)


def copies(rank: int) -> dict[str, bool]:
    """Train in bf16 with sequence parallelism, and compare the tensor-parallel ranks' copies of master weights."""
    initialize(2, 1)
    run = build(Case("LAMB", "bf16", tensor=2, model={"sequence_parallel": True}))
    train(run, 0, 3)
    found = {}
    for param, name in run.names.items():
        main = param.main_param  # type: ignore[attr-defined]  # this rank's shard, in fp32
        if main is None:
            continue
        flat = main.detach().flatten()
        everyone = [torch.empty_like(flat) for _ in range(2)]
        dist.all_gather(everyone, flat, group=parallel_state.get_tensor_model_parallel_group())
        if not getattr(param, "tensor_model_parallel", False):
            found[name] = torch.equal(*everyone)
    return found


def edited(rank: int) -> dict[str, bool]:
    """Edit a parameter's gradient in a buffer in half precision between the reduction and the step."""
    initialize(1, 1)
    run = build(Case(dtype="bf16", ddp={"use_distributed_optimizer": False}))
    run.window(0)
    first, second = [param for param in run.names if param.dim() > 1][:2]
    first.main_grad.mul_(2.0)  # type: ignore[attr-defined]
    run.wrapper.prepare_grads()
    observer = run.wrapper.observer
    mean = {param: observer.moments(param.main_param).mean for param in (first, second)}  # type: ignore[attr-defined]
    held = {param: param.main_param.grad.view(-1) for param in (first, second)}  # type: ignore[attr-defined]
    return {
        "the edited value": torch.equal(held[first], first.main_grad.float().view(-1)),  # type: ignore[attr-defined]
        "the mean in fp32": torch.equal(held[second], mean[second]),
        "which bf16 rounds": not torch.equal(mean[second], mean[second].bfloat16().float()),
    }


def changed(rank: int, folder: str) -> dict[str, Any]:
    """Do what random programs found (``test_random.py``), each as short as it can be."""
    initialize(1, 1)
    found: dict[str, Any] = {}
    of_layers = {"*word_embeddings.weight": {"eps": 1e-8, "betas": (0.9, 0.999)}}
    run = build(Case(arguments={"betas": (0.8, 0.99)}, overrides=of_layers))
    found["options"] = {(group["eps"], group["betas"]) for group in run.optimizer.param_groups}

    run = build(Case(overrides={"*word_embeddings.weight": {"gamma": 0.3}}))
    train(run, 0, 1)
    (part,) = run.optimizer.optimizer.layer_statistics
    found["gammas"] = {name: gamma for name, gamma in zip(part.table.names, part.gamma.tolist(), strict=True)
                       if gamma != 0.1}  # fmt: skip

    for way in ("dp_reshardable", "unsharded"):
        run = build(Case(ddp={"use_distributed_optimizer": way != "unsharded"}))
        train(run, 0, 1)
        save(run, way, f"{folder}-{way}-1")
        for group in run.optimizer.param_groups:
            group["gamma"] = 1.0
        train(run, 1, 1)
        save(run, way, f"{folder}-{way}-2")
        for group in run.optimizer.param_groups:
            group["gamma"] = 0.1
        for step in (1, 2):
            load(run, way, f"{folder}-{way}-{step}")
            found[f"ratios of {step} steps, {way}"] = {int(count) for count in state_of(run).get("gsnr_step", [-1])}
    run.window(2)
    run.optimizer.param_groups[0]["gamma"] = 1.0
    found["a second gamma"] = message_of(run.step)
    found["reduced twice"] = message_of(run.model.finish_grad_sync)

    def backward() -> None:
        torch.stack([param.sum() for param in run.names]).sum().backward()

    run = build(Case(dtype="bf16", ddp={"overlap_grad_reduce": True}))
    train(run, 0, 1)
    run.model.zero_grad_buffer()
    backward()
    found["reductions"] = {group.grad_reduce_handle is None for group in run.model.bucket_groups}
    run.model.zero_grad_buffer()
    found["reductions thrown away"] = {group.grad_reduce_handle is None for group in run.model.bucket_groups}
    backward()
    backward()
    run.model.finish_grad_sync()
    found["without no_sync"] = message_of(run.step)
    end_writer()
    return found


def message_of(call: Callable[[], Any]) -> str:
    """Return the message of the error that a call raises, or "none"."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "none"
