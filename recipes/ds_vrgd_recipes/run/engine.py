"""The parts of a DeepSpeed engine that training programs need, beyond its documented interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Engine = Any


def set_batch_sizes(engine: Engine, micro_batch: int, global_batch: int) -> None:
    """Give a running engine other batch sizes, at every ZeRO stage; call it between two steps.

    The engine's own counter of micro-batches continues and may be out of step with the new accumulation: set the
    boundary with ``engine.set_gradient_accumulation_boundary`` from then on.

    Args:
        engine: a DeepSpeed engine.
        micro_batch: samples of one backward pass on one rank.
        global_batch: samples of one step, a multiple of ``micro_batch`` times the data-parallel ranks.
    """
    engine.set_train_micro_batch_size(micro_batch)
    engine.set_train_batch_size(global_batch)
    # ZeRO's wrappers keep a copy, which the engine's setters do not update and CPU offload reads.
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = engine.gradient_accumulation_steps()


def trim_csv_monitor(monitor: Any, step: int) -> None:
    """Drop what an interrupted run has left in DeepSpeed's CSV files after ``step``; call it before the first event.

    The monitor only appends: a run that continues in the same folder would repeat the rows since its checkpoint, and
    the header.

    Args:
        monitor: ``engine.monitor`` of rank 0.
        step: the last one that is kept.

    Raises:
        ValueError: a file is not text.
    """
    csv = monitor.csv_monitor
    if csv is None:
        return
    for path in Path(csv.log_dir).glob("*.csv"):
        try:
            header, *rows = path.read_text(encoding="utf-8").splitlines() or [""]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is damaged: it is not text in UTF-8 ({error})") from error
        if not header:  # killed before the first row
            continue
        kept = [row for row in rows if (number := row.split(",")[0]).isdigit() and int(number) <= step]
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(f"{line}\n" for line in (header, *kept)), encoding="utf-8")
        partial.replace(path)
        csv.filenames.append(path.stem)  # those that have their header
