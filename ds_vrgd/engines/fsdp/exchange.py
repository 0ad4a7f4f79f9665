"""The exchange in the place of FSDP2's reduce-scatter: an all-to-all, after which each owner holds all ranks' rows."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_vrgd.engines.fsdp.units import Unit
from ds_vrgd.moments import ChunkNorms, Moments, local
from ds_vrgd.moments.chan import merge_chunks_, merge_ranks_, merge_zeros_, zeros_like
from ds_vrgd.moments.compare import Comparison, Run
from ds_vrgd.moments.store import on_device_of


class UnitExchange:
    """The communication of one unit (``torch.distributed.fsdp``'s ``ReduceScatter``), and its moments in a window.

    FSDP2 calls it once for each micro-batch, on its own stream, with the buffer of this rank's gradients in the dtype
    of the wire. What goes back to FSDP2, and into ``.grad``, is the sum or the mean over the ranks in fp32.

    On CUDA everything here runs on the stream of FSDP2's reduction, for which the backward pass waits at its end.

    Memory: 8 bytes per element of the shards in a window, and during a micro-batch a second buffer like FSDP2's own.

    Args:
        unit: the unit.
        reduces: called with this exchange before each of its reductions; not kept alive, and without it only the mean
            is formed.
        norms: takes the norm of every buffer, under the first of the unit's parameters.
        observed: whether the moments are wanted.
        comparison: compares the ranks; None where nobody watches them.
        layers: by parameter, its place in the comparison, and the index of this rank's first element.

    Attributes:
        unit, observed: as given.
        parts: micro-batches that are in the moments.
        passes: the backward passes of the window that these came from, a bit each.
    """

    def __init__(
        self,
        unit: Unit,
        reduces: Callable[[UnitExchange], None],
        norms: ChunkNorms,
        *,
        observed: bool,
        comparison: Comparison | None = None,
        layers: Mapping[Tensor, tuple[int, int]] = {},
    ) -> None:
        self.unit, self.observed, self.parts, self.passes = unit, observed, 0, 0
        self._reduces: Any = weakref.WeakMethod(reduces)
        self._norms, self._comparison, self._layers = norms, comparison, layers
        self._held: tuple[Tensor, Tensor] | None = None
        self._views: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._slots: list[tuple[Tensor, int, int]] = []
        self._slots_of: Any = None
        self._versions: dict[Tensor, int] = {}
        self._alone: tuple[Tensor, Tensor, Any] | None = None
        self._sent: Tensor | None = None
        self._result: Tensor | None = None

    def install(self) -> None:
        """Take the place of what reduces the unit's gradients; an exchange there is detached, with its observer."""
        if isinstance(earlier := self.unit.communication, UnitExchange):
            owner = earlier._reduces()
            (earlier if owner is None else owner.__self__).detach()
        self._before, self._reduced_unused = self.unit.communication, self.unit.reduce_unused(True)
        self.unit.module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]

    def detach(self) -> None:
        """Give the unit its own communication back."""
        if self.unit.communication is self:
            self.unit.module.set_custom_reduce_scatter(self._before)
            self.unit.reduce_unused(self._reduced_unused)
        self.reset()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for FSDP2: first for the buffer to be sent, then for what stays of it on this rank."""
        if self._sent is None:
            self._sent = torch.empty(*size, dtype=dtype, device=device)
            return self._sent
        sent, self._sent = self._sent, None
        # The result is not rounded to the dtype of the wire: FSDP2 casts it to the parameters', or leaves it.
        result = torch.empty(*size, dtype=torch.promote_types(dtype, torch.float32), device=device)
        if self.unit.ranks == 1:  # FSDP2 copies the buffer of a single rank, and calls nobody
            if (reduces := self._reduces()) is not None:
                reduces(self)  # which may forget the window, but not this micro-batch
            self._alone = sent, result, torch.accelerator.current_stream() if device.type != "cpu" else None
        return result

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Exchange one micro-batch, merge it, and write the ranks' sum or mean to ``output_tensor``."""
        if (reduces := self._reduces()) is not None:
            if self._alone is None:  # else allocate() has reported it: torch 2.9 calls this with a single rank, too
                reduces(self)
            self._alone = None
            self._note(input_tensor)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        rows = received.view(self.unit.ranks, -1)
        divisor = 1.0
        if op == dist.ReduceOp.AVG:
            divisor = float(self.unit.ranks)
        elif op != dist.ReduceOp.SUM:  # a factor that NCCL would multiply by on the way
            divisor = self.unit.divisor
        if reduces is not None and self.observed:
            self._merge(rows, output_tensor, divisor)
        else:
            torch.sum(rows, 0, dtype=output_tensor.dtype, out=output_tensor)
            if divisor != 1.0:
                output_tensor.div_(divisor)
        if reduces is not None:
            if self._comparison is not None:
                self._lay_out(rows.shape[1])
                self._comparison.add(rows, (self.unit, self._slots_of), self._runs)
            self._count(output_tensor)

    def _runs(self) -> list[Run]:
        """Return which columns of this rank's row belong to which layer."""
        starts = itertools.accumulate((slot for _, _, slot in self._slots), initial=0)
        found = zip(self._slots, starts, strict=False)
        return [(start, numel, *self._layers[param]) for (param, numel, _), start in found if numel]

    def merge_alone(self) -> None:
        """Merge what a single rank has sent of its own micro-batch, at the end of the backward pass.

        Not what FSDP2 has made of it: that is in ``.grad``, where hooks may have changed it.
        """
        if self._alone is not None:
            (sent, result, stream), self._alone = self._alone, None
            if stream is not None:
                torch.accelerator.current_stream().wait_stream(stream)
            rows = sent.view(1, -1)
            self._note(rows)
            if self.observed:
                self._merge(rows)
            self._count(result)

    def _count(self, result: Tensor) -> None:
        """Count a micro-batch; FSDP2 makes views of the window's first ``result``, and adds the others to them."""
        if self.parts == 0:
            self._result = result
        self.parts += 1

    def _note(self, buffer: Tensor) -> None:
        if self.observed:
            if self.parts == 0:
                self._norms.forget(self.unit.params[0])
            self._norms.note(self.parts, [(self.unit.params[0], buffer)])

    def _merge(self, rows: Tensor, out: Tensor | None = None, divisor: float = 1.0) -> None:
        """Merge a micro-batch into the moments, and write the sum of its rows over ``divisor`` to ``out``."""
        width = rows.shape[1]
        self._lay_out(width)
        if self._held is None:
            wide = torch.promote_types(rows.dtype, torch.float32)
            total, m2 = (torch.empty(width, dtype=wide, device=rows.device) for _ in range(2))  # aligned, both
            self._held = total, m2
            sizes = [size for _, numel, slot in self._slots for size in (numel, slot - numel)]
            pairs = zip(*(moment.split(sizes)[::2] for moment in self._held), strict=True)
            self._views = dict(zip([param for param, _, _ in self._slots], pairs, strict=True))
        merge_chunks_(rows, *self._held, self.parts, out, divisor)

    def _lay_out(self, width: int) -> None:
        """Find where each parameter is in this rank's row of ``width`` elements, where that may have changed."""
        trained = width, *(param.requires_grad for param in self.unit.params)
        if trained == self._slots_of:
            return
        if self._held is not None:
            raise RuntimeError(
                f"parameters of '{self.unit.name}' were frozen or unfrozen between two backward passes of a window. Do "
                "so after optimizer.step() or optimizer.zero_grad()"
            )
        self._slots = self.unit.slots
        if (start := sum(slot for _, _, slot in self._slots)) != width:
            raise RuntimeError(
                f"FSDP2 reduces {width} elements of '{self.unit.name}' on each rank, and {start} belong to parameters "
                f"that are trained: some got no gradient in this backward pass, and torch {torch.__version__} does not "
                "report which. Use torch 2.13 or newer, or freeze the parameters that take no part"
            )
        self._slots_of = trained

    def as_one(self, grads: list[Tensor]) -> list[Tensor]:
        """Return the buffer that ``grads`` are views of, if they are all that FSDP2 has made of it; else ``grads``."""
        buffer, trained = self._result, sum(param.requires_grad for param in self.unit.params)
        if buffer is None or len(grads) < trained:
            return grads
        return [buffer] if all(grad.untyped_storage().data_ptr() == buffer.data_ptr() for grad in grads) else grads

    # -- what the program throws away ---------------------------------------------------------------------------------

    def note_versions(self) -> None:
        """Remember what ``.grad`` is at the end of a backward pass."""
        held = () if self.unit.awaits_all_reduce else self.unit.params
        self._versions = {param: _version(param.grad) for param in held if param.grad is not None}

    def drop_discarded(self) -> None:
        """Forget the chunks of gradients that were thrown away since the last backward pass.

        Raises:
            RuntimeError: they were set to zero in place. What this rank has of them cannot tell whether they were on
                all ranks. They are only looked at where somebody has written to them, and the chunks' mean is not zero
                by itself.
        """
        self.drop_nones()
        held = [(param.grad, version) for param, version in self._versions.items() if param.grad is not None]
        held = [(grad, version) for grad, version in held if local(grad).numel()]
        written = [grad for grad, version in held if _version(grad) != version]
        all_zero = len(written) == len(held) and not any(bool(local(grad).count_nonzero()) for grad in written)
        if written and all_zero and self._held is not None and bool(self._held[0].count_nonzero()):
            raise RuntimeError(
                f"the gradients of '{self.unit.name}' were set to zero in place between two backward passes of a "
                "window, and their chunks would count. Use optimizer.zero_grad() or model.zero_grad()"
            )

    def drop_nones(self) -> None:
        """Forget the chunks of gradients that were set to None since the last backward pass."""
        gone = [param for param in self._versions if param.grad is None]
        if gone and self._comparison is not None:
            self._comparison.drop([self._layers[param][0] for param in gone])
        if gone and len(gone) == len(self._versions):
            self._norms.forget(self.unit.params[0])
            self.reset()
        else:
            for param in gone:
                for moment in self._views.get(param, ()):
                    moment.zero_()

    # -- the window's moments -----------------------------------------------------------------------------------------

    def finish(self, parts: int) -> None:
        """Complete the moments over ``parts`` micro-batches, and over the copies of the shards; a collective there."""
        if self._held is None:
            return
        total, m2 = self._held
        if self.parts < parts:  # the unit took no part in some: its gradient there is 0
            merge_zeros_(total, m2, self.parts, parts - self.parts, self.unit.ranks)
            self.parts = parts
        if self.unit.replicate_group is not None:
            merge_ranks_(total, m2, parts, self.unit.ranks, self.unit.replicate_group)

    def moments(self, param: Tensor) -> Moments:
        """Return the moments of this rank's part of a parameter, on its device, flat."""
        if param not in self._views:  # also one that was frozen, and whose .grad is still there
            return zeros_like(local(param), max(self.parts, 1))
        total, m2 = self._views[param]
        if total.device != param.device:  # offloaded
            total, m2 = (on_device_of(local(param), moment) for moment in (total, m2))
        return Moments(total, m2, self.parts)

    def bad(self) -> list[Tensor]:
        """Return the parameters of which this rank's part of the moments is not finite; waits for them."""
        return [param for param, (total, _) in self._views.items() if not bool(torch.isfinite(total.sum()))]

    def reset(self) -> None:
        """Begin the next window."""
        self.parts = self.passes = 0
        self._held = self._sent = self._alone = self._result = None
        self._views = {}
        self._versions.clear()


def _version(grad: Tensor) -> int:
    """Return how often a gradient was written to: as a DTensor, and on this rank alone."""
    return grad._version + local(grad)._version
