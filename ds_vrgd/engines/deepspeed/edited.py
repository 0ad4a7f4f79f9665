"""Detection of edits: has anybody changed the gradient since it left autograd?

Next to DeepSpeed's reduction, what DeepSpeed hands over is compared with the mean of the chunks
(:class:`EditDetector`). In fused mode what a program may edit and what was measured are one memory, so the measured
values are copied before anybody can write (:class:`FusedEdits`). Two ways lead there. DeepSpeed's setters of single
gradients (``safe_set_full_grad``) write into the sum of the chunks. A hook on an accumulated gradient changes it before
it is exchanged: the exchange is given the chunk as it left autograd, and the change is summed apart.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero.stage_1_and_2 import GradPartitionBufferGroup
from torch import Tensor

from ds_vrgd.engines.deepspeed.held import GradientScale
from ds_vrgd.moments import GradientHook, Moments, Route, Segment, ShardedMoments, ShardLayout, value_of

AT_ONCE = 2**24  # elements that are compared at once: 64 MB in fp32
PARTS = 4.0  # how much larger than the layer's chunks, in root mean square, each rank's part of a chunk may be
NEVER = 10.0  # multiples of a rounding error's standard deviation that rounding never reaches
ROUNDINGS = 8  # roundings of a sum over chunks that its size may stand for


class EditDetector:
    """A search for the layers whose gradient somebody changed after it was reduced.

    What DeepSpeed hands over is compared with the mean of the chunks, element by element, within the rounding of
    DeepSpeed's own sum. With a unit roundoff u, chunks of mean m and variance v, and an error of a roundings in a sum,
    the difference has a standard deviation of at most ``u sqrt(a m^2 / 9 + v / 3)``: an edit of chunks that cancel is
    seen against the size of the chunks, not of their mean.

    Args:
        engine: the engine, built.
        summed: names of layers that are not compared. A tied weight's copies are rounded before they are summed, and
            their sizes are not known. A pipeline's batch leaves no time for edits, except by hooks.
    """

    def __init__(self, engine: Any, summed: Collection[str]) -> None:
        dtypes = {engine.communication_data_type, *engine.get_data_types()[1:]} - {None}
        if engine.torch_autocast_enabled():
            dtypes.add(engine.torch_autocast_dtype())
        coarsest = max(map(torch.finfo, dtypes), key=lambda info: info.eps)
        self._roundoff = coarsest.eps / 2
        self._smallest = coarsest.tiny * coarsest.eps
        self._ranks = torch.distributed.get_world_size(engine.seq_data_parallel_group)
        self._summed = set(summed)
        # Several ranks compute one chunk together, and DeepSpeed rounds each rank's part of it, whose size is not known
        # here either: it is assumed to be at most PARTS times that of the layer's chunks.
        self._joined = engine.sequence_parallel_size > 1

    def find(
        self, gradient: Tensor, layout: ShardLayout, moments: Moments, k: int, micro_batches: int, scale: GradientScale
    ) -> list[Segment]:
        """Return the segments of a shard in which the gradient was edited.

        Args:
            gradient: what DeepSpeed hands over, ``(n,)``, unscaled and clipped.
            layout, moments, k: the shard's layout, the moments of its chunks and their number.
            micro_batches, scale: the number of the window's micro-batches, and its scale.
        """
        factor = scale.handed(moments.total.device)
        of_mean = factor * (micro_batches / moments.parts)
        roundings = micro_batches + self._ranks + 4
        unit = (NEVER * self._roundoff) ** 2
        of_variance = factor.square() * (micro_batches**2 * unit / (3 * k))
        least = (NEVER * self._smallest * factor) ** 2 * roundings
        over = torch.empty(layout.numel, dtype=torch.bool, device=gradient.device)
        pieces = [slice(start, start + AT_ONCE) for start in range(0, layout.numel, AT_ONCE)]
        if self._joined:
            pieces = [slice(s.start, s.start + s.numel) for s in layout.segments]
        for piece in pieces:
            mean = moments.total[piece] * of_mean
            limit = mean.square().mul_(unit * roundings / 9).add_(least).add_(moments.m2[piece] * of_variance)
            if self._joined:
                limit += PARTS**2 * limit.mean()
            torch.gt(mean.sub_(gradient[piece]).square_(), limit, out=over[piece])
        compared = [s for s in layout.segments if layout.layers[s.layer].name not in self._summed]
        if not compared:
            return []
        flags = torch.stack([over[s.start : s.start + s.numel].any() for s in compared]).tolist()
        return [segment for segment, flag in zip(compared, flags, strict=True) if flag]


def let_others_run_first(params: Iterable[Tensor], own_hooks: Collection[int]) -> list[Tensor]:
    """Let all other hooks on accumulated gradients run before DeepSpeed's, whenever they were registered.

    DeepSpeed's hook (``own_hooks`` are the identities of its hooks) removes the gradient, or copies it on another
    stream: what a later hook changes may be lost. Returns the parameters that have other hooks.
    """
    found = []
    for param in params:
        hooks: Any = param._post_accumulate_grad_hooks or {}
        own = [hook for hook in hooks if hook in own_hooks]
        if own and len(own) < len(hooks):
            hooks[own[0]] = hooks.pop(own[0])  # autograd calls them in the order of insertion
            found.append(param)
    return found


class FusedEdits:
    """The measured sums of a window, kept wherever the held ones may differ from them.

    Args:
        exchange: holds the sums.
        own_hooks: identities of DeepSpeed's hooks on accumulated gradients, one of which takes each gradient.
        measures: whether a ratio is measured on the chunks; if not, the exchange is given what hooks have made of them.
    """

    def __init__(self, exchange: ShardedMoments, own_hooks: Collection[int], *, measures: bool) -> None:
        self._exchange = exchange
        self._own_hooks, self._measures = own_hooks, measures
        self._hooks: dict[Tensor, GradientHook] = {}
        self._arrived: dict[Tensor, Tensor] = {}
        self._changes: dict[Tensor, Tensor] = {}
        self._others_change = False
        self._verdicts: list[Callable[[], bool]] = []
        if measures:
            exchange.before_first_bucket = self._ask_whether_any_rank_has_changes
        self._measured: dict[tuple[Tensor, int, int], Tensor] = {}

    # -- hooks on accumulated gradients -------------------------------------------------------------------------------

    def come_last(self, *, begins: bool) -> None:
        """Let other hooks on accumulated gradients run first, and see the gradients that they are about to change.

        Where a backward pass ``begins``, see also the gradients that it adds to what a program has left in ``.grad``.
        """
        params = [route.param for route in self._exchange.routes]
        others = let_others_run_first(params, self._own_hooks)
        if begins:
            self._arrived.clear()  # of another engine's pass
            others += [param for param in params if param.grad is not None]
        self._others_change |= bool(others)
        for param in others if self._measures else ():
            if param not in self._hooks:
                self._hooks[param] = GradientHook(param, self._see)

    def _see(self, param: Tensor, grad: Tensor) -> None:
        earlier = self._arrived.get(param)
        # While it is referenced here, autograd does not make it .grad, which hooks are about to change.
        self._arrived[param] = value_of(grad) if earlier is None else earlier + value_of(grad)

    def chunk(self, param: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient as it left autograd, and remember what hooks have changed since."""
        arrived = self._arrived.pop(param, None)
        if arrived is None or torch.equal(arrived, grad):
            return grad
        change = grad.to(_sum_dtype(grad)) - arrived
        self._changes[param] = self._changes[param] + change if param in self._changes else change
        return arrived

    def _ask_whether_any_rank_has_changes(self) -> None:
        """Begin a collective; the host waits for its answer only when it calls what is put into ``_verdicts``."""
        group, device = self._exchange.group, self._exchange.routes[0].param.device
        flag = torch.full((1,), int(self._others_change), dtype=torch.int32, device=device)
        work: Any = torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group, async_op=True)
        wait = work.wait
        if flag.is_cuda:
            work.wait()  # makes this stream wait, and not the host
            flag = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(flag, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            wait = copied.synchronize

        def is_yes() -> bool:
            wait()
            return bool(flag.item())

        self._verdicts.append(is_yes)

    def add_to_sums(self) -> None:
        """Add the ranks' mean change to the sums of the chunks.

        Where others may have changed any rank's gradients this is a collective, with one more for each changed layer.
        """
        verdicts, self._verdicts = [is_yes() for is_yes in self._verdicts], []
        if not any(verdicts):
            return
        self.undo(published=False)
        group, routes = self._exchange.group, self._exchange.routes
        device = routes[0].param.device
        changed = torch.tensor([route.param in self._changes for route in routes], dtype=torch.uint8, device=device)
        torch.distributed.all_reduce(changed, op=torch.distributed.ReduceOp.MAX, group=group)
        for route in (routes[index] for index in changed.nonzero().flatten().tolist()):
            change = self._changes.get(route.param)
            if change is None:
                change = torch.zeros(route.numel, dtype=_sum_dtype(route.param), device=device)
            change = change.flatten().clone()  # the window may be published again, with further changes
            torch.distributed.all_reduce(change, op=torch.distributed.ReduceOp.SUM, group=group)
            self._add(route, change / self._exchange.chunks_at_once)

    def _add(self, route: Route, change: Tensor) -> None:
        """Add this rank's part of a mean change to the sum that it owns."""
        rank = torch.distributed.get_rank(self._exchange.group)
        numel = dict(route.runs).get(rank, 0)
        if not numel:
            return
        before = sum(of_rank for other, of_rank in route.runs if other < rank)
        held = self.hand_out(route.shard, route.shard_start, numel)
        moments = self._exchange.moments(route.shard)
        m2 = moments.m2.narrow(0, route.shard_start, numel)
        # What is left where chunks and change cancel is their rounding: a masked element is zero.
        size = (held.square() + m2 * (moments.parts / self._exchange.chunks_at_once)).sqrt_()
        held += change[before : before + numel].to(held.device)
        held.masked_fill_(held.abs() <= ROUNDINGS * torch.finfo(held.dtype).eps * size, 0.0)

    # -- setters of single gradients ----------------------------------------------------------------------------------

    def hand_out(self, shard: Tensor, start: int, numel: int) -> Tensor:
        """Return a part of a sum for others to write to: a view, ``(numel,)``."""
        if (shard, start, numel) not in self._measured:  # parts may overlap, and one of them be edited already
            self._measured[shard, start, numel] = self.unedited(shard).total.narrow(0, start, numel).clone()
        return self._exchange.moments(shard).total.narrow(0, start, numel)

    @property
    def measured(self) -> list[Tensor]:
        """Return the parts of this rank's sums that were handed out, as they were measured."""
        return [measured for measured in self._measured.values() if measured.numel()]

    def unedited(self, shard: Tensor) -> Moments:
        """Return the moments of the chunks, ``(n,)``: a copy where the held sum was edited."""
        moments = self._exchange.moments(shard)
        total = moments.total
        for (of, start, numel), measured in self._measured.items():
            if of is shard and not torch.equal(moments.total.narrow(0, start, numel), measured):
                total = total.clone() if total is moments.total else total
                total.narrow(0, start, numel).copy_(measured)
        return Moments(total, moments.m2, moments.parts)

    def undo(self, *, published: bool) -> None:
        """Restore the sums, to which something is about to be added: a further micro-batch, or what hooks have changed.

        Raises:
            RuntimeError: a part was edited before the window was ``published``, and so complete.
        """
        for (shard, start, numel), measured in self._measured.items():
            held = self._exchange.moments(shard).total.narrow(0, start, numel)
            if not (published or torch.equal(held.nan_to_num(), measured.nan_to_num())):
                raise RuntimeError(
                    "a gradient was set (safe_set_local_grad, safe_set_full_grad) before its window was complete, and "
                    "a further micro-batch or a hook on accumulated gradients is added to it. Set it after the last "
                    "backward pass of the window, and without managed_gradient_accumulation=false where there are "
                    'such hooks; or set reduction to "observe".'
                )
            held.copy_(measured)
        self._measured.clear()

    def clear(self) -> None:
        """Begin the next window."""
        self._others_change = False
        self._arrived.clear()
        self._changes.clear()
        self._measured.clear()
        self._verdicts.clear()

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self.clear()


class Shown(GradPartitionBufferGroup):  # type: ignore[misc]
    """The sums ``total`` of ``shard`` as DeepSpeed's readers and writers of single gradients find them at stages 1, 2.

    ``edits`` copies every piece that is handed out.
    """

    def __init__(self, views: Sequence[Tensor], total: Tensor, edits: FusedEdits, shard: Tensor) -> None:
        super().__init__(views, total)
        self._edits = edits
        self._shard = shard

    def __getitem__(self, index: Any) -> Any:
        start, shape, _ = self._view_specs[index]
        self._edits.hand_out(self._shard, start, shape.numel())
        return super().__getitem__(index)


def _sum_dtype(grad: Tensor) -> torch.dtype:
    return torch.promote_types(grad.dtype, torch.float32)
