"""An experiment is a list of settings and a function from a setting to a row; a sweep keeps every row as it comes."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.record import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = SMALL, FULL = "small", "full"

Row = dict[str, Any]


@dataclass(frozen=True)
class Experiment:
    """What one module of this package gives, as ``EXPERIMENT``.

    Attributes:
        title: of the figure and its table.
        settings: of a size, the most telling ones first; frozen dataclasses whose fields JSON can hold. A row is known
            by them, so what changes a result is a field.
        follow_up: for a size and the rows so far, the settings that these call for: another rate, say, where the best
            so far is at the edge of those that were tried, or more seeds at the best one.
        measure: the results of one setting, by names that no field has; JSON can hold them. A run that came apart is a
            result (a loss of NaN), an exception is not: the sweep goes on, and tries the setting again next time.
        tables: Markdown lines for rows that hold the fields and the results.
        draw: the figure of the same rows.
        figure_size: in inches.
        prepare: for the settings to be measured, makes in files what their processes would each make otherwise.
        kind: of a setting; those of one kind take about as long as each other.
        page: of the documentation, which has the table.
    """

    title: str
    settings: Callable[[str], Sequence[Any]]
    measure: Callable[[Any], Row]
    tables: Callable[[Sequence[Row]], list[str]]
    draw: Callable[[Figure, Sequence[Row]], None]
    figure_size: tuple[float, float] = (9.0, 4.0)
    follow_up: Callable[[str, Sequence[Row]], Sequence[Any]] = lambda size, rows: ()
    prepare: Callable[[Sequence[Any]], None] = lambda settings: None
    kind: Callable[[Any], Hashable] = lambda setting: None
    page: str = "MEASUREMENTS.md"


def load(name: str) -> Experiment:
    """The experiment of a module."""
    experiment: Experiment = importlib.import_module(f"evidence.{name}").EXPERIMENT
    return experiment


class Rows:
    """The file of one experiment, complete after every row: ``{"environments": [...], "rows": [...]}``.

    A row holds ``size``, the setting's fields, the results, ``seconds``, and ``environment``, the place of what it was
    measured with in the other list: a sweep may go on with other code, or on another machine.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._content: dict[str, list[dict[str, Any]]] = {"environments": [], "rows": []}
        self._by_fields: dict[tuple[str, ...], dict[str, Row]] = {}
        if path.exists():
            self._content = json.loads(path.read_text())

    def add(self, row: Row, environment: dict[str, Any]) -> None:
        """Take a row and write the file."""
        environments = self._content["environments"]
        if environment not in environments:
            environments.append(environment)
        self._content["rows"].append(_as_json({**row, "environment": environments.index(environment)}))
        self._by_fields.clear()
        write_whole(self._path, self._text())

    def _text(self) -> str:
        """A line a row: json's own indentation writes every number of a list on one, in slow Python."""
        parts = (f'"{part}": [\n' + ",\n".join(map(json.dumps, of)) + "\n]" for part, of in self._content.items())
        return "{" + ",\n".join(parts) + "}\n"

    def find(self, size: str, setting: Any) -> Row | None:
        """The row of a setting, or None."""
        wanted = {"size": size, **asdict(setting)}
        names = tuple(wanted)
        if names not in self._by_fields:
            rows = [row for row in reversed(self._content["rows"]) if row.keys() >= wanted.keys()]
            self._by_fields[names] = {_key(row, names): row for row in rows}
        return self._by_fields[names].get(_key(wanted, names))

    def of(self, size: str, settings: Sequence[Any]) -> list[Row]:
        """The rows of those settings that have one."""
        return [row for row in (self.find(size, setting) for setting in settings) if row is not None]

    def environment_of(self, row: Row) -> dict[str, Any]:
        """What a row was measured with."""
        return self._content["environments"][row["environment"]]


def called_for(experiment: Experiment, size: str, rows: Rows) -> list[Any]:
    """The settings of a size, and before them those that the rows so far call for."""
    return _with_calls(experiment, size, rows)[0]


