"""The pictures of a run: a dashboard, GSNR by layer, and several runs in one."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_vrgd.noise import CONFIDENCE, DECAY
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.log import History, Record, noise_scales, read_history

#: In the output folder: the dashboard, and GSNR by layer.
PICTURE, LAYERS = "training.png", "layers.png"
COLOURS = ("#2f86d6", "#e07b00", "#2a9d5c", "#d6455d", "#8f6fd1", "#8c7a45")
#: For matplotlib's ``rc_context``: transparent, in colours that can be read on white and on black.
STYLE = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#7d7d7d"),
    "legend.framealpha": 0.0,
    "axes.titleweight": "bold",
    "axes.titlesize": "medium",
    "lines.linewidth": 1.2,
    "axes.prop_cycle": f"cycler('color', {list(COLOURS)})",
}

_HELD_OUT = "held_out_"
_SPEED = "_per_second"
# Columns of pixels, more or less.
_MOST_POINTS = 500
_MOST_LABELS = 40
_MOST_RANKS = 8
#: Numbers of each rank, and what they are.
_OF_RANKS = {
    "norm": "norm of each rank's gradient, over their median",
    "cosine": "cosine of each rank's gradient with the others'",
    "deviation": "largest deviation of one element (s.d. of the others)",
}

_Panel = Callable[[Any, History], None]


def plot(output: Path, picture: Path | None = None) -> list[Path]:
    """Draw the log of a run, also of one that is still under way. What was not logged has no panel.

    Args:
        output: the run's output folder.
        picture: the dashboard, in any format that matplotlib knows by its suffix; by default ``training.png`` in the
            folder. GSNR by layer is beside it, in ``layers`` of the same format.

    Returns:
        The files.

    Raises:
        InputError: there is no log with an update, or a picture cannot be written.
    """
    history = read_history(output)
    picture = picture or output / PICTURE
    panels: list[_Panel] = [_losses, _speed, _rate]
    if history.measured:
        panels += [_noise, _clamped, _ratio]
    if any("norm" in row.get("ranks", {}) for row in history.updates):
        panels += [functools.partial(_ranks, name=name) for name in _OF_RANKS]
    rows = len(panels) // 3
    with _drawing(picture, (13, 3.4 * rows + 0.4), rows, 3) as (figure, axes):
        figure.suptitle(_title(output, history))
        for axis, draw in zip(axes.flat, panels, strict=True):
            draw(axis, history)
    if not history.layers:
        return [picture]
    layers = picture.with_name(f"{Path(LAYERS).stem}{picture.suffix}")
    names = len(history.layers[-1]["layer_names"])
    with _drawing(layers, (13, 1.5 + 0.16 * min(names, _MOST_LABELS)), 1, 1) as (figure, axis):
        _layers(axis, history)
        axis.set_title(f"GSNR by layer: {_title(output, history)}")
    return [picture, layers]


def compare(outputs: Sequence[Path], picture: Path) -> Path:
    """Draw several runs in one picture: losses, speed and noise scale, a colour for each run.

    Raises:
        InputError: a run has no log with an update, or the picture cannot be written.
    """
    histories = [read_history(output) for output in outputs]
    with _drawing(picture, (13, 7.2), 2, 2) as (figure, axes):
        training, held_out, speed, noise = axes.flat
        for number, (output, history) in enumerate(zip(outputs, histories, strict=True)):
            style = {"color": COLOURS[number % len(COLOURS)], "label": _title(output, history)}
            _line(training, history.updates, "loss", **style)
            losses = sorted({name for each in history.evaluations for name in each if _is_held_out_loss(name)})
            for name in losses[:1]:
                _line(held_out, history.evaluations, name, marker="o", **style)
                held_out.set_title(f"{_words(name)}")
            _line(speed, history.updates, _unit(history) + _SPEED, **style)
            scales = noise_scales(history.measured, DECAY, _MOST_POINTS)
            noise.plot([step for step, _ in scales], [_finite(scale.value) for _, scale in scales], **style)
        training.set_title("training loss")
        speed.set_title("examples per second")
        speed.set_ylim(bottom=0)
        noise.set_title("noise scale (examples)")
        noise.set_yscale("log")
        figure.legend(*training.get_legend_handles_labels(), loc="outside upper center", ncols=1)
    return picture


@contextlib.contextmanager
def _drawing(picture: Path, size: tuple[float, float], rows: int, columns: int) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, which share the updates; write it to ``picture`` afterwards.

    Raises:
        InputError: it cannot be written.
    """
    import matplotlib  # only needed here, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(rows, columns, sharex=True, figsize=size, layout="constrained")
        try:
            yield figure, axes
            for axis in figure.axes:
                if axis.get_subplotspec() is not None and axis.get_subplotspec().is_last_row():
                    axis.set_xlabel("update")
            figure.savefig(picture, dpi=110)
        except (OSError, ValueError) as error:
            raise InputError(f"--output {picture} cannot be written: {error}") from error
        finally:
            pyplot.close(figure)


