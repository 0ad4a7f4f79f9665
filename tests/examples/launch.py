"""Run an example as its first lines say, on CPU ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300


def run_example(name: str, ranks: int = 2) -> str:
    """Return the output of ``examples/<name>.py`` under DeepSpeed's launcher, or by itself with ``ranks=1``."""
    command = [sys.executable]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command += ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", port]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, f"examples/{name}.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    # Seen once in some twenty runs: gloo aborts the exit of a rank that has done and printed everything.
    aborted = "terminate called without an active exception" in run.stderr
    assert run.returncode == 0 or aborted, run.stdout + run.stderr
    return run.stdout


def run_by_torchrun(*program: str) -> str:
    """Return the output of a program, with its arguments, under torchrun on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = subprocess.run(
        [*command, *program],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def losses(printed: str) -> tuple[float, float]:
    """Return the loss at the end, and that of byte frequencies alone: every example prints both."""
    found = re.search(r"loss (\d+\.\d+) \(byte frequencies alone: (\d+\.\d+)\)", printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])
