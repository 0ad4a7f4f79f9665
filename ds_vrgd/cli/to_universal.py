"""``ds-vrgd to-universal``: carry a checkpoint over to another number of ranks."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from ds_vrgd.extras import need
from ds_vrgd.manifest import first_fault, has_manifest

#: The file that names who writes a folder, as the trainings of ds_vrgd_recipes leave it, too.
LOCK = ".lock"


def run(options: argparse.Namespace) -> int:
    """Convert a checkpoint. Return 2 if it cannot be carried over, and 1 if it can, but not now."""
    need("deepspeed", "deepspeed")
    from ds_vrgd.engines.deepspeed import CheckpointError, to_universal
    from ds_vrgd.engines.deepspeed.checkpoints.universal import find

    try:
        with locked(options.output):
            source = find(options.folder, options.tag)
            fault = first_fault(source) if has_manifest(source) else None
            if fault is not None:
                raise CheckpointError(f"{source} is not as it was saved: {fault}. Use another checkpoint")
            written = to_universal(
                options.folder, options.output, options.tag, client_state_of_rank_0=options.client_state_of_rank_0
            )
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, CheckpointError) else 1
    print(written)
    return 0


@contextlib.contextmanager
def locked(output: Path) -> Iterator[None]:
    """Keep other conversions out of a folder, and the trainings of ds_vrgd_recipes, which lock the same file.

    Raises:
        OSError: another process writes in the folder or around it, or it cannot be written.
    """
    for around in output.resolve().parents:
        with contextlib.suppress(FileNotFoundError, PermissionError), (around / LOCK).open(encoding="utf-8") as file:
            _lock(file, fcntl.LOCK_SH, around)
    made = [each for each in (output, *output.parents) if not each.exists()]
    output.mkdir(parents=True, exist_ok=True)
    try:
        with (output / LOCK).open("a+", encoding="utf-8") as file:
            _lock(file, fcntl.LOCK_EX, output)
            now = datetime.now().astimezone().isoformat(" ", "seconds")
            holder = {"work": "converting a checkpoint", "pid": os.getpid(), "host": socket.gethostname(), "since": now}
            (output / LOCK).write_text(json.dumps(holder), encoding="utf-8")
            try:
                yield
            finally:
                (output / LOCK).unlink(missing_ok=True)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # something was written there
                each.rmdir()


def _lock(file: IO[str], kind: int, folder: Path) -> None:
    """Lock an open file at once; where another process holds it, raise a BlockingIOError that names the holder."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = "at work"
        with contextlib.suppress(ValueError, LookupError, TypeError):  # about to be written
            holder = "{work} (process {pid} on {host}, since {since})".format(**json.load(file))
        raise BlockingIOError(
            f"another process is {holder}, in {folder}. Wait until it has ended, or give another output folder"
        ) from None
    except OSError as error:
        print(f"warning: the file system of {folder} has no locks ({error.strerror})", file=sys.stderr, flush=True)