def _title(output: Path, history: History) -> str:
    """Return the folder's name, and what is known of the run: optimizer, k, batch, ranks, ZeRO stage."""
    known = [output.resolve().name]
    saved = checkpoint.description(output)
    if saved:
        ranks = f"{saved['ranks']} rank{'s' * (saved['ranks'] > 1)}"
        known += [saved["optimizer"], ranks, f"ZeRO {saved['zero_stage']}"]
    for name in ("k", "batch"):
        values = dict.fromkeys(row["gsnr"][name] for row in history.measured)
        known += [f"{name} " + ", then ".join(f"{value:,}" for value in values)] if values else []
    return " · ".join([*known, f"{history.updates[-1]['step']:,} updates"])


def _line(axis: Any, rows: Sequence[Record], name: str, **style: Any) -> None:
    rows = [row for row in rows if name in row]
    axis.plot([row["step"] for row in rows], [row[name] for row in rows], **style)


def _losses(axis: Any, history: History) -> None:
    evaluated = {name for record in history.evaluations for name in record if name != "step"}
    losses = sorted(filter(_is_held_out_loss, evaluated))
    for name in [name.removeprefix(_HELD_OUT) for name in losses] or ["loss"]:
        key = name if name in history.updates[-1] else "loss"
        _line(axis, history.updates, key, label=f"{_words(key)}, training", linewidth=0.8)
    for name in losses:
        _line(axis, history.evaluations, name, label=f"{_words(name.removeprefix(_HELD_OUT))}, held out", marker="o")
    for name in sorted(name for name in evaluated if not name.startswith(_HELD_OUT)):
        _line(axis, history.evaluations, name, label=f"{_words(name)}, held out", linestyle="--", color="grey")
    axis.set_title("loss (nats)")
    handles = axis.get_lines()
    others = sorted(name for name in evaluated if name.startswith(_HELD_OUT) and "loss" not in name)
    if others:  # accuracies and the like
        right = axis.twinx()
        for name in others:
            label = f"{_words(name.removeprefix(_HELD_OUT))}, held out"
            _line(right, history.evaluations, name, label=label, marker="s", color=COLOURS[2])
        handles = [*handles, *right.get_lines()]
    axis.legend(handles=handles)


def _is_held_out_loss(name: str) -> bool:
    return name.startswith(_HELD_OUT) and "loss" in name


def _words(name: str) -> str:
    return name.replace("_", " ")


def _unit(history: History) -> str:
    return next((name.removesuffix(_SPEED) for name in history.updates[-1] if name.endswith(_SPEED)), "examples")


def _speed(axis: Any, history: History) -> None:
    unit = _unit(history)
    _line(axis, history.updates, unit + _SPEED, linewidth=0.8)
    axis.set_ylim(bottom=0)
    axis.set_title(f"{unit} per second")


def _rate(axis: Any, history: History) -> None:
    _line(axis, history.updates, "lr")
    axis.set_title("learning rate")


