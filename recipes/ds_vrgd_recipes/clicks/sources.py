"""The source of prepared clicks: the ``data`` section of a run file."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.runfile import Section


class _Data(Section):
    """The settings of both sources.

    For ``hash_slots`` (of each feature; 208 bytes each while data are prepared) and ``min_count`` see
    ``clicks.vocabulary``.
    """

    hash_slots: int = Field(default=1 << 20, ge=2, le=1 << 28)
    min_count: int = Field(default=2, ge=1)


class FlightsData(_Data):
    """Flights of 2013, see ``clicks.flights``; every ``test_every``-th in order of time is in the test set."""

    source: Literal["flights"]
    test_every: int = Field(default=10, ge=2)


class FilesData(_Data):
    """Files in the Criteo format, by path; a path may be a pattern with ``*``, ``?`` and ``[...]``."""

    source: Literal["files"]
    train: list[str] = Field(min_length=1)
    test: list[str] = Field(min_length=1)
    max_bad_fraction: float = Field(default=0.001, ge=0, lt=1)
    """Fraction of a file's lines that may be left out because they do not fit the format."""

    def files(self) -> tuple[list[Path], list[Path]]:
        """Return the files of training and test set, each once, in the given order and sorted within a pattern.

        Raises:
            InputError: a pattern matches nothing, or a file is in both sets.
        """
        found = {}
        for key in ("train", "test"):
            paths: dict[Path, None] = {}
            for pattern in getattr(self, key):
                matches = [Path(match) for match in sorted(glob.glob(pattern)) if Path(match).is_file()]
                if not matches:
                    raise InputError(f"data.{key}: no file matches {pattern}; correct the path")
                paths.update(dict.fromkeys(matches))
            found[key] = list(paths)
        train, test = found["train"], found["test"]
        if both := {path.resolve() for path in train} & {path.resolve() for path in test}:
            raise InputError(f"data: {min(both)} is in train and in test; take it out of one of them")
        return train, test


Data = Annotated[FlightsData | FilesData, Field(discriminator="source")]
