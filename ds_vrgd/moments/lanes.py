"""Order between the streams that gradients come from and the one that exchanges run on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Lanes:
    """Where there are no streams, everything happens in the order of the program, and nothing is to be done."""

    def here(self) -> Any:
        """The stream of the caller."""
        return None

    def gather(self, producers: Iterable[Any], tensors: Iterable[Tensor]) -> None:
        """Have the caller's stream wait for those on which ``tensors`` were made."""

    def wait(self, event: Any) -> None:
        """Have the caller's stream wait for ``event``; None has long happened."""

    def fork(self, writers: Iterable[Any]) -> None:
        """Have the side stream wait for the caller's and for ``writers``."""

    def side(self) -> AbstractContextManager[Any]:
        """Inside, the side stream is the current one."""
        return nullcontext()

    def mark(self, event: Any) -> Any:
        """Record ``event`` (None: a new one) on the caller's stream."""
        return None

    def join(self) -> None:
        """Have the caller's stream wait for the side stream."""

    def use(self, tensor: Tensor) -> None:
        """Keep ``tensor``'s memory, once it is freed, until the caller's stream has come this far."""


class CudaLanes(Lanes):
    """One side stream, on which exchanges start and what they bring is merged, so that no backward pass waits.

    It has priority: what it does is short, and whoever waits for a buffer waits for it. The caller's streams are
    ``torch.Stream``, which costs the hook of every parameter a fraction of what ``torch.cuda.current_stream`` does.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index
        self._side = torch.cuda.Stream(self._index, priority=-1)

    def here(self) -> torch.Stream:
        """The stream of the caller."""
        return torch.accelerator.current_stream(self._index)

    def gather(self, producers: Iterable[torch.Stream], tensors: Iterable[Tensor]) -> None:
        """Have the caller's stream wait for those on which ``tensors`` were made."""
        here = self.here()
        others = [stream for stream in producers if stream != here]
        for stream in others:
            here.wait_stream(stream)
        if others:
            for tensor in tensors:
                self.use(tensor)

    def wait(self, event: torch.Event | None) -> None:
        """Have the caller's stream wait for ``event``; None has long happened."""
        if event is not None:
            self.here().wait_event(event)

    def fork(self, writers: Iterable[torch.Stream]) -> None:
        """Have the side stream wait for the caller's and for ``writers``."""
        for stream in {*writers, self.here()}:
            self._side.wait_stream(stream)

    def side(self) -> AbstractContextManager[Any]:
        """Inside, the side stream is the current one."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def mark(self, event: torch.Event | None) -> torch.Event:
        """Record ``event`` (None: a new one) on the caller's stream."""
        event = torch.Event(self._side.device) if event is None else event
        event.record(self.here())
        return event

    def join(self) -> None:
        """Have the caller's stream wait for the side stream."""
        self.here().wait_stream(self._side)

    def use(self, tensor: Tensor) -> None:
        """Keep ``tensor``'s memory, once it is freed, until the caller's stream has come this far."""
        tensor.record_stream(self.here())


def lanes_on(device: torch.device) -> Lanes:
    """What fits ``device``."""
    return CudaLanes(device) if device.type == "cuda" else Lanes()
