"""The order between the streams that gradients come from and the one that exchanges run on; and copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """One side stream, on which exchanges start and what they bring is merged, so that no backward pass waits.

    It has priority: its work is short, and whoever waits for a buffer waits for it. The caller's streams are
    ``torch.Stream``, which costs the hook of every parameter a fraction of what ``torch.cuda.current_stream`` does.
    Without CUDA there are no streams: everything happens in the order of the program, and each method does nothing.

    Args:
        device: where gradients are.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._side = torch.cuda.Stream(device.index, priority=-1) if device.type == "cuda" else None

    def here(self) -> Any:
        """Return the stream of the caller; None without streams."""
        return None if self._side is None else torch.accelerator.current_stream(self._index)

    def gather(self, producers: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        """Have the caller's stream wait for those on which ``tensors`` were made."""
        here = self.here()
        others = [stream for stream in producers if stream != here]
        for stream in others:
            here.wait_stream(stream)
        if others:
            for tensor in tensors:
                self.use(tensor)

    def wait(self, event: Any) -> None:
        """Have the caller's stream wait for ``event``, if there is one."""
        if event is not None:
            self.here().wait_event(event)

    def fork(self, writers: Iterable[Any]) -> None:
        """Have the side stream wait for the caller's and for ``writers``."""
        if self._side is not None:
            for stream in {*writers, self.here()}:
                self._side.wait_stream(stream)

    def side(self) -> AbstractContextManager[Any]:
        """Return a context in which the side stream is the current one."""
        return nullcontext() if self._side is None else torch.cuda.stream(self._side)

    def mark(self, event: Any) -> Any:
        """Record ``event`` (None: a new one) on the caller's stream, and return it; None without streams."""
        if self._side is None:
            return None
        event = torch.Event(self._side.device) if event is None else event
        event.record(self.here())
        return event

    def join(self) -> None:
        """Have the caller's stream wait for the side stream."""
        if self._side is not None:
            self.here().wait_stream(self._side)

    def use(self, tensor: Tensor) -> None:
        """Keep the memory of ``tensor``, once it is freed, until the caller's stream has come this far."""
        if self._side is not None:
            tensor.record_stream(self.here())


def on_host(tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
    """Begin to copy tensors to the CPU, and return a call that waits for what was begun before, and returns them.

    Args:
        tensors: all of one device; on a CPU they are returned as they are.
    """
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # from CUDA into pinned memory
    if not tensors or not tensors[0].is_cuda:
        return lambda: copies
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensors[0].device))

    def wait() -> Sequence[Tensor]:
        copied.synchronize()
        return copies

    return wait
