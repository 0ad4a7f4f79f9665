"""Fused mode: our exchange replaces DeepSpeed's reduction of the gradients, and hands it the mean.

The engine's ZeRO wrapper is re-classed. Where DeepSpeed's hook would copy a gradient into its bucket, the gradient goes
to the exchange; where DeepSpeed would collect the reduced pieces, it finds the flat shard that the exchange has summed
in fp32, one tensor per param group. Only what lies between the hook and ``step()`` is replaced: loss scale, overflow,
schedule, parameter gathering and checkpoints stay DeepSpeed's.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from ds_vrgd.engines.deepspeed.edited import FusedEdits, Shown
from ds_vrgd.engines.deepspeed.held import PARTITIONS, offloads
from ds_vrgd.engines.deepspeed.versions import FUSED as NEEDED
from ds_vrgd.engines.deepspeed.versions import absent, parameters_of
from ds_vrgd.moments import ShardedMoments, ShardLayout

Engine = Any

# DeepSpeed's mark of a norm that is infinite or no number.
INVALID_NORM = -1.0


def replaces(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method that replaces DeepSpeed's of the same name, which must take the same parameters."""
    method.replaces_deepspeed = True  # type: ignore[attr-defined]
    return method


class _Fused:
    """The methods that the wrappers of all stages share. A mixin: set up by :func:`fuse`, never constructed."""

    shards: ClassVar[str]  # the wrapper's name for the flat shards that its client optimizer updates
    exchange: ShardedMoments  # takes the gradients, and holds their sum over the window's micro-batches
    came: Callable[[Tensor], bool]  # returns whether a gradient that arrives is this engine's
    edits: FusedEdits  # keeps what was measured apart from what others write
    _published: bool
    _formed: Tensor | None  # the norm, from the check for an overflow until DeepSpeed asks for it
    _runs: dict[bool, list[tuple[Tensor, int, int]]]  # by whether this rank counts them: shard, start, elements

    def _set_up(self, exchange: ShardedMoments, layouts: Mapping[Tensor, ShardLayout], measures: bool) -> None:
        self.exchange = exchange
        own_hooks = {hook.id for hook in self._grad_acc_hooks}  # type: ignore[attr-defined]
        self.edits = FusedEdits(exchange, own_hooks, measures=measures)
        self._published, self._formed = False, None
        self._runs = {True: [], False: []}
        for shard, layout in layouts.items():
            runs = [(layout.layers[s.layer].counted, s.start, s.numel) for s in layout.segments]
            for counted, start, numel in [(True, 0, shard.numel())] if all(run[0] for run in runs) else runs:
                self._runs[counted].append((shard, start, numel))

    def _take(self, param: Tensor) -> None:
        """Move a finished gradient from the parameter to the exchange."""
        # A module that computes in tiles accumulates in .grad, and marks when it is done.
        if param.grad is not None and getattr(param, "ds_grad_is_ready", True) and self.came(param):
            grad, param.grad = param.grad, None
            self._reopen()
            self.exchange.add(param, self.edits.chunk(param, grad), keep=True)

    def _reopen(self) -> None:
        """Take the window back, to whose sums something is about to be added."""
        self.edits.undo(published=self._published)
        self._published = False

    def end_micro_batch(self) -> None:
        """Exchange what the chunk has left; publish the window at the accumulation boundary."""
        self._reopen()
        self.exchange.end_micro_batch()
        if self.is_gradient_accumulation_boundary():  # type: ignore[attr-defined]
            self.publish()

    def publish(self) -> None:
        """Show DeepSpeed the gradient of the window, before ``step()`` or a reader of gradients asks for it."""
        if not self._published:
            self.exchange.finish()
            self.edits.add_to_sums()
            self._show(self._totals())
            self._published = True

    def forget(self) -> None:
        """Begin the next window."""
        self._published, self._formed = False, None
        self.edits.clear()

    def unfuse(self) -> None:
        """Give DeepSpeed its own reduction back."""
        self.edits.detach()
        self.__class__ = next(theirs for theirs, ours in FUSED.items() if ours is type(self))

    def _shards(self) -> Sequence[Tensor]:
        return getattr(self, self.shards)  # type: ignore[no-any-return]

    def _show(self, totals: Sequence[Tensor]) -> None:
        raise NotImplementedError

    def _totals(self) -> list[Tensor]:
        return [self.exchange.moments(shard).total for shard in self._shards()]

    @replaces
    def finalize_gradient_accumulation_boundary(self) -> None:
        """Publish: the program steps now, whatever DeepSpeed has counted."""
        self.set_gradient_accumulation_boundary(True)  # type: ignore[attr-defined]
        self.publish()

    @replaces
    def step(self, closure: None = None) -> None:
        """Step; the program may have set the boundary after the last backward pass."""
        self.publish()
        super().step(closure)  # type: ignore[misc]
        self._published = False

    @replaces
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Form the norm of the sums of the exchange, which tells, and which DeepSpeed asks for next."""
        self._formed = self._form_norm()
        return bool(self._formed < 0)

    def _norm(self) -> Tensor:
        """Return the norm that :meth:`has_overflow` has formed in this step, if it was asked; else form it."""
        formed, self._formed = self._formed, None
        return self._form_norm() if formed is None else formed

    def _form_norm(self) -> Tensor:
        """Return the 2-norm of the gradient over the whole model, still with the loss scale; an all-reduce, or two.

        Invalid where any rank's gradient is not finite, also in what this rank leaves to another one to count.
        """
        totals = dict(zip(self._shards(), self._totals(), strict=True))
        counted, left_out = (
            [totals[shard].narrow(0, start, numel) for shard, start, numel in self._runs[which]]
            for which in (True, False)
        )
        square = torch.stack(torch._foreach_norm(counted or [self._totals()[0][:0]])).square().sum()
        left_out += self.edits.measured  # an edit may have hidden what is not finite
        if left_out:
            square += 0.0 * torch.stack(torch._foreach_norm(left_out, math.inf)).sum()  # 0, or NaN
        torch.distributed.all_reduce(square, group=self.dp_process_group)  # type: ignore[attr-defined]
        self._model_parallel_all_reduce(square, torch.distributed.ReduceOp.SUM)  # type: ignore[attr-defined]
        norm = square.sqrt()
        return torch.where(torch.isfinite(norm), norm, INVALID_NORM)


class FusedZeroOptimizer(_Fused, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """The wrapper of stages 1 and 2. Stage 1 exchanges every micro-batch, too, to tell the chunks apart."""

    shards = "single_partition_of_fp32_groups"

    def _set_up(self, exchange: ShardedMoments, layouts: Mapping[Tensor, ShardLayout], measures: bool) -> None:
        super()._set_up(exchange, layouts, measures)
        self._pieces = [self._build_compact_grad_partition_buffer(i)._view_specs for i in range(len(self.bit16_groups))]

    def _show(self, totals: Sequence[Tensor]) -> None:
        for index, (total, pieces) in enumerate(zip(totals, self._pieces, strict=True)):
            views = [total.narrow(0, start, math.prod(shape)).view(shape) for start, shape, _ in pieces]
            self.averaged_gradients[index] = Shown(views, total, self.edits, self._shards()[index])

    @replaces
    def process_gradients(self, param: Tensor, i: int) -> None:
        """Take what DeepSpeed's hook finds in ``.grad``: a parameter's gradient of this micro-batch."""
        self._take(param)

    @replaces
    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Do nothing: stage 1 reduces at the boundary, where everything has been exchanged."""

    @replaces
    def independent_gradient_partition_epilogue(self) -> None:
        """Release the buckets that ``engine.coalesce_grad_reduction()`` allocates; :meth:`end_micro_batch` follows."""
        self._epilogue_ran_this_backward = True
        if self.ready_for_gradients:
            self._release_ipg_buffers()

    @replaces
    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return the norm over all param groups at once."""
        return self._norm()

    @replaces
    def unscale_and_clip_grads(self, grad_groups_flat: Sequence[Tensor], total_norm: Any) -> None:
        """Leave this to the update, which multiplies by what :class:`GradientScale` finds: no pass over the shard."""

    @replaces
    def _update_model_bit16_weights(self, group_index: int) -> None:
        """Point the parameters into the flat buffer, unless they are there already, as in most steps."""
        flat = self.bit16_groups_flat[group_index]
        first, size = flat.data_ptr(), flat.element_size()
        params, offsets = self.round_robin_bit16_groups[group_index], self.round_robin_bit16_offsets[group_index]
        if not all(p.data_ptr() == first + size * offset for p, offset in zip(params, offsets, strict=True)):
            super()._update_model_bit16_weights(group_index)


class FusedZeroOptimizerStage3(_Fused, DeepSpeedZeroOptimizer_Stage3):  # type: ignore[misc]
    """The wrapper of stage 3."""

    shards = "fp32_partitioned_groups_flat"

    def _show(self, totals: Sequence[Tensor]) -> None:
        for index, (total, params) in enumerate(zip(totals, self.fp16_groups, strict=True)):
            positions = [self.grad_position[self.get_param_id(param)] for param in params]
            self.averaged_gradients[index] = [total.narrow(0, start, numel) for _, start, numel in positions]

    @replaces
    def reduce_ready_partitions_and_remove_grads(self, param: Tensor) -> None:
        """Take what DeepSpeed's hook finds in ``.grad``: a parameter's gradient of this micro-batch."""
        self._take(param)

    @replaces
    def independent_gradient_partition_epilogue(self) -> None:
        """Do nothing: :meth:`end_micro_batch` follows."""
        self._epilogue_ran_this_backward = True

    @replaces
    def _get_norm_groups(self) -> list[Tensor]:
        """Return one norm, over all sub-groups at once."""
        return [self._norm()]

    @replaces
    def _prepare_fp32_grad_for_sub_group(self, sub_group_id: int) -> None:
        """Hand over the sums of the exchange as they are; DeepSpeed copies its pieces together."""
        shard = self._shards()[sub_group_id]
        shard.grad = self.exchange.moments(shard).total
        self.averaged_gradients[sub_group_id] = None

    @replaces
    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Leave this to the update, which multiplies by what :class:`GradientScale` finds: no pass over the shard."""

    @replaces
    def _get_fp32_grad_state_partition(self, param: Tensor, release_swap_buffers: bool) -> tuple[Tensor, int]:
        """Show DeepSpeed's readers and writers of single gradients the sums of the exchange."""
        index, start, numel = self.grad_position[self.get_param_id(param)]
        return self.edits.hand_out(self._shards()[index], start, numel), index

    @replaces
    def update_fp32_grad_for_param_vectorized(self, update_func: Callable[..., Tensor], param_list: Any) -> None:
        """Let DeepSpeed's own, which writes to its partitions, write to the sums of the exchange."""
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


