"""The picture of a pre-training run, drawn at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_vrgd.training.log import read_log

#: What the monitors get of an update's record.
MONITORED = ("loss", "masked_lm_loss", "next_sentence_loss", "lr", "sequences_per_second")


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
