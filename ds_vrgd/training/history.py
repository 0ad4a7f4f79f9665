"""What a run has logged, by kinds of records, and its noise scale as it was after any update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_vrgd.meter import NoiseScale, RatioOfMeans
from ds_vrgd.training.errors import InputError
from ds_vrgd.training.log import NAME, Record, count_noise, noise_scale_of, read_log


@dataclass(frozen=True)
class History:
    """The log of a run, which may still be going on.

    Attributes:
        updates: records with "loss", one an update, in their order.
        evaluations: those with values named "held_out_...".
        layers: those with "layers", each with the "layer_names" that hold for it.
    """

    updates: list[Record]
    evaluations: list[Record]
    layers: list[Record]

    @property
    def measured(self) -> list[Record]:
        """The updates whose noise was measured: not those that were skipped, none without GSNR."""
        return [record for record in self.updates if "noise_trace" in record.get("gsnr", {})]


def read_history(output: Path) -> History:
    """Read the log in a run's output folder.

    Raises:
        InputError: there is none, it holds no update yet, or a line of it is no record.
    """
    path = output / NAME
    if not path.is_file():
        raise InputError(f"{path} is missing; give the output folder of a run that has begun to train")
    try:
        records = read_log(output)
        updates = [record for record in records if "loss" in record]
        evaluations = [record for record in records if any(name.startswith("held_out_") for name in record)]
        layers: list[Record] = []
        names: list[str] = []
        for record in records:
            names = record.get("layer_names", names)
            if "layers" in record:
                layers.append({**record, "layer_names": names})
    except (ValueError, AttributeError, TypeError, OSError) as error:
        raise InputError(f"{path} is not the log of a run: {error}") from error
    if not updates:
        raise InputError(f"{path} holds no update yet; try again when the run has made some")
    return History(updates, evaluations, layers)


def noise_means(updates: Iterable[Record], decay: float) -> RatioOfMeans:
    """The noise of measured updates, averaged."""
    means = RatioOfMeans(decay)
    for record in updates:
        count_noise(means, record)
    return means


def noise_scales(updates: Sequence[Record], decay: float, most: int) -> list[tuple[int, NoiseScale]]:
    """The noise scale after each of at most ``most`` evenly spread measured updates: (step, what was known by then)."""
    means, every, found = RatioOfMeans(decay), -(-len(updates) // most), []
    for number, record in enumerate(updates, start=1):
        count_noise(means, record)
        if number % every == 0 or number == len(updates):
            found.append((record["step"], noise_scale_of(means)))
    return found
