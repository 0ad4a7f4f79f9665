"""One preparation of data at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from ds_vrgd.training.errors import InputError

_PATIENCE = 10.0  # seconds; the processes of a killed preparation end within one


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other preparations out of ``folder``. The lock is the system's, so that a kill ends it.

    Raises:
        InputError: another preparation holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InputError(
                        f"another process is preparing data in {folder}; wait until it has ended"
                    ) from None
                time.sleep(0.2)
        yield
    finally:
        os.close(descriptor)
