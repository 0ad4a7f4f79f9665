"""A profile of a training step: ``python -m benchmarks.profile --ranks 2 --stage 2 --contender adamw``.

Three views of the same training, all on the first rank: steps that nobody watches, two steps under torch.profiler,
and two calls of ``engine.step()`` under cProfile, which sees the Python that torch.profiler only sees as time between
operators.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.bert import NETWORKS
from benchmarks.contenders import CONTENDERS
from benchmarks.plan import STAGES, Configuration
from benchmarks.ranks import Rank, device_type, run_on_ranks

PROFILED_STEPS = 2
TOP = 25


def measure(rank: Rank, configuration: Configuration, path: Path) -> None:
    """Train on every rank; the first one profiles and writes ``path``."""
    from torch.profiler import ProfilerActivity, profile, record_function

    from benchmarks.phases import phases, report
    from benchmarks.steps import PARTS, TIMED_STEPS, WARMUP_STEPS, StepTimer
    from benchmarks.timing import Clock, Spread
    from benchmarks.training import build

    training = build(configuration, rank)
    batches = NETWORKS[configuration.model].batches(
        configuration.accumulation, configuration.micro_batch, rank.index, rank.device
    )
    clock = Clock(rank.device)
    timer = StepTimer(training, batches, clock)
    timer.run(WARMUP_STEPS)
    seconds = timer.run(TIMED_STEPS)

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if rank.device.type == "cuda" else [])
    watch: Any = profile(activities=activities) if rank.is_first else nullcontext()
    python = cProfile.Profile()
    with watch:
        for _ in range(PROFILED_STEPS):
            for batch in batches:
                with record_function(PARTS[0]):
                    loss = training.forward(batch)
                with record_function(PARTS[1]):
                    training.backward(loss)
                with record_function(PARTS[2]):
                    training.step()
        clock.synchronize()
    for _ in range(PROFILED_STEPS):
        for batch in batches:
            training.backward(training.forward(batch))
            clock.synchronize()
            if rank.is_first:
                python.enable()
            training.step()
            python.disable()
            clock.synchronize()
    if rank.is_first:
        lines = [f"{configuration}, micro-batch {configuration.micro_batch}, {rank.count} ranks", ""]
        lines += ["A step without any profiler, milliseconds (10th to 90th percentile):"]
        for name, values in seconds.items():
            spread = Spread.of(values)
            lines.append(f"  {name:14} {spread.median * 1e3:9.2f} ({spread.p10 * 1e3:.2f} to {spread.p90 * 1e3:.2f})")
        lines += ["", f"Under torch.profiler, {PROFILED_STEPS} steps together (the profiler slows the host down):", ""]
        lines += report(phases(watch.events(), PARTS), TOP)
        lines += ["", f"engine.step() under cProfile, {PROFILED_STEPS} steps, the device idle before it:", ""]
        lines += [_python(python, order) for order in ("tottime", "cumulative")]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
    training.close()


def _python(profile: cProfile.Profile, order: str) -> str:
    text = io.StringIO()
    # strip_dirs: a path says nothing, and differs from machine to machine.
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats(order).print_stats(TOP)
    return text.getvalue().strip() + "\n"


def main(arguments: list[str]) -> int:
    """Profile one configuration and print the text."""
    parser = argparse.ArgumentParser("python -m benchmarks.profile", description="Find where a training step goes.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"), help="folder (out/benchmarks)")
    model = "large" if device_type() == "cuda" else "tiny"
    parser.add_argument("--model", choices=NETWORKS, default=model)
    parser.add_argument("--stage", type=int, choices=sorted(STAGES), default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--contender", choices=CONTENDERS, default="adamw")
    parser.add_argument("--micro-batch", type=int, help="sequences a rank, instead of the model's own")
    chosen = parser.parse_args(arguments)
    configuration = Configuration(
        chosen.model,
        chosen.stage if CONTENDERS[chosen.contender].has_stages else None,
        chosen.accumulation,
        chosen.contender,
        chosen.micro_batch or NETWORKS[chosen.model].micro_batch,
    )
    path = chosen.output / f"profile-{str(configuration).replace(', ', '-').replace(' ', '')}.txt"
    try:
        status = run_on_ranks(chosen.ranks, measure, configuration, path)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if status == 0:
        print(path.read_text())
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