def fuse(wrapper: Any, exchange: ShardedMoments, layouts: Mapping[Tensor, ShardLayout], *, measures: bool) -> None:
    """Replace the reduction of an engine's ZeRO wrapper, for which :func:`unfit` has found no reason, by ``exchange``.

    ``layouts`` are those of the wrapper's shards; ``measures`` says whether a ratio is measured on the chunks.
    """
    wrapper.__class__ = FUSED[type(wrapper)]
    wrapper._set_up(exchange, layouts, measures)


def choose_reduction(engine: Engine, wanted: str, watch: Any = None) -> tuple[bool, str]:
    """Return whether to replace the reduction of an engine that is built, and why.

    Raises:
        ValueError: fused mode was ``wanted`` (the optimizer's argument ``reduction``), or is needed to ``watch`` the
            ranks, and would not be exact here.
    """
    if watch is not None:
        reason = 'reduction="observe". Leave it out' if wanted == "observe" else unfit(engine)
        if reason is not None:
            raise ValueError(
                f"watch={watch!r} compares the ranks' gradients, which the exchange alone has, in the place of "
                f"DeepSpeed's reduction; and it cannot take that place: {reason}; or leave watch out."
            )
        return True, f"watch={watch!r}"
    if wanted == "observe":
        return False, 'reduction="observe"'
    reason = unfit(engine)
    if reason is not None and wanted == "fused":
        raise ValueError(f'reduction="fused" cannot serve this configuration: {reason}; or set reduction to "auto".')
    return reason is None, reason or f'reduction="{wanted}"'


