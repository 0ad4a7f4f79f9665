"""The run's records on rank 0: JSON lines, and DeepSpeed's monitors; and the same records read back.

Every record has "step", the updates done. Of its other names,

- "loss" makes it the record of an update: with "lr", "..._per_second", the peak "memory_gb" of the first rank, and
  "gsnr" and "ranks" where they were measured (:func:`gsnr_record`, :func:`ranks_record`);
- "held_out_..." makes it that of an evaluation;
- "layers" makes it that of the layers at one update: lists of "gsnr" (mean raw ratio), "trace" and "signal" in the
  order of the "layer_names" that were recorded before.

Noise is logged as it was measured, update by update, so that the log of a resumed run is the log of a run that never
stopped; its reader averages.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import ds_vrgd
from ds_vrgd.noise import CONFIDENCE, DECAY, NoiseScale, NoiseScaleUnknown, RatioOfMeans, gradient_noise
from ds_vrgd_recipes.run.engine import trim_csv_monitor
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import shortened, write_text

NAME = "log.jsonl"

Record = dict[str, Any]

_HELD_OUT = "held_out_"
# Of a whole run, as a picture has columns. BERT-large has 398 layers and 11 kB per record.
_LAYER_RECORDS = 256
_OF_RANKS = ("norm", "cosine", "deviation")
_OF_RATIO = ("mean_ratio", "clamped_low", "clamped_high", "noise_low", "noise_high")


class RunLog:
    """Writes ``log.jsonl`` in the output folder and passes the same numbers to TensorBoard, W&B and CSV.

    The monitors also get the noise scale averaged over some 200 updates, with its interval. After a resume in the same
    folder the average continues from the log; in another folder it begins anew.

    Records of later updates than ``first_step``, which an interrupted run has left, are dropped from the log and the
    CSV files. TensorBoard's files only grow, so they keep them, next to the repeated updates.

    Args:
        monitored: names of an update's record that the monitors get, too.

    Raises:
        InputError: the log or a CSV file is damaged.
    """

    def __init__(self, output: Path, first_step: int, monitor: Any, monitored: Sequence[str]) -> None:
        self._path = output / NAME
        self._monitor = monitor
        self._monitored = monitored
        output.mkdir(parents=True, exist_ok=True)
        kept = [record for record in readable_log(output) if record["step"] <= first_step]
        self._noise = noise_means((record for record in kept if "noise_trace" in record.get("gsnr", {})), DECAY)
        self._layer_names = [record["layer_names"] for record in kept if "layer_names" in record][-1:]
        try:
            trim_csv_monitor(monitor, first_step)
        except ValueError as error:
            raise InputError(f"{error}; move it elsewhere, and the run continues without its rows") from error
        # No events of the engine's own: they count samples, these count updates, and W&B drops those of a smaller step.
        monitor.enabled = False
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def made(self, record: Record, engine: Any, steps: int) -> None:
        """Record the update that ``engine`` has just made, and its layers at some 256 updates of a run.

        Args:
            record: the rest of it; ``record["step"]`` counts the updates done.
            steps: all updates of the run.
        """
        measured = {"gsnr": gsnr_record(engine), "ranks": ranks_record(engine)}
        self.update({**record, **{name: of for name, of in measured.items() if of is not None}})
        self.layers(record["step"], steps, engine)

    def update(self, record: Record) -> None:
        """Record one update; ``record["step"]`` counts the updates done."""
        self._write(record)
        events = [(f"Train/{name}", record[name]) for name in self._monitored]
        measured = record.get("gsnr", {})
        events += [(f"GSNR/{name}", measured[name]) for name in _OF_RATIO if name in measured]
        ranks = record.get("ranks", {})
        for name in _OF_RANKS:
            pairs = zip(ranks.get("ranks", ()), ranks.get(name, ()), strict=True)
            events += [(f"Ranks/{name}_{rank}", value) for rank, value in pairs]
        if "noise_trace" in measured:
            count_noise(self._noise, record)
            scale = {**asdict(noise_scale_of(self._noise)), "batch": measured["batch"]}
            events += [(f"NoiseScale/{name}", value) for name, value in scale.items() if math.isfinite(value)]
        self._monitor.write_events([(name, value, record["step"]) for name, value in events])

    def layers(self, step: int, steps: int, engine: Any) -> None:
        """Record the layers of update ``step`` of ``steps``, which was just made, unless it is not its turn."""
        if (step - 1) % math.ceil(steps / _LAYER_RECORDS):
            return
        record = layers_record(engine)
        if record is None:
            return
        names = record.pop("layer_names")
        if [names] != self._layer_names:
            self._layer_names = [names]
            self._write({"step": step, "layer_names": names})
        self._write({"step": step, "layers": record})

    def evaluation(self, step: int, values: dict[str, float]) -> None:
        """Record an evaluation after ``step`` updates; the monitors get the values named ``held_out_...``."""
        self._write({"step": step, **values})
        held_out = [(name, value) for name, value in values.items() if name.startswith(_HELD_OUT)]
        self._monitor.write_events(
            [(f"HeldOut/{name.removeprefix(_HELD_OUT)}", value, step) for name, value in held_out]
        )

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def read_log(output: Path) -> list[Record]:
    """Return the records of ``log.jsonl``; none where there is no log yet.

    Raises:
        ValueError: a line is not a record.
    """
    path = output / NAME
    if not path.exists():
        return []
    *whole, _ = path.read_bytes().split(b"\n")  # a kill cut off what follows the last newline
    records = []
    for number, line in enumerate(whole, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError("it is not a record with a step")
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"line {number} holds {shortened(line)} and no JSON object of a record ({error})"
            ) from error
        records.append(record)
    return records


def readable_log(output: Path) -> list[Record]:
    """Return the records as ``read_log`` does, for a run that continues them.

    Raises:
        InputError: a line is not a record.
    """
    try:
        return read_log(output)
    except ValueError as error:
        raise InputError(
            f"{output / NAME} is damaged: {error}; move it elsewhere, and the run continues without its records"
        ) from error


def begin_log(output: Path) -> None:
    """Leave an empty log where there is none: from then on the folder is known to be the output of a run."""
    output.mkdir(parents=True, exist_ok=True)
    (output / NAME).touch()


def has_begun(output: Path) -> bool:
    """Return whether a run has begun in ``output``."""
    return (output / NAME).is_file()


def has_records(output: Path) -> bool:
    """Return whether a run in ``output`` has logged anything."""
    return has_begun(output) and (output / NAME).stat().st_size > 0


def gsnr_record(engine: Any) -> Record | None:
    """Return GSNR and noise of the last update over all layers; None if it was skipped, or without GSNR.

    ``k``, ``mean_ratio``, ``clamped_low`` and ``clamped_high`` (means over the layers, whatever their size), from k = 4
    ``noise_low`` and ``noise_high`` (both fractions for pure noise, :func:`~ds_vrgd.clamped_by_noise`), ``batch`` in
    samples, and ``noise_trace`` and ``noise_signal`` of this update alone
    (:class:`~ds_vrgd.noise.GradientNoise`), unless experts are spread over ranks.
    """
    stats = _stats(engine)
    if stats is None:
        return None
    means = {name: mean for name, mean in asdict(stats.means()).items() if mean is not None}
    record: Record = {"k": stats.k, **means, "batch": engine.train_batch_size()}
    try:
        noise = gradient_noise(engine)
    except NoiseScaleUnknown:
        return record
    trace, signal = torch.stack([noise.trace.sum(), noise.signal.sum()]).tolist()
    return record | {"noise_trace": trace, "noise_signal": signal}


def ranks_record(engine: Any) -> Record | None:
    """Return the ranks side by side at the last update, in three digits; None where nobody watches them.

    ``ranks``, their ``norm``, ``cosine`` and ``deviation`` (:meth:`ds_vrgd.RankReport.whole`), unless the update was
    skipped; the new ``events``, in words, where there are some.
    """
    recorder = getattr(getattr(engine, "basic_optimizer", None), "recorder", None)
    if recorder is None:
        return None
    record: Record = {}
    if recorder.report is not None and not _was_skipped(engine):
        columns = zip(_OF_RANKS, recorder.report.whole(), strict=True)
        rounded = {name: [float(f"{value:.3g}") for value in column] for name, column in columns}
        record = {"ranks": list(recorder.report.ranks), **rounded}
    return (record | ({"events": [str(event) for event in news]} if (news := recorder.news()) else {})) or None


def layers_record(engine: Any) -> Record | None:
    """Return the last update layer by layer in three digits, with ``layer_names``; None as for ``gsnr_record``."""
    stats = _stats(engine)
    if stats is None:
        return None
    columns = {"gsnr": [layer.mean_ratio for layer in stats.layers.values()]}
    with contextlib.suppress(NoiseScaleUnknown):
        noise = gradient_noise(engine)
        columns |= {"trace": noise.trace.tolist(), "signal": noise.signal.tolist()}
    rounded = {name: [float(f"{value:.3g}") for value in column] for name, column in columns.items()}
    return {"layer_names": list(stats.layers), **rounded}


def _stats(engine: Any) -> ds_vrgd.GSNRStatistics | None:
    if _was_skipped(engine):
        return None
    try:
        return ds_vrgd.gsnr_stats(engine)
    except (RuntimeError, TypeError):  # gamma = 1, or not an optimizer of ours
        return None


def _was_skipped(engine: Any) -> bool:
    """Return whether the last update was skipped: what was measured is that of the update before."""
    return bool(getattr(engine.optimizer, "overflow", False))


def count_noise(means: RatioOfMeans, record: Record) -> None:
    """Count the noise of one update, given its record."""
    trace, signal = (
        torch.tensor([record["gsnr"][name]], dtype=torch.float64) for name in ("noise_trace", "noise_signal")
    )
    means.add(trace, signal)


def noise_scale_of(means: RatioOfMeans) -> NoiseScale:
    """Return the noise scale over the updates that were counted."""
    value, low, high = means.intervals(CONFIDENCE)[:, 0].tolist()
    return NoiseScale(value, low, high)


def noise_means(updates: Iterable[Record], decay: float) -> RatioOfMeans:
    """Return the noise of measured updates, averaged."""
    means = RatioOfMeans(decay)
    for record in updates:
        count_noise(means, record)
    return means


def noise_scales(updates: Sequence[Record], decay: float, most: int) -> list[tuple[int, NoiseScale]]:
    """Return (step, noise scale by then) after each of at most ``most`` evenly spread measured updates."""
    means, every, found = RatioOfMeans(decay), -(-len(updates) // most), []
    for number, record in enumerate(updates, start=1):
        count_noise(means, record)
        if number % every == 0 or number == len(updates):
            found.append((record["step"], noise_scale_of(means)))
    return found


@dataclass(frozen=True)
class History:
    """The log of a run, which may still be under way.

    Attributes:
        updates: records with "loss", one per update, in their order.
        evaluations: records with values named "held_out_...".
        layers: records with "layers", each with the "layer_names" that hold for it.
    """

    updates: list[Record]
    evaluations: list[Record]
    layers: list[Record]

    @property
    def measured(self) -> list[Record]:
        """The updates whose noise was measured: not the skipped ones, and none without GSNR."""
        return [record for record in self.updates if "noise_trace" in record.get("gsnr", {})]


def read_history(output: Path) -> History:
    """Read the log in a run's output folder.

    Raises:
        InputError: there is none, it holds no update yet, or a line is not a record.
    """
    path = output / NAME
    if not path.is_file():
        raise InputError(f"{path} is missing; give the output folder of a run that has begun to train")
    try:
        records = read_log(output)
        updates = [record for record in records if "loss" in record]
        evaluations = [record for record in records if any(name.startswith(_HELD_OUT) for name in record)]
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