def _with_calls(experiment: Experiment, size: str, rows: Rows) -> tuple[list[Any], Sequence[Any]]:
    """As :func:`called_for`, and which of them the rows call for: also what the plan has at its end."""
    settings = list(experiment.settings(size))
    while True:
        called = experiment.follow_up(size, rows.of(size, settings))
        known = set(settings)
        more = [setting for setting in called if setting not in known]
        if not more:
            return settings, called
        settings = [*more, *settings]


def sweep(
    name: str,
    size: str,
    rows: Rows,
    environment: dict[str, Any],
    *,
    deadline: float | None = None,
    workers: int = 1,
) -> list[Any]:
    """Measure every setting of an experiment that has no row yet, and those that the new rows call for.

    Args:
        deadline: of ``time.monotonic()``. A setting begins only if the longest one of its kind would end before; the
            first of a kind, the longest of this sweep.
        workers: processes that measure, shared out to the GPUs; with 1, this one.

    Returns:
        The settings that have no row still, because they failed or time was up.
    """
    experiment, begun, done, longest = load(name), set[Any](), 0, dict[Hashable, float]()

    def missing() -> list[Any]:
        settings, called = _with_calls(experiment, size, rows)
        return [setting for setting in dict.fromkeys([*called, *settings]) if rows.find(size, setting) is None]

    def in_time(setting: Any) -> bool:
        expected = longest.get(experiment.kind(setting), max(longest.values(), default=0.0))
        return deadline is None or time.monotonic() + expected <= deadline

    if to_measure := missing():
        experiment.prepare(to_measure)
    with _pool(workers) as pool:
        running: dict[Future[tuple[Row | None, float]], Any] = {}
        while True:
            waiting = [setting for setting in missing() if setting not in begun and in_time(setting)]
            for setting in waiting[: workers - len(running)]:
                begun.add(setting)
                running[pool.submit(_measure, name, setting)] = setting
            if not running:
                return missing()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                setting, (results, seconds) = running.pop(future), future.result()
                done, kind = done + 1, experiment.kind(setting)
                longest[kind] = max(longest.get(kind, 0.0), seconds)
                print(f"{name} {done}, {seconds:.1f} s: {setting}", flush=True)
                if results is not None:
                    rows.add(_row(name, size, setting, results, seconds), environment)


def _measure(name: str, setting: Any) -> tuple[Row | None, float]:
    """The results of a setting, or None, and the seconds that it took."""
    begin = time.monotonic()
    try:
        results: Row | None = load(name).measure(setting)
    except Exception:
        results = None
        print(f"{name}: {setting} failed and has no row\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    return results, time.monotonic() - begin


def _row(name: str, size: str, setting: Any, results: Row, seconds: float) -> Row:
    fields = asdict(setting)
    if clash := (fields.keys() | {"size", "seconds", "environment"}) & results.keys():
        raise ValueError(f"{name}: {', '.join(sorted(clash))} is a field of the setting as well as a result")
    return {"size": size, **fields, **results, "seconds": round(seconds, 3)}


class _Here(Executor):
    """Measures in this process, at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def _pool(workers: int) -> Executor:
    if workers == 1:
        return _Here()
    context = get_context("spawn")  # a process with a CUDA context cannot be forked
    turns = context.SimpleQueue()
    for device in _devices(workers):
        turns.put(device)
    return ProcessPoolExecutor(workers, context, _see_one_device, (turns,))


def _devices(workers: int) -> list[str]:
    """One for each worker, as CUDA_VISIBLE_DEVICES names it; an empty name where there is no GPU."""
    numbers = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    names = numbers.split(",")
    return [names[worker % len(names)] for worker in range(workers)]


def _see_one_device(turns: SimpleQueue[str]) -> None:
    """In a worker, before it uses CUDA."""
    os.environ["CUDA_VISIBLE_DEVICES"] = turns.get()


def _key(row: Row, names: tuple[str, ...]) -> str:
    return json.dumps([row[name] for name in names])


def _as_json(fields: dict[str, Any]) -> dict[str, Any]:
    """As it comes back from a file: tuples as lists."""
    read: dict[str, Any] = json.loads(json.dumps(fields))
    return read
