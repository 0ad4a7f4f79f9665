"""Tables and figures of the experiments: between the markers of a page of docs, and in docs/figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.pages import DOCS, replace_between
from ds_vrgd_recipes.run.plot import STYLE
from evidence.experiment import FULL, SMALL, Experiment, Row, Rows, called_for, load

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LARGE = 1e6  # from where on a value is shown by its magnitude


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Median and, in brackets, the least and the largest of several values; one that is not finite is the largest."""
    ordered = sorted(value if math.isfinite(value) else math.inf for value in values)
    median, least, largest = (_shown(of, digits) for of in (statistics.median(ordered), ordered[0], ordered[-1]))
    return median if len(values) == 1 else f"{median} ({least}–{largest})"


def _shown(value: float, digits: int) -> str:
    if value == math.inf:
        return "apart"
    return f"{value:.{digits}f}" if abs(value) < _LARGE else f"{value:.0e}"


def draw_spreads(axis: Axes, places: Sequence[float], groups: Sequence[Sequence[float]], **style: Any) -> None:
    """A line through the medians of several values at each place, with bars from the least to the largest."""
    medians = [statistics.median(values) for values in groups]
    low = [median - min(values) for median, values in zip(medians, groups, strict=True)]
    high = [max(values) - median for median, values in zip(medians, groups, strict=True)]
    axis.errorbar(places, medians, [low, high], marker="o", capsize=2, **style)


def grouped(rows: Sequence[Row], *fields: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of ``fields``, in the order in which they come up: what is left differs by seed."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[field] for field in fields), []).append(row)
    return groups


def report(name: str, folder: Path, page: Path | None = None) -> str | None:
    """Write the table of one experiment into ``page`` (None: its own) and its figure into ``figures`` beside it.

    Of the full size, where it has a row, otherwise of the small one.

    Returns:
        What was written in a line, or None if there is no row.

    Raises:
        ValueError: the page lacks the markers ``evidence NAME``.
    """
    path = folder / f"{name}.json"
    if not path.exists():
        return None
    experiment, rows = load(name), Rows(path)
    page = page or DOCS / experiment.page
    for size in (FULL, SMALL):
        settings = called_for(experiment, size, rows)
        found = rows.of(size, settings)
        if found:
            _draw(experiment, found, page.parent / "figures" / f"{name}.svg")
            lines = [f"![{experiment.title}](figures/{name}.svg)", "", *experiment.tables(found), ""]
            replace_between(page, f"evidence {name}", [*lines, *_origin(name, size, found, len(settings), rows)])
            return f"{name}: {len(found)} of {len(settings)} rows of size {size} in {page}"
    return None


def _draw(experiment: Experiment, rows: Sequence[Row], path: Path) -> None:
    import matplotlib  # only needed here, and slow to import

    matplotlib.use("svg")
    from matplotlib import pyplot

    # The same rows give the same file.
    with pyplot.rc_context({**STYLE, "svg.hashsalt": experiment.title, "svg.fonttype": "none"}):
        figure = pyplot.figure(figsize=experiment.figure_size, layout="constrained")
        experiment.draw(figure, rows)
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def _origin(name: str, size: str, found: Sequence[Row], of: int, rows: Rows) -> list[str]:
    """The command, how much of it is here, and with what it was measured."""
    lines = [f"`python -m evidence {name} --size {size}`: {len(found)} of {of} settings, "]
    lines[0] += f"{sum(row['seconds'] for row in found):.0f} s in all."
    for members in grouped(found, "environment").values():
        environment = rows.environment_of(members[0])
        versions = ", ".join(f"{key} {value}" for key, value in environment["versions"].items() if value != "none")
        count = "" if len(members) == len(found) else f"{len(members)} of them: "
        lines.append(f"{count}{environment['date']}, {environment['card']}; {versions}.")
    return lines
