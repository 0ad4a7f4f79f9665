"""The exchange in the place of Megatron-Core's reduction of a bucket: an all-to-all, and the moments on the owner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ds_vrgd.moments import ChunkNorms, Moments
from ds_vrgd.moments.chan import merge_chunks_
from ds_vrgd.moments.compare import Comparison, Run
from ds_vrgd.moments.streams import Streams


class BucketExchange:
    """The communication of one of Megatron-Core's bucket groups, and the moments of the chunks of a window.

    A chunk is what one rank has accumulated in its gradient buffer, over all micro-batches: Megatron-Core reduces it
    once per window, so that the next reduction simply overwrites the moments. The buffer gets the mean of the chunks in
    its own dtype, as it would from Megatron-Core; :meth:`moments` has it in fp32.

    On CUDA everything runs on a side stream, for which :meth:`wait` has the caller's stream wait.

    Memory: 8 bytes per element of the moments from the reduction to the step, and a second buffer during it.

    Args:
        bucket_group: whose ``start_grad_sync`` is replaced, for this object alone.
        norms: takes the norm of the gradient of every parameter, where the moments are wanted.
        observed: whether the moments are wanted; else there is only the mean.
        comparison: compares the ranks; None where nobody watches them.
        layers: by parameter, its place in the comparison.

    Attributes:
        params: the parameters in the bucket group.
        reduced: whether the window has been reduced.
    """

    def __init__(
        self,
        bucket_group: Any,
        norms: ChunkNorms,
        *,
        observed: bool,
        comparison: Comparison | None = None,
        layers: Mapping[Tensor, int] = {},
    ) -> None:
        self._observed, self.reduced, self._norms, self._bucket_group = observed, False, norms, bucket_group
        self._ready = 0
        ddp_config = bucket_group.ddp_config
        self._is_sharded = bool(ddp_config.use_distributed_optimizer)
        self._group = (
            bucket_group.intra_distributed_optimizer_instance_group
            if self._is_sharded
            else bucket_group.data_parallel_group
        )
        self._ranks, self._rank = self._group.size(), self._group.rank()
        self.params = [param for bucket in bucket_group.buckets for param in bucket.params_list]
        self._streams = Streams(bucket_group.buckets[0].grad_data.device)
        self._held: dict[Any, tuple[Tensor, Tensor]] = {}
        self._comparison, self._layers = comparison, layers
        if isinstance(earlier := self.of(bucket_group), BucketExchange):
            earlier.detach()
        bucket_group.start_grad_sync = self.start

    @staticmethod
    def of(bucket_group: Any) -> Any:
        """Return the exchange in the place of a bucket group's reduction; None for Megatron-Core's own."""
        return getattr(vars(bucket_group).get("start_grad_sync"), "__self__", None)

    def detach(self) -> None:
        """Give the bucket group its own communication back."""
        if self.of(self._bucket_group) is self:
            del self._bucket_group.start_grad_sync
        self.reset()

    @property
    def is_detached(self) -> bool:
        """Return whether another exchange has taken this one's place."""
        return self.of(self._bucket_group) is not self

    def start(self, force_all_reduce: bool | None = False) -> None:
        """Do what ``start_grad_sync`` does: begin the reduction, or complete it without ``overlap_grad_reduce``."""
        group, config = self._bucket_group, self._bucket_group.ddp_config
        if group.is_first_batch and group.grad_reduce_handle is not None:
            return  # dispatched already
        if force_all_reduce and self._is_sharded:
            raise RuntimeError(
                "force_all_reduce leaves every rank with the whole gradient, and the exchange does not. Leave it out"
            )
        if self.reduced:
            raise RuntimeError(
                "the gradients of a bucket were reduced twice in one window, and the second time they were mixed with "
                "the mean. Call finalize_model_grads (or finish_grad_sync) once before step(), and zero_grad_buffer "
                "before the next window"
            )
        if config.check_for_nan_in_grad or config.check_for_large_grads:
            group.check_grads(config.check_for_nan_in_grad, config.check_for_large_grads)
        if self._observed:
            self._norms.note(0, [(param, param.main_grad) for param in self.params])
        self._streams.fork(())
        with self._streams.side():
            for bucket in group.buckets:
                self._reduce(bucket)
        self.reduced, self._ready = True, self._gradients_ready()
        if config.overlap_grad_reduce:
            group.grad_reduce_handle = self
        else:
            self.wait()

    @property
    def is_late(self) -> bool:
        """Return whether another backward pass has added gradients to the mean."""
        return self.reduced and self._gradients_ready() != self._ready

    def _gradients_ready(self) -> int:
        """Return how many gradients were ready for the reduction, in all passes; with ``overlap_grad_reduce`` alone."""
        return sum(self._bucket_group.per_param_grad_ready_counts.values())

    def wait(self) -> None:
        """Have the caller's stream wait for the reduction."""
        self._streams.join()

    def _reduce(self, bucket: Any) -> None:
        """Replace the gradients in a bucket by their mean over the ranks: this rank's part of it, or everything."""
        data, numel = bucket.grad_data, bucket.grad_data.numel()
        width = -(-numel // self._ranks)
        to_send = pad(data, (0, width * self._ranks - numel)) if width * self._ranks > numel else data
        received = torch.empty_like(to_send)
        dist.all_to_all_single(received, to_send, group=self._group)
        rows = received.view(self._ranks, width)
        wide = torch.promote_types(data.dtype, torch.float32)
        total = torch.empty(width, dtype=wide, device=data.device)
        m2 = total.new_empty(width if self._observed else 0)
        if self._observed:
            merge_chunks_(rows, total, m2, 0)
        else:
            torch.sum(rows, 0, dtype=wide, out=total).div_(self._ranks)
        if self._comparison is not None:
            self._comparison.add(rows, bucket, lambda: self._runs(bucket, width))
        if self._is_sharded:
            data[self._rank * width : (self._rank + 1) * width].copy_(total)
        else:
            total, m2 = self._gathered(total, numel), self._gathered(m2, numel) if self._observed else m2
            data.copy_(total)
        self._held[bucket] = total, m2

    def _runs(self, bucket: Any, width: int) -> list[Run]:
        """Return which columns of this rank belong to which layer."""
        low, runs = self._rank * width, []
        for param in bucket.params_list:
            start = param.main_grad.storage_offset() - bucket.grad_data.storage_offset()
            first, end = max(start, low), min(start + param.numel(), low + width)
            if first < end:
                runs.append((first - low, end - first, self._layers[param], first - start))
        return runs

    def _gathered(self, part: Tensor, numel: int) -> Tensor:
        whole = part.new_empty(self._ranks * part.numel())
        dist.all_gather_into_tensor(whole, part, group=self._group)
        return whole[:numel]

    def moments(self, bucket: Any, run: slice) -> Moments:
        """Return the moments of a run of what this rank has of a bucket."""
        total, m2 = self._held[bucket]
        return Moments(total[run], m2[run])

    def reset(self) -> None:
        """End the window, also one that is thrown away while it is being reduced."""
        self.wait()
        self.reduced = False
        if self._bucket_group.grad_reduce_handle is self:
            self._bucket_group.grad_reduce_handle = None
        for held in self._held.values():
            for moment in held:
                self._streams.use(moment)
        self._held.clear()
