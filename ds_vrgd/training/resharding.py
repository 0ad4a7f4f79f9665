"""Going on with another number of ranks: a checkpoint's shards put together and cut anew.

The global batch stays, and the order of the data, the masks and the dropout depend on the place in the global batch
alone, so the run goes on where it was; only the order of sums differs.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ds_vrgd.training.checkpoint import CONVERTED, Resumption
from ds_vrgd.training.errors import InputError, TrainingFailed
from ds_vrgd.training.ranks import Ranks
from ds_vrgd.zero import CheckpointError, to_universal


@contextlib.contextmanager
def fitting(resumption: Resumption, ranks: Ranks, output: Path, config: dict[str, Any]) -> Iterator[Resumption]:
    """The checkpoint for this number of ranks, to be loaded by an engine with ``config``. Collective.

    Where the shards are another number's they are converted into ``output``, as much disk as the checkpoint takes,
    until the block is left; ``config`` then tells DeepSpeed what it is to load.

    Raises:
        InputError: the checkpoint cannot be converted.
        TrainingFailed: the conversion cannot be written.
    """
    converted = resumption.saved_ranks != ranks.size and resumption.is_sharded
    config["checkpoint"] = {**config.get("checkpoint", {}), "load_universal": converted}
    if not converted:
        yield resumption
        return
    folder = output / CONVERTED
    ranks.on_rank_zero(lambda: _convert(resumption, folder, ranks.size))
    yield replace(resumption, folder=folder)
    ranks.on_rank_zero(lambda: shutil.rmtree(folder))


def _convert(resumption: Resumption, folder: Path, size: int) -> None:
    tqdm.write(f"checkpoint: {resumption.tag} was saved by {resumption.saved_ranks} ranks, cut anew for {size}")
    try:
        to_universal(resumption.folder, folder, resumption.tag)
    except CheckpointError as error:
        raise InputError(f"--resume {resumption.folder / resumption.tag} with {size} ranks: {error}") from error
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise TrainingFailed(
            f"checkpoint {resumption.folder / resumption.tag} could not be cut anew for {size} ranks: {error}; that "
            f"takes as much room in {folder} as the checkpoint: free it, or resume with {resumption.saved_ranks} ranks"
        ) from error