def _noise(axis: Any, history: History) -> None:
    found = noise_scales(history.measured, DECAY, _MOST_POINTS)
    steps = [step for step, _ in found]
    values = [_finite(scale.value) for _, scale in found]
    batches = [row["gsnr"]["batch"] for row in history.measured]
    axis.set_yscale("log")
    axis.plot(steps, values, color=COLOURS[0], label=f"mean over some {2 / (1 - DECAY):.0f} updates")
    shown = [value for value in [*values, *batches] if value > 0]
    least, most = min(shown, default=1.0) / 4.0, max(shown, default=1.0) * 4.0
    # An end that is not known lies beyond the picture.
    low = [min(max(scale.low, least), most) for _, scale in found]
    high = [min(max(scale.high, least), most) for _, scale in found]
    axis.fill_between(steps, low, high, alpha=0.25, color=COLOURS[0], linewidth=0, label=f"{CONFIDENCE:.0%} interval")
    _line(axis, _of_gsnr(history), "batch", color=COLOURS[3], linestyle="--", label="global batch")
    axis.set_ylim(least, most)
    axis.set_title("noise scale (samples)")
    axis.legend()


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def _clamped(axis: Any, history: History) -> None:
    rows = _of_gsnr(history)
    for colour, (end, label) in zip(COLOURS, (("low", "to gamma"), ("high", "to 1")), strict=False):
        _line(axis, rows, f"clamped_{end}", color=colour, label=label)
        if any(f"noise_{end}" in row for row in rows):  # not up to k = 3, nor in older logs
            _line(axis, rows, f"noise_{end}", color=colour, linestyle="--", label=f"{label}, pure noise")
    axis.set_ylim(0, 1)
    axis.set_title("fraction of elements that is clamped")
    axis.legend()


def _ratio(axis: Any, history: History) -> None:
    _line(axis, _of_gsnr(history), "mean_ratio")
    axis.set_yscale("log")  # spans orders of magnitude
    axis.set_title("mean raw GSNR")


def _ranks(axis: Any, history: History, name: str) -> None:
    """Draw a number of every rank, and mark the updates at which one was named."""
    rows = [{"step": row["step"], **row["ranks"]} for row in history.updates if "ranks" in row]
    measured = [row for row in rows if name in row]  # skipped updates have events alone
    columns = {rank: place for place, rank in enumerate(measured[-1]["ranks"])}
    for rank, place in columns.items():
        values = [{"step": row["step"], name: row[name][place]} for row in measured if len(row[name]) > place]
        _line(axis, values, name, color=COLOURS[place % len(COLOURS)], linewidth=0.8, label=f"rank {rank}")
    for row in rows:
        if "events" in row:
            axis.axvline(row["step"], color="red", linewidth=0.8, linestyle=":")
    axis.set_title(_OF_RANKS[name])
    if len(columns) <= _MOST_RANKS:
        axis.legend(fontsize=7)


def _of_gsnr(history: History) -> list[Record]:
    return [{**row["gsnr"], "step": row["step"]} for row in history.measured]


def _layers(axis: Any, history: History) -> None:
    """Draw the layers of the newest record, the first of them on top."""
    from matplotlib.colors import LogNorm

    names = history.layers[-1]["layer_names"]
    columns = []
    for record in history.layers:
        of = dict(zip(record["layer_names"], record["layers"]["gsnr"], strict=True))
        columns.append([of.get(name) or math.nan for name in names])
    known = sorted(value for column in columns for value in column if value > 0)
    steps = [record["step"] for record in history.layers]
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    # A few extreme values would leave one colour for all others.
    ends = [known[round(share * (len(known) - 1))] for share in (0.05, 0.95)] if known else []
    mesh = axis.pcolormesh(
        [*steps, steps[-1] + width],
        range(len(names) + 1),
        list(zip(*columns, strict=True)),
        norm=LogNorm(ends[0], ends[1]) if ends and ends[0] < ends[1] else None,
        cmap="viridis",
        rasterized=True,
    )
    axis.figure.colorbar(mesh, ax=axis, label="mean raw GSNR", extend="both")
    every = -(-len(names) // _MOST_LABELS)
    axis.set_yticks([row + 0.5 for row in range(0, len(names), every)], names[::every], fontsize=8)
    axis.invert_yaxis()
    if every > 1:
        axis.set_ylabel(f"one layer in {every} is named")
