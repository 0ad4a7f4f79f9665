"""One of our optimizers inside Megatron-Core's own: its param groups, clipping, loss scaling, and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from torch import Tensor

from ds_vrgd.engines.megatron.observer import MegatronObserver, Part
from ds_vrgd.engines.megatron.refusals import Setup, require_one_gamma, require_supported
from ds_vrgd.moments import gathered
from ds_vrgd.optim import OPTIMIZERS, VROptimizer
from ds_vrgd.optim.observer import RATIOS, Shard

#: The numbers of a tensor's state, alike for all of them, which are saved once.
COUNTS = ("step", RATIOS)
#: What Adam's arguments are in a group that does not override them: no value that anybody gives.
NOT_GIVEN = 2.0**-1000
#: The layouts of the distributed optimizer's checkpoints with a place for every state, and what loads them.
WAYS = {
    "dp_reshardable": "load_parameter_state_from_dp_reshardable",
    "fully_reshardable": "load_parameter_state_from_fully_reshardable",
}


def get_optimizer(
    config: Any,
    model_chunks: Sequence[Any],
    config_overrides: Mapping[Any, Any] | None = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    optimizer: str | type[VROptimizer] = "VRLAMB",
    **arguments: Any,
) -> Any:
    """Return Megatron-Core's optimizer with one of ours inside, in the place of ``get_megatron_optimizer``.

    A collective of all ranks. A chunk is what one data-parallel rank accumulates over its micro-batches, and k is the
    number of these ranks. With GSNR the exchange takes the place of Megatron-Core's reduction of every bucket.

    Args:
        config: Megatron-Core's OptimizerConfig. Its ``lr`` and ``weight_decay`` are the defaults of ours; Adam's
            arguments and ``optimizer`` are ignored.
        model_chunks: the model, in Megatron-Core's DistributedDataParallel.
        config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map: as there. An override
            may hold arguments of ours, such as ``adapt``.
        optimizer: the class, or its name.
        arguments: of the class, such as ``betas`` and ``gamma``.

    Raises:
        UnsupportedRelease: Megatron-Core is of a release that was not measured.
        ValueError: the optimizer is unknown, or a setting is not exact or was not tried.
        TypeError: an argument that the optimizer does not have.
    """
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer={optimizer!r} is unknown. Use one of {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    arguments = {"lr": config.lr, "weight_decay": config.weight_decay} | arguments
    checked = kind([torch.zeros(())], **arguments)  # before any collective
    gsnr, watch = checked.param_groups[0]["gamma"] < 1.0, checked.watch is not None
    require_supported(kind.__name__, Setup(config, model_chunks, gsnr, watch))
    base = copy.copy(config)
    base.optimizer = "adam"  # what DistributedOptimizer is built around; it takes no step
    base.adam_beta1 = base.adam_beta2 = base.adam_eps = NOT_GIVEN
    chained = get_megatron_optimizer(
        base, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map
    )
    (wrapper,) = chained.chained_optimizers
    _put_inside(wrapper, kind, arguments, model_chunks)
    chained.config = wrapper.config = config
    return chained


def _names(chunks: Iterable[Any]) -> dict[Tensor, str]:
    """Return the trained parameters in the order of their buffers, with names that no other pipeline stage has."""
    found: dict[Tensor, str] = {}
    for chunk in chunks:
        stage = f"stage{chunk.pp_group.rank()}." if chunk.pp_group.size() > 1 else ""
        names = {param: stage + name.removeprefix("module.") for name, param in chunk.named_parameters()}
        found |= {param: names[param] for buffer in chunk.buffers for param in buffer.param_index_map}
    return found


def _put_inside(wrapper: Any, kind: type[VROptimizer], arguments: dict[str, Any], chunks: Sequence[Any]) -> None:
    """Put an optimizer of ours in the place of the Adam inside a wrapper, over the same tensors."""
    parts = _parts(wrapper, chunks)
    if 0 in gathered(len(parts), chunks[0].dp_cp_group):
        raise ValueError(
            f"{kind.__name__}: a data-parallel rank owns no element of the model, which is too small for "
            f"{chunks[0].dp_cp_group.size()} ranks. Use fewer of them"
        )
    adam = wrapper.optimizer
    groups = [
        {key: value for key, value in group.items() if key not in adam.defaults or value != adam.defaults[key]}
        for group in adam.param_groups
    ]
    # Views of the model's weights are no leaves, and torch refuses them; so they get into the groups later.
    inner = kind([group | {"params": [t.detach() for t in group["params"]]} for group in groups], **arguments)
    require_one_gamma(kind.__name__, inner.param_groups)
    for group, given in zip(inner.param_groups, groups, strict=True):
        group["params"] = given["params"]
    wrapper.optimizer, wrapper.init_state_fn = inner, _allocate
    wrapper.__class__ = _CLASSES[type(wrapper)]
    wrapper.observer = MegatronObserver(wrapper, chunks, _names(chunks), parts)
    inner.observe(wrapper.observer)


def _parts(wrapper: Any, chunks: Sequence[Any]) -> dict[Tensor, Part]:
    """Return what every tensor of a wrapper's param groups is a part of, in their order."""
    where = {}
    for chunk in chunks:
        for buffer in chunk.buffers:
            for param, (start, end, bucket) in buffer.param_index_map.items():
                offset = buffer.buckets[bucket].offset
                where[param] = buffer.buckets[bucket], slice(start - offset, end - offset)
    if isinstance(wrapper, DistributedOptimizer):
        models = [*wrapper.model_fp32_groups, *wrapper.model_float16_groups]
        mains = [*wrapper.shard_fp32_groups, *wrapper.shard_fp32_from_float16_groups]
    elif isinstance(wrapper, Float16OptimizerWithFloat16Params):
        models = [*wrapper.fp32_from_fp32_groups, *wrapper.float16_groups]
        mains = [*wrapper.fp32_from_fp32_groups, *wrapper.fp32_from_float16_groups]
    else:
        models = mains = [group["params"] for group in wrapper.param_groups]
    pairs = [pair for model, main in zip(models, mains, strict=True) for pair in zip(model, main, strict=True)]
    found = {}
    for param, main in pairs:
        bucket, run = where[param]
        if isinstance(wrapper, DistributedOptimizer):
            ranges = wrapper._get_model_param_range_map(param)
            own = ranges["gbuf_local"]
            found[main] = Part(param, ranges["param"].start, bucket, slice(own.start, own.end))
        else:
            found[main] = Part(param, 0, bucket, run)
    return {tensor: found[tensor] for group in wrapper.param_groups for tensor in group["params"]}


