"""The run's records on rank 0: JSON lines, and DeepSpeed's monitors.

Every record has "step", the updates done. Of its other names,

- "loss" makes it the record of an update: with "lr", and with "gsnr" where it was measured (:func:`gsnr_record`);
- "held_out_..." that of an evaluation;
- "layers" that of the layers at one update, lists of "gsnr" (mean raw ratio), "trace" and "signal" in the order of the
  "layer_names" that were recorded before.

Noise is logged as it was measured, update by update, so that a log that was continued is the log of a run that never
stopped; who reads it averages.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import ds_vrgd
from ds_vrgd.meter import CONFIDENCE, DECAY, NoiseScale, RatioOfMeans
from ds_vrgd.statistics import NoiseScaleUnknown, gradient_noise
from ds_vrgd.training.files import write_text
from ds_vrgd.zero import trim_csv_monitor

NAME = "log.jsonl"

Record = dict[str, Any]

_HELD_OUT = "held_out_"
# Of a whole run, as a picture has columns. BERT-large has 398 layers and 11 kB a record.
_LAYER_RECORDS = 256
_OF_RATIO = ("mean_ratio", "clamped_low", "clamped_high")


class RunLog:
    """Writes ``log.jsonl`` in the output folder and passes the same numbers to TensorBoard, W&B and CSV.

    The monitors also get the noise scale averaged over some 200 updates, with its interval. After a resume in the same
    folder it goes on from what the log holds; in another one it begins anew.

    What an interrupted run has left of later updates than ``first_step`` is dropped from the log and the CSV files.
    TensorBoard's files only grow, so there it stays, beside the repeated updates.

    Args:
        monitored: names of an update's record that the monitors get, too.
    """

    def __init__(self, output: Path, first_step: int, monitor: Any, monitored: Sequence[str]) -> None:
        self._path = output / NAME
        self._monitor = monitor
        self._monitored = monitored
        output.mkdir(parents=True, exist_ok=True)
        kept = [record for record in read_log(output) if record["step"] <= first_step]
        self._noise = RatioOfMeans(DECAY)
        for record in kept:
            if "noise_trace" in record.get("gsnr", {}):
                count_noise(self._noise, record)
        self._layer_names = [record["layer_names"] for record in kept if "layer_names" in record][-1:]
        trim_csv_monitor(monitor, first_step)
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def made(self, record: Record, engine: Any, steps: int) -> None:
        """Record the update that ``engine`` has just made, with what was measured in it; its layers, too, now and then.

        Args:
            record: the rest of it; ``record["step"]`` counts the updates done.
            engine: what has made it.
            steps: all updates of the run.
        """
        gsnr = gsnr_record(engine)
        self.update(record if gsnr is None else {**record, "gsnr": gsnr})
        self.layers(record["step"], steps, engine)

    def update(self, record: Record) -> None:
        """Record one update; ``record["step"]`` counts the updates done."""
        self._write(record)
        events = [(f"Train/{name}", record[name]) for name in self._monitored]
        measured = record.get("gsnr", {})
        events += [(f"GSNR/{name}", measured[name]) for name in _OF_RATIO if name in measured]
        if "noise_trace" in measured:
            count_noise(self._noise, record)
            scale = {**asdict(noise_scale_of(self._noise)), "batch": measured["batch"]}
            events += [(f"NoiseScale/{name}", value) for name, value in scale.items() if math.isfinite(value)]
        self._monitor.write_events([(name, value, record["step"]) for name, value in events])

    def layers(self, step: int, steps: int, engine: Any) -> None:
        """Record the layers of the update that was just made, at some 256 updates of a run.

        Args:
            step: the updates done.
            steps: all updates of the run.
            engine: what has made it.
        """
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
        self._monitor.write_events(
            [
                (f"HeldOut/{name.removeprefix(_HELD_OUT)}", value, step)
                for name, value in values.items()
                if name.startswith(_HELD_OUT)
            ]
        )

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


def read_log(output: Path) -> list[Record]:
    """Records of ``log.jsonl``; none where there is no log yet."""
    path = output / NAME
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline was cut off by a kill
    return [json.loads(line) for line in whole]


def gsnr_record(engine: Any) -> Record | None:
    """GSNR and noise of the last update, over all layers; None if it was skipped, or for an optimizer without GSNR.

    ``k``, ``mean_ratio``, ``clamped_low`` and ``clamped_high`` (means over the layers, whatever their size), ``batch``
    in samples, and ``noise_trace`` and ``noise_signal``, of this update alone
    (:class:`~ds_vrgd.statistics.GradientNoise`), unless experts are spread over ranks.
    """
    stats = _stats(engine)
    if stats is None:
        return None
    record: Record = {"k": stats.k, **asdict(stats.means()), "batch": engine.train_batch_size()}
    try:
        noise = gradient_noise(engine)
    except NoiseScaleUnknown:
        return record
    trace, signal = torch.stack([noise.trace.sum(), noise.signal.sum()]).tolist()
    return record | {"noise_trace": trace, "noise_signal": signal}


def layers_record(engine: Any) -> Record | None:
    """The last update layer by layer, in three digits, with ``layer_names``; None where there is nothing to record."""
    stats = _stats(engine)
    if stats is None:
        return None
    columns = {"gsnr": [layer.mean_ratio for layer in stats.layers.values()]}
    with contextlib.suppress(NoiseScaleUnknown):
        noise = gradient_noise(engine)
        columns |= {"trace": noise.trace.tolist(), "signal": noise.signal.tolist()}
    rounded = {name: [float(f"{value:.3g}") for value in column] for name, column in columns.items()}
    return {"layer_names": list(stats.layers), **rounded}


def count_noise(means: RatioOfMeans, record: Record) -> None:
    """Count the noise of one update, as its record has it."""
    trace, signal = (
        torch.tensor([record["gsnr"][name]], dtype=torch.float64) for name in ("noise_trace", "noise_signal")
    )
    means.add(trace, signal)


def noise_scale_of(means: RatioOfMeans) -> NoiseScale:
    """The noise scale over the updates that were counted."""
    value, low, high = means.intervals(CONFIDENCE)[:, 0].tolist()
    return NoiseScale(value, low, high)


def _stats(engine: Any) -> ds_vrgd.GSNRStatistics | None:
    if getattr(engine.optimizer, "overflow", False):  # what is there is of the update before
        return None
    try:
        return ds_vrgd.gsnr_stats(engine)
    except (RuntimeError, TypeError):  # gamma = 1, or not an optimizer of ours
        return None
