"""The run's records on rank 0: one JSON line per update, and DeepSpeed's monitors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ds_vrgd
from ds_vrgd.training.files import write_text
from ds_vrgd.zero import trim_csv_monitor

_HELD_OUT = "held_out_"


class RunLog:
    """Writes ``log.jsonl`` in the output folder and passes the same numbers to TensorBoard and CSV.

    What an interrupted run has left of later updates than ``first_step`` is dropped from the log and the CSV files.
    TensorBoard's files only grow, so there it stays, beside the repeated updates.

    Args:
        monitored: names of an update's record that the monitors get, too.
    """

    def __init__(self, output: Path, first_step: int, monitor: Any, monitored: Sequence[str]) -> None:
        self._path = output / "log.jsonl"
        self._monitor = monitor
        self._monitored = monitored
        kept = [record for record in read_log(output) if record["step"] <= first_step]
        trim_csv_monitor(monitor, first_step)
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def update(self, record: dict[str, Any]) -> None:
        """Record one update; ``record["step"]`` counts the updates done."""
        self._write(record)
        events = [(f"Train/{name}", record[name], record["step"]) for name in self._monitored]
        events += [
            (f"GSNR/{name}", value, record["step"]) for name, value in record.get("gsnr", {}).items() if name != "k"
        ]
        self._monitor.write_events(events)

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


def read_log(output: Path) -> list[dict[str, Any]]:
    """Records of ``log.jsonl``; none where there is no log yet."""
    path = output / "log.jsonl"
    if not path.exists():
        return []
    *whole, _ = path.read_text(encoding="utf-8").split("\n")  # what follows the last newline was cut off by a kill
    return [json.loads(line) for line in whole]


def gsnr_record(engine: Any) -> dict[str, float] | None:
    """Means over the layers of the GSNR statistics of the last update; None for an optimizer without GSNR."""
    try:
        stats = ds_vrgd.gsnr_stats(engine)
    except (RuntimeError, TypeError):  # gamma = 1, or not an optimizer of ours
        return None
    return {"k": stats.k, **asdict(stats.means())}
