"""The picture of a run: losses, learning rate, noise scale, what was clamped, and GSNR by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ds_vrgd.meter import CONFIDENCE, DECAY
from ds_vrgd.training.errors import InputError
from ds_vrgd.training.history import History, noise_scales, read_history
from ds_vrgd.training.log import Record

#: In the output folder.
PICTURE = "training.png"

_HELD_OUT = "held_out_"
# Columns of pixels, more or less.
_MOST_POINTS = 500
_MOST_LABELS = 40


def plot(output: Path, picture: Path | None = None) -> Path:
    """Draw the log of a run, also of one that is still going on; what was not logged has no panel.

    Args:
        output: the run's output folder.
        picture: file to write, of any format that matplotlib knows by its suffix; ``training.png`` in the folder unless
            given.

    Returns:
        The file.

    Raises:
        InputError: there is no log with an update, or the picture cannot be written.
    """
    history = read_history(output)
    picture = picture or output / PICTURE
    import matplotlib  # only needed here, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels: list[tuple[float, Callable[[Any, History], None]]] = [(1.0, _losses), (0.7, _rate)]
    if history.measured:
        panels += [(1.0, _noise), (1.0, _clamped)]
    if history.layers:
        panels.append((1.2 + 0.06 * min(len(history.layers[-1]["layer_names"]), _MOST_LABELS), _layers))
    heights = [height for height, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), sharex=True, figsize=(9, 2.6 * sum(heights)), height_ratios=heights, layout="constrained"
    )
    for axis, (_, draw) in zip(axes, panels, strict=True):
        draw(axis, history)
    axes[-1].set_xlabel("update")
    try:
        figure.savefig(picture, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"--output {picture} cannot be written: {error}") from error
    finally:
        pyplot.close(figure)
    return picture


def _line(axis: Any, rows: Sequence[Record], values: Sequence[float], **style: Any) -> None:
    axis.plot([row["step"] for row in rows], values, **style)


def _losses(axis: Any, history: History) -> None:
    evaluated = {name for record in history.evaluations for name in record if name != "step"}
    losses = sorted(name for name in evaluated if name.startswith(_HELD_OUT) and "loss" in name)
    trained = [name.removeprefix(_HELD_OUT) for name in losses] or ["loss"]
    for name in trained:
        key = name if name in history.updates[-1] else "loss"
        rows = [record for record in history.updates if key in record]
        _line(axis, rows, [row[key] for row in rows], label=f"{_words(key)}, training", linewidth=0.8)
    for name in losses:
        _evaluated(axis, history, name, f"{_words(name.removeprefix(_HELD_OUT))}, held out", marker="o")
    for name in sorted(name for name in evaluated if not name.startswith(_HELD_OUT)):
        _evaluated(axis, history, name, f"{_words(name)}, held out", linestyle="--", color="grey")
    axis.set_ylabel("loss (nats)")
    handles = axis.get_lines()
    others = sorted(name for name in evaluated if name.startswith(_HELD_OUT) and "loss" not in name)
    if others:  # accuracies and the like
        right = axis.twinx()
        for name in others:
            _evaluated(
                right, history, name, f"{_words(name.removeprefix(_HELD_OUT))}, held out", marker="s", color="C2"
            )
        right.set_ylabel("held out")
        handles = [*handles, *right.get_lines()]
    axis.legend(handles=handles)


def _evaluated(axis: Any, history: History, name: str, label: str, **style: Any) -> None:
    rows = [record for record in history.evaluations if name in record]
    _line(axis, rows, [row[name] for row in rows], label=label, **style)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _rate(axis: Any, history: History) -> None:
    _line(axis, history.updates, [row["lr"] for row in history.updates])
    axis.set_ylabel("learning rate")


def _noise(axis: Any, history: History) -> None:
    found = noise_scales(history.measured, DECAY, _MOST_POINTS)
    steps = [step for step, _ in found]
    values = [scale.value if math.isfinite(scale.value) else math.nan for _, scale in found]
    batches = [row["gsnr"]["batch"] for row in history.measured]
    axis.set_yscale("log")
    axis.plot(steps, values, color="C0", label=f"noise scale, mean over some {2 / (1 - DECAY):.0f} updates")
    shown = [value for value in [*values, *batches] if value > 0]
    least, most = min(shown, default=1.0) / 4.0, max(shown, default=1.0) * 4.0
    # An end that is not known lies beyond the picture.
    low = [min(max(scale.low, least), most) for _, scale in found]
    high = [min(max(scale.high, least), most) for _, scale in found]
    axis.fill_between(steps, low, high, alpha=0.25, color="C0", linewidth=0, label=f"{CONFIDENCE:.0%} interval")
    _line(axis, history.measured, batches, color="C3", linestyle="--", label="global batch")
    axis.set_ylim(least, most)
    axis.set_ylabel("samples")
    axis.legend()


def _clamped(axis: Any, history: History) -> None:
    rows = history.measured
    for name, label in (("clamped_low", "clamped to gamma"), ("clamped_high", "clamped to 1")):
        _line(axis, rows, [row["gsnr"][name] for row in rows], label=label)
    axis.set_ylabel("fraction of elements")
    axis.set_ylim(0, 1)
    ratio = axis.twinx()
    _line(ratio, rows, [row["gsnr"]["mean_ratio"] for row in rows], label="mean GSNR", color="black", linewidth=0.8)
    ratio.set_ylabel("mean raw GSNR")
    ratio.set_yscale("log")  # spans orders of magnitude
    axis.legend(handles=[*axis.get_lines(), *ratio.get_lines()])


def _layers(axis: Any, history: History) -> None:
    """Of the layers that the newest record has, the first of them on top."""
    from matplotlib.colors import LogNorm

    names = history.layers[-1]["layer_names"]
    columns = []
    for record in history.layers:
        of = dict(zip(record["layer_names"], record["layers"]["gsnr"], strict=True))
        columns.append([of.get(name) or math.nan for name in names])
    known = [value for column in columns for value in column if value > 0]
    steps = [record["step"] for record in history.layers]
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    mesh = axis.pcolormesh(
        [*steps, steps[-1] + width],
        range(len(names) + 1),
        list(zip(*columns, strict=True)),
        norm=LogNorm(min(known), max(known)) if known else None,
        cmap="viridis",
        rasterized=True,
    )
    axis.figure.colorbar(mesh, ax=axis, label="mean raw GSNR of the layer")
    every = -(-len(names) // _MOST_LABELS)
    axis.set_yticks([place + 0.5 for place in range(0, len(names), every)], names[::every], fontsize=5)
    axis.invert_yaxis()
    axis.set_ylabel("layer" if every == 1 else f"layer (one in {every} is named)")