def unfit(engine: Engine) -> str | None:
    """Return why this engine's reduction cannot be replaced exactly; None where it can.

    Each reason names the setting, its value and the way out, for ``reduction="fused"`` makes an error of it.
    """
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return "zero_optimization.stage=0 keeps whole gradients on every rank. Use stage 1, 2 or 3"
    if isinstance(engine, PipelineEngine):
        return "PipelineModule: its engine reduces after the last micro-batch. Use ZeRO without a pipeline"
    if type(wrapper) not in FUSED:
        return (
            f"DeepSpeed built a {type(wrapper).__name__}, which reduces in a way of its own. At stage 1 in bf16, leave "
            "out data_types.grad_accum_dtype: fused mode accumulates in fp32 anyway"
        )
    if offloads(wrapper):
        return "zero_optimization.offload_optimizer: gradients go to the CPU one by one. Remove that section"
    if engine.has_moe_layers:
        return "MoE layers: experts are reduced over groups of their own"
    if missing := absent(wrapper, NEEDED[type(wrapper).__name__]):
        return f"this DeepSpeed's {type(wrapper).__name__} has no {', '.join(missing)}, which fused mode needs"
    if not wrapper._grad_acc_hooks:
        return (
            "zero_optimization.contiguous_gradients=false and overlap_comm=false at stage 1: DeepSpeed sets no hook "
            "then. Set either to true"
        )
    if changed := changed_methods(type(wrapper)):
        return f"this DeepSpeed's {', '.join(changed)} takes other arguments than those ds_vrgd replaces"
    return None


def changed_methods(wrapper: type) -> list[str]:
    """Return the methods that fused mode replaces and that DeepSpeed lacks, or declares with other parameters."""
    changed = []
    for name, ours in inspect.getmembers(FUSED[wrapper], lambda member: hasattr(member, "replaces_deepspeed")):
        theirs = getattr(wrapper, name, None)
        if theirs is None or parameters_of(theirs) != parameters_of(ours):
            changed.append(f"{wrapper.__name__}.{name}")
    return changed
