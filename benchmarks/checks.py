"""The cost of the checks of every window, and of watching the ranks: ``python -m benchmarks.checks --ranks 2``.

One engine takes its steps in blocks, with ``--parts`` and without them in turns, so that neither has the warmer card.
Without "checks" nobody looks for edited gradients, for hooks on accumulated gradients, or for gradients that are no
part of the chunk. With "watch" the ranks are compared as with ``watch="log"``, also where they are fewer than four. The
ratio of a pair of blocks is that of their median steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest import mock

import torch

from benchmarks.bert import NETWORKS
from benchmarks.command import command_line
from benchmarks.contenders import CONTENDERS
from benchmarks.plan import Configuration
from benchmarks.ranks import Rank, run_on_ranks
from benchmarks.record import environment
from benchmarks.steps import WARMUP_STEPS, StepTimer
from benchmarks.timing import Clock, Spread
from benchmarks.training import build, free, release, storages
from ds_vrgd.engines.deepspeed.chunks import Chunks
from ds_vrgd.engines.deepspeed.edited import EditDetector, FusedEdits
from ds_vrgd.moments import Comparison
from ds_vrgd.optim.ranks.recorder import RankRecorder
from ds_vrgd.optim.ranks.watch import RankWatch

STEPS = 3
RESAMPLES = 10_000


@contextmanager
def without_checks() -> Iterator[None]:
    """Compare every gradient as if it were a part of a chunk, and the held gradient as if it had been measured."""

    def came(self: Chunks, param: torch.Tensor) -> bool:
        self.is_open = True
        return True

    with (
        mock.patch.object(Chunks, "came", came),
        mock.patch.object(FusedEdits, "come_last", return_value=None),
        mock.patch.object(FusedEdits, "add_to_sums", return_value=None),
        mock.patch.object(EditDetector, "find", return_value=[]),
    ):
        yield


@contextmanager
def without_watch() -> Iterator[None]:
    """Compare no ranks."""
    with (
        mock.patch.object(Comparison, "add", return_value=None),
        mock.patch.object(RankRecorder, "take", return_value=None),
        mock.patch.object(RankRecorder, "judge", return_value=None),
    ):
        yield


WITHOUT: dict[str, Callable[[], AbstractContextManager[None]]] = {"checks": without_checks, "watch": without_watch}


@contextmanager
def watched(contender: str) -> Iterator[None]:
    """Have a contender watch its ranks, whatever their number."""
    optimizer = CONTENDERS[contender].optimizer
    assert optimizer is not None, f"{contender} has no JSON"
    params = {**optimizer["params"], "watch": "log"}
    watching = replace(CONTENDERS[contender], optimizer={**optimizer, "params": params})
    with mock.patch.dict(CONTENDERS, {contender: watching}), mock.patch.object(RankWatch, "fewest", 2):
        yield


def interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % interval of the ratios' median, by resampling."""
    drawn = torch.randint(len(ratios), (RESAMPLES, len(ratios)), generator=torch.Generator().manual_seed(0))
    medians = torch.tensor(ratios, dtype=torch.float64)[drawn].quantile(0.5, dim=1)
    low, high = medians.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def measure(configuration: Configuration, rank: Rank, pairs: int, parts: Sequence[str]) -> dict[str, object]:
    """Time pairs of blocks of one configuration, with and without ``parts``; a collective of all ranks."""
    with watched(configuration.contender) if "watch" in parts else nullcontext():
        return _measure(configuration, rank, pairs, parts)


def _measure(configuration: Configuration, rank: Rank, pairs: int, parts: Sequence[str]) -> dict[str, object]:
    kept = set(storages())
    training = build(configuration, rank)
    batches = NETWORKS[configuration.model].batches(
        configuration.accumulation, configuration.micro_batch, rank.index, rank.device
    )
    timer = StepTimer(training, batches, Clock(rank.device))
    timer.run(WARMUP_STEPS)
    with_checks: list[float] = []
    without: list[float] = []
    for pair in range(pairs):
        for checked in (True, False) if pair % 2 else (False, True):
            if checked:
                with_checks.append(median(rank.slowest(timer.run(STEPS)["total"])))
            else:
                with ExitStack() as stack:
                    for part in parts:
                        stack.enter_context(WITHOUT[part]())
                    without.append(median(rank.slowest(timer.run(STEPS)["total"])))
    training.close()
    del training, timer
    free(rank.device)
    release(kept)
    ratios = [one / other for one, other in zip(with_checks, without, strict=True)]
    return {
        "configuration": str(configuration),
        "parts": list(parts),
        "with": Spread.of(with_checks).to_json(),
        "without": Spread.of(without).to_json(),
        "ratio": median(ratios),
        "interval": interval(ratios),
        "pairs": pairs,
    }


def run(rank: Rank, chosen: argparse.Namespace, command: str) -> None:
    """Measure every configuration on this rank, with the others."""
    rows = []
    for stage in chosen.stages:
        for accumulation in chosen.accumulations:
            for contender in chosen.contenders:
                micro_batch = NETWORKS[chosen.model].micro_batch
                configuration = Configuration(chosen.model, stage, accumulation, contender, micro_batch)
                row = measure(configuration, rank, chosen.pairs, chosen.parts)
                rows.append(row)
                low, high = row["interval"]  # type: ignore[misc]
                rank.log(
                    f"{configuration}: {row['with']['median'] * 1e3:.2f} ms with, "  # type: ignore[index]
                    f"{row['without']['median'] * 1e3:.2f} without; "  # type: ignore[index]
                    f"ratio {row['ratio']:.4f} ({low:.4f} to {high:.4f})"
                )
    if rank.is_first:
        chosen.output.mkdir(parents=True, exist_ok=True)
        found = {"environment": environment(command, rank.count, rank.device), "checks": rows}
        (chosen.output / "checks.json").write_text(json.dumps(found, indent=1))


def main(arguments: list[str]) -> int:
    """Measure, and write ``checks.json``."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser("python -m benchmarks.checks", description=__doc__)
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--model", choices=NETWORKS, default="large" if gpus else "tiny")
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 2, 3), default=[1, 2])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--contenders", nargs="+", default=["vrlamb-fused"])
    parser.add_argument("--parts", nargs="+", choices=WITHOUT, default=["checks"], help="what is switched off in turns")
    parser.add_argument("--pairs", type=int, default=60, help="of blocks of 3 steps")
    chosen = parser.parse_args(arguments)
    return run_on_ranks(chosen.ranks, run, chosen, command_line(arguments, "benchmarks.checks"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