def _allocate(inner: VROptimizer, config: Any = None) -> None:
    """Create what state is missing, as before a checkpoint is saved or loaded."""
    with torch.no_grad():
        for group in inner.param_groups:
            for tensor in group["params"]:
                inner._ensure_state(Shard(group, tensor, tensor, inner.state[tensor]))


def _with_ours(base: Any) -> Any:
    """Return a subclass of one of Megatron-Core's optimizers for instances that have one of ours inside.

    An optimizer that Megatron-Core has built becomes one of these, which only single inheritance allows.
    """

    class WithOurs(base):  # type: ignore[misc]
        optimizer: VROptimizer
        observer: MegatronObserver

        @staticmethod
        def _filter_and_reorder_param_groups(current: list[Any], saved: list[Any]) -> list[Any]:
            """Match saved groups, by their order where Megatron-Core does not tell them apart: it compares few keys."""
            found: list[Any] = base._filter_and_reorder_param_groups(current, [dict(group) for group in saved])
            return found if len({id(group) for group in found}) == len(found) else saved

        @staticmethod
        def _extract_common_per_param_step(state_dict: dict[str, Any]) -> Any:
            """Return the steps; move the number of ratios, which is no tensor either, to the param groups."""
            states = state_dict["state"]
            if ratios := {state[RATIOS] for state in states.values() if RATIOS in state}:
                (state_dict["param_groups"][0][RATIOS],) = ratios
            state_dict["state"] = {
                index: {key: value for key, value in state.items() if key != RATIOS} for index, state in states.items()
            }
            return base._extract_common_per_param_step(state_dict)

        @staticmethod
        def _restore_common_per_param_step(state_dict: dict[str, Any], step: Any) -> None:
            base._restore_common_per_param_step(state_dict, step)
            ratios = state_dict["param_groups"][0].pop(RATIOS, None)
            for state in state_dict["state"].values() if ratios is not None else ():
                state[RATIOS] = ratios

        def prepare_grads(self) -> bool:
            """Prepare the gradients, and end the window where one is not finite, which Megatron-Core leaves out."""
            self.observer.note_loss_scale()
            found: bool = super().prepare_grads()
            if found:
                self.observer.drop()
            return found

        def _copy_model_grads_to_main_grads(self) -> None:
            super()._copy_model_grads_to_main_grads()
            self.observer.restore_means()

        def step_with_ready_grads(self) -> bool:
            """Step; return False, so that the schedule waits, where ours has left the step out."""
            success: bool = super().step_with_ready_grads()
            self.observer.complete_statistics()
            return success and not self.optimizer.overflow

    return WithOurs


