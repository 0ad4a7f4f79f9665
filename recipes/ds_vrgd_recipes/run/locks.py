"""Locks that let one process at a time write a folder: the output of a run, or data that are being prepared.

The lock is the system's (filelock calls ``flock`` on a file in the folder), so the death of its holder ends it,
``kill -9`` included. NFS passes it on to the server, which keeps processes on other hosts out.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from ds_vrgd_recipes.run.errors import InputError

#: The file that is locked. It names the holder, and exists while it is held, or after its holder was killed.
LOCK = ".lock"

_PATIENCE = 10.0  # seconds; the processes of a killed run end within one, and a stopped run may still be saving
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
_held: set[tuple[int, int]] = set()  # device and inode of the lock files of this process


@contextlib.contextmanager
def locked(folder: Path, work: str) -> Iterator[None]:
    """Lock ``folder`` against every other process that would lock it; make the folder where it is missing.

    Args:
        work: what this process does there, for the message to others: "training".

    Raises:
        InputError: another process holds the lock.
        OSError: the folder cannot be written.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    directory = os.open(folder, os.O_RDONLY)  # stays the folder's when it is renamed
    lock = _lock(folder, _PATIENCE)
    try:
        try:
            lock.acquire(poll_interval=0.2)
        except Timeout as error:
            raise InputError(
                f"another process is {_holder(folder)}, in {folder}; wait until it has ended, or choose another folder"
            ) from error
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            text = f"warning: the file system of {folder} has no locks ({error.strerror}): nothing keeps other runs out"
            print(text, file=sys.stderr, flush=True)
        now = datetime.now().astimezone().isoformat(" ", "seconds")
        holder = {"work": work, "pid": os.getpid(), "host": socket.gethostname(), "since": now}
        (folder / LOCK).write_text(json.dumps(holder) + "\n", encoding="utf-8")
        own = _identity(folder)
        _held.add(own)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                os.unlink(LOCK, dir_fd=directory)
            _held.discard(own)
            lock.release()
    finally:
        os.close(directory)
        for each in made:  # unless something was written there
            with contextlib.suppress(OSError):
                each.rmdir()


@contextlib.contextmanager
def locked_output(output: Path, work: str) -> Iterator[None]:
    """Lock the folder that ``--output`` names, which must not be inside another locked folder.

    Raises:
        InputError: another process writes there or around it, or the folder cannot be written.
    """
    for around in output.resolve().parents:
        if _is_held_by_another(around):
            raise InputError(
                f"--output {output} is inside {around}, where another process is {_holder(around)}; give a folder "
                "outside of it"
            )
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(output, work))
        except FileExistsError as error:
            raise InputError(f"--output {output} is a file; give a folder") from error
        except OSError as error:
            raise InputError(f"--output {output} cannot be written ({error.strerror}); give another folder") from error
        yield


def _lock(folder: Path, patience: float) -> FileLock:
    return FileLock(folder / LOCK, timeout=patience, fallback_to_soft=False)


def _identity(folder: Path) -> tuple[int, int]:
    status = (folder / LOCK).stat()
    return status.st_dev, status.st_ino


def _is_held_by_another(folder: Path) -> bool:
    try:
        if _identity(folder) in _held:
            return False
        with _lock(folder, 0.0):
            return False
    except (Timeout, PermissionError):  # of another user's, one cannot know
        return True
    except OSError:  # there is none
        return False


def _holder(folder: Path) -> str:
    """Describe the holder that the lock's file names."""
    try:
        holder = json.loads((folder / LOCK).read_bytes())
        return "{work} (process {pid} on {host}, since {since})".format(**holder)
    except (OSError, ValueError, KeyError, TypeError):  # about to be written
        return "at work"
