"""The update of a shard on the CPU, as under optimizer offload: ``python -m benchmarks.cpu_update``.

Every contender updates the whole of a BERT as one shard of one rank, layer by layer where layers matter. DeepSpeed's
CPU Adam is compiled by g++ when it is first used.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks import compiled
from benchmarks.bert import NETWORKS
from benchmarks.pages import table
from benchmarks.shards import layers_of, shard_layout
from benchmarks.timing import Clock, Spread, repeat
from ds_vrgd.moments import Moments, Ranks, ShardLayout
from ds_vrgd.optim import OPTIMIZERS, Observer, passes
from ds_vrgd.optim.observer import Shard

CHUNKS = 8
REFERENCE = "DeepSpeedCPUAdam"


class OneShard(Observer):
    """An observer of one shard: the same moments in every step.

    Args:
        layout: of the shard.
    """

    ranks = Ranks()

    def __init__(self, layout: ShardLayout) -> None:
        self.window = 1
        self._layout = layout
        self._moments = Moments(torch.randn(layout.numel), torch.rand(layout.numel))

    def layout(self, tensor: Tensor) -> ShardLayout:
        """As given."""
        return self._layout

    def agree(self, spec: Any) -> None:
        """There is one rank."""

    def finish(self) -> int:
        """The number of chunks."""
        return CHUNKS

    def has_bad(self, tensors: Sequence[Tensor]) -> bool:
        """All are finite."""
        return False

    def moments(self, tensor: Tensor) -> Moments:
        """Random."""
        return self._moments

    def gradient(self, shard: Shard, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """The mean, as in fused mode."""
        return self._moments.total, torch.ones(())

    def unit(self, k: int) -> float:
        """The moments are those of the chunks' own losses."""
        return 1.0

    def after_step(self) -> None:
        """The next window is like this one."""
        self.window += 1


def weights_of(layout: ShardLayout) -> torch.nn.Parameter:
    """Random ones, with a gradient."""
    weights = torch.nn.Parameter(torch.randn(layout.numel))
    weights.grad = torch.randn(layout.numel)
    return weights


def deepspeed_adam(layout: ShardLayout) -> Callable[[], Any]:
    """DeepSpeed's own, vectorised by hand in C++."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    step: Callable[[], Any] = DeepSpeedCPUAdam([weights_of(layout)], lr=1e-4, adamw_mode=True).step
    return step


def torch_adam(layout: ShardLayout, **arguments: Any) -> Callable[[], Any]:
    """torch's."""
    return torch.optim.AdamW([weights_of(layout)], lr=1e-4, **arguments).step


def ours(layout: ShardLayout, name: str, **arguments: Any) -> Callable[[], Any]:
    """An optimizer of this package."""
    weights = weights_of(layout)
    optimizer = OPTIMIZERS[name]([weights], lr=1e-4, weight_decay=0.01, **arguments)
    observer = OneShard(layout)
    optimizer.observe(observer)
    weights.grad = observer._moments.total
    return optimizer.step


def whole(layout: ShardLayout, name: str) -> Callable[[], Any]:
    """Return the same without small pieces: every operation runs over a whole layer."""
    step = ours(layout, name)

    def run() -> None:
        with mock.patch.object(passes, "ELEMENTS_A_THREAD", layout.numel):
            step()

    return run


#: By name.
CONTENDERS: dict[str, Callable[[ShardLayout], Callable[[], Any]]] = {
    "torch AdamW, fused": lambda layout: torch_adam(layout, fused=True),
    "torch AdamW": torch_adam,
    "VRAdamW": lambda layout: ours(layout, "VRAdamW"),
    "VRAdamW, average in bf16": lambda layout: ours(layout, "VRAdamW", gsnr_dtype="bfloat16"),
    "VRAdamW, torch.compile": compiled.adam,
    "VRAdamW, whole layer at a time": lambda layout: whole(layout, "VRAdamW"),
    "VRLAMB": lambda layout: ours(layout, "VRLAMB"),
    "VRLAMB, torch.compile": compiled.lamb,
    "VRLAMB, whole layer at a time": lambda layout: whole(layout, "VRLAMB"),
    "LAMB": lambda layout: ours(layout, "LAMB"),
    "VRMomentum": lambda layout: ours(layout, "VRMomentum"),
    "VRLARS": lambda layout: ours(layout, "VRLARS"),
}


def main(arguments: list[str]) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser("python -m benchmarks.cpu_update", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=["base", "large"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    chosen = parser.parse_args(arguments)
    print(f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    rows = []
    spawn = multiprocessing.get_context("spawn")
    for model in chosen.models:
        for threads in chosen.threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)  # DeepSpeed's loops heed nothing else
            with ProcessPoolExecutor(1, mp_context=spawn) as process:
                rows += process.submit(measure, model, threads, chosen.contenders, chosen.repetitions).result()
    header = ["update", "million elements", "threads", "ms (10–90 %)", f"{REFERENCE} beside it", "ratio"]
    print("\n".join(table(header, rows)))
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return 0


def measure(model: str, threads: int, contenders: Sequence[str], repetitions: int) -> list[list[str]]:
    """Rows of the table, of a process with so many threads."""
    torch.set_num_threads(threads)
    layout = shard_layout(layers_of(NETWORKS[model]), 0, 1)
    reference, rows = deepspeed_adam(layout), []
    for name in contenders:
        own, beside = alternate(CONTENDERS[name](layout), reference, repetitions)
        gc.collect()
        ratio = f"{own.median / beside.median:.1f}"
        rows.append([name, f"{layout.numel / 1e6:.0f}", str(threads), milliseconds(own), milliseconds(beside), ratio])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


def alternate(own: Callable[[], Any], reference: Callable[[], Any], repetitions: int) -> tuple[Spread, Spread]:
    """Times of both, taken in turn: what else the machine does meets both."""
    clock = Clock(torch.device("cpu"))
    seconds: tuple[list[float], list[float]] = [], []
    for repetition in range(repetitions + 1):
        for function, times in zip((own, reference), seconds, strict=True):
            taken = repeat(function, clock, 1, warmup=0)
            if repetition:  # the first one makes the state
                times.extend(taken)
    return Spread.of(seconds[0]), Spread.of(seconds[1])


def processor() -> str:
    """Its name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()


def milliseconds(spread: Spread) -> str:
    """Median and percentiles."""
    return f"{spread.median * 1e3:.0f} ({spread.p10 * 1e3:.0f}–{spread.p90 * 1e3:.0f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