class _Distributed(_with_ours(DistributedOptimizer)):  # type: ignore[misc]
    """The distributed optimizer, whose checkpoints know Adam's state alone."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is alike on all data-parallel ranks: options, counts and the loss scale."""
        _allocate(self.optimizer)
        state: dict[str, Any] = next(iter(self.optimizer.state.values()), {})
        counts = {key: float(state[key]) for key in COUNTS if key in state}
        groups = [
            {key: value for key, value in group.items() if key != "params"} | counts
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        scaler = {"grad_scaler": self.grad_scaler.state_dict()} if self.grad_scaler else {}
        return {"optimizer": {"param_groups": groups}} | scaler

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load that, and the state of the parameters where it is there.

        Raises:
            ValueError: it was laid out in a way that has no place for our state.
        """
        _allocate(self.optimizer)
        own = self.optimizer.state_dict()
        saved = copy.deepcopy(state_dict["optimizer"]["param_groups"])
        counts = [{key: group.pop(key) for key in COUNTS if key in group} for group in saved]
        groups = [group | {"params": mine["params"]} for group, mine in zip(saved, own["param_groups"], strict=True)]
        self.optimizer.load_state_dict({"state": own["state"], "param_groups": groups})
        for state in self.optimizer.state.values():
            state.pop(RATIOS, None)  # of a run that is rolled back
            state |= {key: torch.tensor(n) if key == "step" else int(n) for key, n in counts[0].items()}
        if self.grad_scaler and "grad_scaler" in state_dict:
            self.grad_scaler.load_state_dict(state_dict["grad_scaler"])
        if "param_state" in state_dict:
            load = _require_way(state_dict["param_state_sharding_type"])
            getattr(self, load)(state_dict["param_state"])

    def sharded_state_dict(
        self,
        model_sharded_state_dict: Any = {},  # noqa: B006 (the signature is Megatron-Core's)
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        """Return the state for a distributed checkpoint, as Megatron-Core does.

        Raises:
            ValueError: it would be laid out in a way that has no place for our state.
        """
        _require_way(sharding_type or (metadata or {}).get("distrib_optim_sharding_type", "fully_sharded_model_space"))
        return super().sharded_state_dict(model_sharded_state_dict, is_loading, sharding_type, metadata)

    def save_parameter_state(self, filename: str) -> None:
        """Refuse a file that :meth:`load_parameter_state` could not read."""
        _require_way("dp_zero_gather_scatter")

    @torch.no_grad()
    def get_parameter_state_dp_zero(
        self, use_gloo_comm: bool = True, empty_data: bool = False, return_on_all_ranks: bool = False
    ) -> Any:
        """Return every state in whole buffers, for ``fully_reshardable``; a collective of the data-parallel ranks.

        Megatron-Core's own has Adam's two states alone, and not the padding between buckets, which the ranges that it
        is read by count.
        """
        group, keeps = self.data_parallel_group, return_on_all_ranks or self.data_parallel_group.rank() == 0
        states = {param: self._get_main_param_and_optimizer_states(param) for param in self.model_param_group_index_map}
        mine = {key: value.dtype for state in states.values() for key, value in state.items()}
        dtypes = {key: dtype for of_rank in gathered(mine, group) for key, dtype in of_rank.items()}
        found: dict[int, Any] = {}
        for index, (buffer, ranges) in enumerate(zip(self.buffers, self.gbuf_ranges, strict=True)):
            ((kind, of_buckets),) = ranges.items()
            found[index] = {kind: {key: torch.zeros(buffer.numel * keeps, dtype=dtypes[key]) for key in sorted(dtypes)}}
            for key, whole in found[index][kind].items() if not empty_data else ():
                for bucket, of_bucket in zip(buffer.buckets, of_buckets, strict=True):
                    joined = torch.empty_like(bucket.grad_data, dtype=whole.dtype)
                    part = torch.zeros_like(joined[: joined.numel() // group.size()])
                    for param, run in of_bucket["param_map"].items():
                        if key in states[param]:
                            part[run["gbuf_local"].start : run["gbuf_local"].end] = states[param][key]
                    dist.all_gather_into_tensor(joined, part, group=group)
                    if keeps:
                        whole[bucket.offset : bucket.offset + joined.numel()] = joined
        return found if keeps else None

    def _get_main_param_and_optimizer_states(self, model_param: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = super()._get_main_param_and_optimizer_states(model_param)
        return {key: value for key, value in found.items() if key not in COUNTS}

    @torch.no_grad()
    def _set_main_param_and_optimizer_states(self, model_param: Tensor, tensors: Mapping[str, Tensor]) -> None:
        for key, own in self._get_main_param_and_optimizer_states(model_param).items():
            own.copy_(tensors[key])


def _require_way(way: str) -> str:
    """Return what loads a layout of checkpoints."""
    if way not in WAYS:
        raise ValueError(
            f"distrib_optim_sharding_type={way!r} has no place for every state of ds_vrgd's optimizers. Use "
            f"{' or '.join(map(repr, WAYS))} (--ckpt-format torch_dist, --dist-ckpt-optim-fully-reshardable)"
        )
    return WAYS[way]


_CLASSES = {
    DistributedOptimizer: _Distributed,
    Float16OptimizerWithFloat16Params: _with_ours(Float16OptimizerWithFloat16Params),
    FP32Optimizer: _with_ours(FP32Optimizer),
}
