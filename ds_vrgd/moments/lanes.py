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
    """One side stream, on which exchanges start and what they bring is merged, so that no backward pass waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def here(self) -> torch.cuda.Stream:
        """The stream of the caller."""
        return torch.cuda.current_stream(self._device)

    def gather(self, producers: Iterable[torch.cuda.Stream], tensors: Iterable[Tensor]) -> None:
        """Have the caller's stream wait for those on which ``tensors`` were made."""
        others = [stream for stream in producers if stream != self.here()]
        for stream in others:
            self.here().wait_stream(stream)
        if others:
            for tensor in tensors:
                self.use(tensor)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Have the caller's stream wait for ``event``; None has long happened."""
        if event is not None:
            self.here().wait_event(event)

    def fork(self, writers: Iterable[torch.cuda.Stream]) -> None:
        """Have the side stream wait for the caller's and for ``writers``."""
        for stream in {*writers, self.here()}:
            self._side.wait_stream(stream)

    def side(self) -> AbstractContextManager[Any]:
        """Inside, the side stream is the current one."""
        context: AbstractContextManager[Any] = torch.cuda.stream(self._side)
        return context

    def mark(self, event: torch.cuda.Event | None) -> torch.cuda.Event:
        """Record ``event`` (None: a new one) on the caller's stream."""
        event = torch.cuda.Event() if event is None else event
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
