"""Fused mode: our exchange replaces DeepSpeed's reduction of the gradients, and hands it the mean.

The engine's ZeRO wrapper is re-classed. Where DeepSpeed's hook would copy a gradient into its bucket, the gradient goes
to the exchange; where DeepSpeed would collect the reduced pieces, it finds the flat shard that the exchange has summed
in fp32, one tensor a param group. So nothing is reduced twice, DeepSpeed's buckets are never allocated, and norm,
clipping and update see a few flat tensors instead of hundreds of pieces.

Only what lies between the hook and ``step()`` is replaced. Loss scale, overflow, schedule, parameter gathering and
checkpoints stay DeepSpeed's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_vrgd.moments import ShardedMoments, ShardLayout
from ds_vrgd.zero.compat import GradPartitionBufferGroup, too_old_to_fuse

Engine = Any

# DeepSpeed's mark of a norm that is infinite or no number.
INVALID_NORM = -1.0

# Stage 3 keeps its gradient partitions under this name.
PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"


def replaces(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that stands in for DeepSpeed's of the same name, which must take the same parameters."""
    method.replaces_deepspeed = True  # type: ignore[attr-defined]
    return method


class _Fused:
    """What the wrappers of all stages share. A mixin: set up by :func:`fuse`, never constructed.

    Attributes:
        exchange: takes the gradients, and holds their sum over the window's micro-batches on this rank's shards.
    """

    exchange: ShardedMoments
    _published: bool
    _counted: list[tuple[Tensor, int, int]] | None

    def _set_up(self, exchange: ShardedMoments, layouts: Mapping[Tensor, ShardLayout]) -> None:
        self.exchange = exchange
        self._published = False
        all_count = all(layer.counted for layout in layouts.values() for layer in layout.layers)
        self._counted = None if all_count else list(_counted_runs(layouts))

    def _take(self, param: Tensor) -> None:
        """Move a finished gradient from the parameter to the exchange."""
        # A module that computes in tiles accumulates in .grad, and says when it is done.
        if param.grad is not None and getattr(param, "ds_grad_is_ready", True):
            grad, param.grad = param.grad, None
            self._published = False
            self.exchange.take(param, grad)

    def end_micro_batch(self) -> None:
        """A backward pass is over, and what it left behind has been taken."""
        self.exchange.end_micro_batch()
        if self.is_gradient_accumulation_boundary():  # type: ignore[attr-defined]
            self.publish()

    def publish(self) -> None:
        """Show DeepSpeed the gradient of the window, before ``step()`` or a reader of gradients asks for it."""
        if not self._published:
            self.exchange.finish()
            self._show(self._totals())
            self._published = True

    @replaces
    def finalize_gradient_accumulation_boundary(self) -> None:
        """The program steps now, whatever DeepSpeed has counted."""
        self.set_gradient_accumulation_boundary(True)  # type: ignore[attr-defined]
        self.publish()

    @replaces
    def step(self, closure: None = None) -> None:
        """As DeepSpeed's."""
        self.publish()
        super().step(closure)  # type: ignore[misc]
        self._published = False

    def _shards(self) -> Sequence[Tensor]:
        raise NotImplementedError

    def _show(self, totals: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def _totals(self) -> list[Tensor]:
        return [self.exchange.moments(shard).total for shard in self._shards()]

    def _norm(self) -> Tensor:
        """2-norm of the gradient over the whole model, still with the loss scale; an all-reduce, or two."""
        square = torch.stack(torch._foreach_norm(self._parts())).square().sum()
        torch.distributed.all_reduce(square, group=self.dp_process_group)  # type: ignore[attr-defined]
        self._model_parallel_all_reduce(square, torch.distributed.ReduceOp.SUM)  # type: ignore[attr-defined]
        norm = square.sqrt()
        return torch.where(torch.isfinite(norm), norm, INVALID_NORM)

    def _parts(self) -> list[Tensor]:
        """What this rank counts of the gradient: all, or no copy that another model-parallel rank counts."""
        if self._counted is None:
            return self._totals()
        totals = {shard: self.exchange.moments(shard).total for shard in self._shards()}
        none = [total[:0] for total in totals.values()]
        return none[:1] + [totals[shard].narrow(0, start, numel) for shard, start, numel in self._counted]

    def _is_finite(self) -> Tensor:
        """Whether every element of this rank's gradient is: a scalar."""
        largest = torch.stack(torch._foreach_norm(self._totals(), math.inf))
        return torch.isfinite(largest).all()


class FusedZeroOptimizer(_Fused, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """Stages 1 and 2. Stage 1 exchanges in every micro-batch, too: otherwise the chunks could not be told apart."""

    def _set_up(self, exchange: ShardedMoments, layouts: Mapping[Tensor, ShardLayout]) -> None:
        super()._set_up(exchange, layouts)
        self._pieces = [self._build_compact_grad_partition_buffer(i)._view_specs for i in range(len(self.bit16_groups))]

    def _shards(self) -> Sequence[Tensor]:
        shards: Sequence[Tensor] = self.single_partition_of_fp32_groups
        return shards

    def _show(self, totals: Sequence[Tensor]) -> None:
        for index, (total, pieces) in enumerate(zip(totals, self._pieces, strict=True)):
            views = [total.narrow(0, start, math.prod(shape)).view(shape) for start, shape, _ in pieces]
            self.averaged_gradients[index] = GradPartitionBufferGroup(views, total)

    @replaces
    def process_gradients(self, param: Tensor, i: int) -> None:
        """A parameter's gradient of this micro-batch is in ``.grad``."""
        self._take(param)

    @replaces
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Stage 1 at the boundary: everything has been exchanged."""

    @replaces
    def independent_gradient_partition_epilogue(self) -> None:
        """The backward pass is over; :meth:`end_micro_batch` follows."""
        self._epilogue_ran_this_backward = True
        if self.ready_for_gradients:
            self._release_ipg_buffers()

    @replaces
    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Over all param groups at once."""
        return self._norm()

    @replaces
    def has_overflow_partitioned_grads_serial(self) -> Tensor:
        """Of this rank: ``(1,)``."""
        return self._is_finite().logical_not().view(1)

    @replaces
    def unscale_and_clip_grads(self, grad_groups_flat: Sequence[Tensor], total_norm: Any) -> None:
        """Left to the update, which multiplies in what :class:`GradientScale` finds: no pass over the shard."""

    @replaces
    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Point the parameters into the flat buffer, unless they do already, as they do after every step."""
        flat = self.bit16_groups_flat[group_index]
        first, size = flat.data_ptr(), flat.element_size()
        places = zip(
            self.round_robin_bit16_groups[group_index], self.round_robin_bit16_offsets[group_index], strict=True
        )
        if not all(param.data_ptr() == first + size * offset for param, offset in places):
            super()._update_model_bit16_weights(group_index)


class FusedZeroOptimizerStage3(_Fused, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """Stage 3."""

    def _shards(self) -> Sequence[Tensor]:
        shards: Sequence[Tensor] = self.fp32_partitioned_groups_flat
        return shards

    def _show(self, totals: Sequence[Tensor]) -> None:
        for index, (total, params) in enumerate(zip(totals, self.fp16_groups, strict=True)):
            places = [self.grad_position[self.get_param_id(param)] for param in params]
            self.averaged_gradients[index] = [total.narrow(0, start, numel) for _, start, numel in places]

    @replaces
    def reduce_ready_partitions_and_remove_grads(self, param: Tensor) -> None:
        """A parameter's gradient of this micro-batch is in ``.grad``."""
        self._take(param)

    @replaces
    def independent_gradient_partition_epilogue(self) -> None:
        """The backward pass is over; :meth:`end_micro_batch` follows."""
        self._epilogue_ran_this_backward = True

    @replaces
    def _get_norm_groups(self) -> list[Tensor]:
        """One norm, over all sub-groups at once."""
        return [self._norm()]

    @replaces
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """On any rank."""
        overflow = self._is_finite().logical_not().to(torch.uint8)
        torch.distributed.all_reduce(overflow, op=torch.distributed.ReduceOp.MAX, group=self.dp_process_group)
        self._model_parallel_all_reduce(overflow, torch.distributed.ReduceOp.MAX)
        return bool(overflow.item())

    @replaces
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        shard = self._shards()[sub_group_id]
        shard.grad = self.exchange.moments(shard).total
        self.averaged_gradients[sub_group_id] = None

    @replaces
    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Left to the update, which multiplies in what :class:`GradientScale` finds: no pass over the shard."""

    @replaces
    def _get_fp32_grad_state_partition(self, param: Tensor, release_swap_buffers: bool) -> tuple[Tensor, int]:
        """For DeepSpeed's readers and writers of single gradients."""
        index, start, numel = self.grad_position[self.get_param_id(param)]
        total = self.exchange.moments(self._shards()[index]).total
        return total.narrow(0, start, numel), index

    @replaces
    def update_fp32_grad_for_param_vectorized(self, update_func: Callable[..., Tensor], param_list: Any) -> None:
        """As DeepSpeed's, on the partitions of the exchange."""
        partitions = getattr(self, PARTITIONS)
        kept = dict(partitions)
        for param in param_list:
            if param.requires_grad:
                partitions[param.ds_id] = self._get_fp32_grad_state_partition(param, release_swap_buffers=True)[0]
        try:
            super().update_fp32_grad_for_param_vectorized(update_func, param_list)
        finally:
            partitions.update(kept)


FUSED: dict[type, type[_Fused]] = {
    DeepSpeedZeroOptimizer: FusedZeroOptimizer,
    DeepSpeedZeroOptimizer_Stage3: FusedZeroOptimizerStage3,
}


def _counted_runs(layouts: Mapping[Tensor, ShardLayout]) -> Iterator[tuple[Tensor, int, int]]:
    """(shard, start, elements) of this rank's runs of the layers that it counts."""
    for shard, layout in layouts.items():
        for segment in layout.segments:
            if layout.layers[segment.layer].counted:
                yield shard, segment.start, segment.numel


def fuse(wrapper: Any, exchange: ShardedMoments, layouts: Mapping[Tensor, ShardLayout]) -> None:
    """Let ``exchange`` take the place of the reduction in an engine's ZeRO wrapper that :func:`unfit` has passed.

    Args:
        wrapper: the engine's.
        exchange: takes its gradients.
        layouts: of the wrapper's shards.
    """
    wrapper.__class__ = FUSED[type(wrapper)]
    wrapper._set_up(exchange, layouts)


def unfit(engine: Engine) -> str | None:
    """Why this engine's reduction cannot be replaced exactly; None where it can.

    Each reason names the setting, its value and the way out, for ``reduction="fused"`` makes an error of it.
    """
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return "zero_optimization.stage=0 keeps whole gradients on every rank. Use stage 1, 2 or 3"
    if isinstance(engine, PipelineEngine):
        return "PipelineModule: its engine reduces when the last micro-batch is through. Use ZeRO without a pipeline"
    old = too_old_to_fuse()
    if old:
        return old
    if type(wrapper) not in FUSED:
        return (
            f"DeepSpeed built a {type(wrapper).__name__}, which reduces in a way of its own. At stage 1 in bf16, leave "
            "out data_types.grad_accum_dtype: fused mode accumulates in fp32 anyway"
        )
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        return "zero_optimization.offload_optimizer: gradients go to the CPU one by one. Remove that section"
    if engine.zero_quantized_gradients():
        return "zero_optimization.zero_quantized_gradients=true: DeepSpeed sends integers. Set it to false"
    if engine.has_moe_layers:
        return "MoE layers: experts are reduced over groups of their own"
    if not wrapper._grad_acc_hooks:
        return (
            "zero_optimization.contiguous_gradients=false and overlap_comm=false at stage 1: DeepSpeed sets no hook "
            "then. Set either to true"
        )
    changed = changed_methods(type(wrapper))
    if changed:
        return f"this DeepSpeed's {', '.join(changed)} takes other arguments than those ds_vrgd replaces"
    return None


def changed_methods(wrapper: type) -> list[str]:
    """Methods that fused mode replaces and that DeepSpeed lacks, or declares with other parameters."""
    changed = []
    for name, ours in inspect.getmembers(FUSED[wrapper], lambda member: hasattr(member, "replaces_deepspeed")):
        theirs = getattr(wrapper, name, None)
        if theirs is None or _parameters(theirs) != _parameters(ours):
            changed.append(f"{wrapper.__name__}.{name}")
    return changed


def _parameters(method: Callable[..., Any]) -> list[str]:
    """Names of a method's parameters, also behind DeepSpeed's profiling decorator, which hides them."""
    inner = inspect.getclosurevars(method).nonlocals.get("func")
    return list(inspect.signature(method if inner is None else inner).parameters)
