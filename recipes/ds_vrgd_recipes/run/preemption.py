"""SIGTERM, which a cluster sends some seconds before it takes the machine away."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType


class StopRequest:
    """A context in which SIGTERM sets ``requested`` instead of ending the process.

    An update cannot be left half-way, and the other ranks may not have received the signal. Once it has come, SIGTERM
    stays without effect after the exit: the process is about to end, and a second signal must not cut that short.
    """

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopRequest:
        self._previous = signal.signal(signal.SIGTERM, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.requested:
            signal.signal(signal.SIGTERM, self._previous)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True


def heed_only_the_rank(worker: int) -> None:
    """Let only its rank end a process of a data loader by SIGTERM. Give it as ``worker_init_fn``.

    Launchers send the signal to all processes, while the rank still needs batches for the update under way. When the
    rank ends, it ends its workers by the same signal and waits for them, so it must not be ignored altogether.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    rank = os.getppid()

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
