"""The units of a model, one for each ``fully_shard``, and the refusals: the only file with FSDP2's private parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from ds_vrgd.moments import local


@dataclass(eq=False)
class Unit:
    """The parameters of one ``fully_shard`` call, whose gradients FSDP2 reduces in one buffer.

    Attributes:
        name: of its module; empty for the root.
        module: the module that takes the communication.
        params: its sharded parameters, as they follow each other in the buffer; frozen ones are left out there.
        shard_group, replicate_group: process groups over which the parameters are cut, and over which there are copies
            of the shards (None without HSDP).
        ranks, replicas: the sizes of both, 1 without HSDP.
    """

    name: str
    module: FSDPModule
    params: list[Tensor]
    shard_group: Any
    replicate_group: Any | None
    ranks: int
    replicas: int
    _group: Any

    @property
    def divisor(self) -> float:
        """Return what the ranks' sum is divided by: ``set_gradient_divide_factor``, or the number of all ranks."""
        return float(self._group.gradient_divide_factor or self.ranks * self.replicas)

    @property
    def divided_before(self) -> float:
        """Return what FSDP2 divides the buffer by before it is sent: in float64 alone, about the divisor's root."""
        policy, before = self._group.mp_policy, 1.0
        if (policy.reduce_dtype or policy.param_dtype or self.params[0].dtype) == torch.float64:
            while self.divisor % before == 0 and self.divisor / before > before:  # as torch does, and in float16
                before *= 2
        return before

    @property
    def communication(self) -> Any:
        """Return what reduces the gradients now."""
        return self._group._reduce_scatter_comm

    @property
    def device(self) -> torch.device:
        """Return where the gradients are reduced; with CPU offload, the parameters are elsewhere."""
        return torch.device(self._group.device)

    @property
    def slots(self) -> list[tuple[Tensor, int, int]]:
        """Return (parameter, elements, elements with padding) of this rank's part of the buffer, in its order."""
        found = []
        for param in self.params:
            if param.requires_grad:
                rows = -(-len(param) // self.ranks)
                numel = local(param).numel()
                found.append((param, numel, rows * (param.numel() // max(len(param), 1))))
        return found

    def follow_freezing(self) -> None:
        """Have FSDP2 see which parameters are frozen now: it looks in a forward pass, where the unit takes part."""
        for of_param in self._group.fsdp_params:
            whole, is_trained = getattr(of_param, "_unsharded_param", None), of_param.sharded_param.requires_grad
            if whole is not None and whole.requires_grad != is_trained:
                whole.requires_grad_(is_trained)

    @property
    def has_unreduced(self) -> bool:
        """Return whether a gradient of the whole parameters waits to be reduced."""
        params = self._group.fsdp_params
        wholes = [getattr(of_param, "_unsharded_param", None) for of_param in params]
        return any(of_param.unsharded_accumulated_grad is not None for of_param in params) or any(
            whole is not None and whole.grad is not None for whole in wholes
        )

    @property
    def awaits_all_reduce(self) -> bool:
        """Return whether gradients are still to be summed over the copies of the shards, and are not in ``.grad``."""
        return self._group._partial_reduce_output is not None

    def complete_unreduced(self) -> None:
        """Let zeros wait with the gradients that wait: FSDP2 reduces one dtype, theirs and not the parameters'."""
        params = self._group.fsdp_params
        dtypes = {grad.dtype for of_param in params if (grad := of_param.unsharded_accumulated_grad) is not None}
        for of_param in params if dtypes else ():
            whole = getattr(of_param, "_unsharded_param", None)
            if of_param.unsharded_accumulated_grad is None and whole is not None and whole.requires_grad:
                of_param.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=next(iter(dtypes)))

    @property
    def awaits_end(self) -> bool:
        """Return whether FSDP2 waits for the end of a backward pass."""
        return bool(self._state._state_ctx.post_backward_final_callback_queued)

    @property
    def _state(self) -> Any:
        return self.module._get_fsdp_state()

    def forget_unreduced(self) -> None:
        """Throw away what was not reduced, as a pass without a sync or one that broke off: no ``zero_grad`` does."""
        self._group._partial_reduce_output = None  # of HSDP without an all-reduce
        for of_param in self._group.fsdp_params:
            of_param.unsharded_accumulated_grad = None
            if (whole := getattr(of_param, "_unsharded_param", None)) is not None:
                whole.grad = None

    def reduce_unused(self, value: bool) -> bool:
        """Set whether a parameter without a gradient counts as zeros in the buffer; return whether it did."""
        before = bool(getattr(self._group, "reduce_scatter_unused_params", False))
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # torch >= 2.13
            self.module.set_reduce_scatter_unused_params(value, recurse=False)
        return before


def units_of(model: nn.Module) -> list[Unit]:
    """Return what ``fully_shard`` has cut a model into.

    Raises:
        ValueError: the model is not sharded by FSDP2, or in a way in which its chunks cannot be seen exactly.
        RuntimeError: PyTorch is too old.
    """
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    if not modules:
        raise ValueError(_not_sharded(model))
    if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
        raise RuntimeError(
            f"ds_vrgd.attach needs FSDPModule.set_custom_reduce_scatter, which torch {torch.__version__} lacks. Use "
            "torch 2.9 or newer, or DeepSpeed ZeRO"
        )
    units, seen = [], set()
    for name, module in modules.items():
        groups = [group for group in _param_groups(module) if group not in seen]  # modules may share one
        seen.update(groups)
        if len(groups) > 1:
            raise ValueError(
                f"{_called(name)} has {len(groups)} groups of parameters with meshes of their own (shard_placement_fn),"
                " and FSDP2 gives one communication to all. Use one mesh for each fully_shard call"
            )
        units += [_unit(name, module, group) for group in groups]
    if len({(unit.shard_group, unit.replicate_group) for unit in units}) > 1:
        raise ValueError(
            "the FSDP modules are sharded over different meshes, so that a chunk of one layer is not a chunk of "
            "another. Give every fully_shard call the same mesh"
        )
    return units


def end_broken_pass(units: Sequence[Unit]) -> bool:
    """Have FSDP2 forget a backward pass that broke off: it waits for the end of that one, and would see no other.

    What waited to be reduced is lost with it. Returns whether there was such a pass.

    Raises:
        RuntimeError: PyTorch is too old to forget it.
    """
    broken = [unit for unit in units if unit.awaits_end]
    for unit in broken:
        if unit.awaits_end:  # a root forgets it for all its units
            root = next(state for state in unit._state._state_ctx.all_states if state._is_root)
            if not hasattr(root, "_reset_iter_state"):
                raise RuntimeError(
                    "a backward pass broke off (an exception, such as running out of memory), or compiled autograd ran "
                    f"it, and FSDP2 of torch {torch.__version__} waits for its end for ever. Build the model anew, or "
                    "use torch 2.13 or newer"
                )
            root._reset_iter_state()
        unit.forget_unreduced()
    return bool(broken)


def _not_sharded(model: nn.Module) -> str:
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return (
            "the model is wrapped in FullyShardedDataParallel (FSDP1), which joins layers in one flat parameter. Use "
            "FSDP2: torch.distributed.fsdp.fully_shard on each block and on the model"
        )
    return (
        f"no module of this {type(model).__name__} is sharded by FSDP2. Call fully_shard on it before ds_vrgd.attach; "
        "a model in one process or in DistributedDataParallel needs no attach"
    )


def _param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # torch >= 2.12; before, there was one
    return [group for group in (several if several is not None else [state._fsdp_param_group]) if group is not None]


def _unit(name: str, module: FSDPModule, group: Any) -> Unit:
    mesh_info, params = group.mesh_info, [of_param.sharded_param for of_param in group.fsdp_params]
    shard_group = getattr(mesh_info, "shard_process_group", None)
    replicate_group = getattr(mesh_info, "replicate_process_group", None)
    where = _called(name)
    groups = (shard_group, replicate_group)
    ranks, replicas = (1 if of is None else torch.distributed.get_world_size(of) for of in groups)
    if shard_group is None or (replicate_group is not None and ranks == 1):
        raise ValueError(
            f"{where} is replicated and not sharded, and FSDP2 reduces its gradients where nobody can see them before. "
            "Use DistributedDataParallel, which needs no attach"
        )
    for param in params:
        dims, placements = 1 if replicate_group is None else 2, param.placements
        if len(placements) > dims:
            raise ValueError(
                f"a parameter of {where} is a DTensor over {len(placements)} mesh dimensions {tuple(placements)}: "
                "FSDP2 with tensor or expert parallelism is not supported. Use FSDP2 alone, or tensor parallelism "
                "under DeepSpeed ZeRO"
            )
        if not placements[-1].is_shard(0):
            raise ValueError(
                f"a parameter of {where} is cut along dimension {placements[-1].dim}. Let shard_placement_fn return "
                "Shard(0), or leave it out"
            )
    policy = group.mp_policy
    for dtype in {policy.reduce_dtype or policy.param_dtype or param.dtype for param in params}:
        if dtype == torch.float16:
            raise ValueError(
                f"{where} reduces its gradients in float16, which FSDP2 rescales on the way. Set "
                "MixedPrecisionPolicy(reduce_dtype=torch.float32), or use bfloat16"
            )
    return Unit(name, module, params, shard_group, replicate_group, ranks, replicas, group)


def _called(name: str) -> str:
    return f"'{name}'" if name else "the model itself"
