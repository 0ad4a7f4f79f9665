"""The run's records on rank 0: one JSON line per update, DeepSpeed's monitors, a picture at the end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ds_vrgd
from ds_vrgd.bert.files import write_text
from ds_vrgd.zero import trim_csv_monitor


class RunLog:
    """Writes ``log.jsonl`` in the output folder and passes the same numbers to TensorBoard and CSV.

    What an interrupted run has left of later updates than ``first_step`` is dropped from the log and the CSV files.
    TensorBoard's files only grow, so there it stays, beside the repeated updates.
    """

    def __init__(self, output: Path, first_step: int, monitor: Any) -> None:
        self._path = output / "log.jsonl"
        self._monitor = monitor
        kept = [record for record in read_log(output) if record["step"] <= first_step]
        trim_csv_monitor(monitor, first_step)
        write_text(self._path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def update(self, record: dict[str, Any]) -> None:
        """Record one update; ``record["step"]`` counts the updates done."""
        self._write(record)
        events = [
            (f"Train/{name}", record[name], record["step"])
            for name in ("loss", "masked_lm_loss", "next_sentence_loss", "lr", "sequences_per_second")
        ]
        events += [
            (f"GSNR/{name}", value, record["step"]) for name, value in record.get("gsnr", {}).items() if name != "k"
        ]
        self._monitor.write_events(events)

    def evaluation(self, step: int, loss: float, unigram_entropy: float) -> None:
        """Record a held-out evaluation after ``step`` updates."""
        self._write({"step": step, "held_out_masked_lm_loss": loss, "unigram_entropy": unigram_entropy})
        self._monitor.write_events([("HeldOut/masked_lm_loss", loss, step)])

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


def plot(output: Path) -> Path:
    """Draw loss, learning rate and GSNR over the updates into ``training.png``."""
    import matplotlib  # only needed here, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_log(output)
    updates = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "held_out_masked_lm_loss" in record]
    with_gsnr = [record for record in updates if "gsnr" in record]
    figure, axes = pyplot.subplots(3, sharex=True, figsize=(8, 9), layout="constrained")

    def line(axis: Any, rows: list[dict[str, Any]], values: list[float], **style: Any) -> None:
        axis.plot([row["step"] for row in rows], values, **style)

    line(axes[0], updates, [row["masked_lm_loss"] for row in updates], label="masked LM, training", linewidth=0.8)
    held_out = [row["held_out_masked_lm_loss"] for row in evaluations]
    line(axes[0], evaluations, held_out, label="masked LM, held out", marker="o")
    entropies = [row["unigram_entropy"] for row in evaluations]
    line(axes[0], evaluations, entropies, label="unigram entropy, held out", linestyle="--", color="grey")
    axes[0].set_ylabel("nats per token")
    line(axes[1], updates, [row["lr"] for row in updates])
    axes[1].set_ylabel("learning rate")
    for name, label in (("clamped_low", "clamped to gamma"), ("clamped_high", "clamped to 1")):
        line(axes[2], with_gsnr, [row["gsnr"][name] for row in with_gsnr], label=label)
    axes[2].set_ylabel("fraction of elements")
    axes[2].set_ylim(0, 1)
    ratio = axes[2].twinx()
    line(ratio, with_gsnr, [row["gsnr"]["mean_ratio"] for row in with_gsnr], label="mean GSNR", color="black")
    ratio.set_ylabel("mean raw GSNR")
    if with_gsnr:  # spans orders of magnitude
        ratio.set_yscale("log")
    axes[2].set_xlabel("update")
    axes[0].legend()
    if with_gsnr:
        axes[2].legend(handles=axes[2].get_lines() + ratio.get_lines())
    path = output / "training.png"
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
