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
RUNS = 4


def run_example(name: str, ranks: int = 2) -> str:
    """Return the output of ``examples/<name>.py`` under DeepSpeed's launcher, or by itself with ``ranks=1``."""
    command = [sys.executable]
    if ranks > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command += ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks), "--master_port", port]
    return _output([*command, f"examples/{name}.py"], DS_ACCELERATOR="cpu", LOCAL_SIZE=str(ranks))


def run_by_torchrun(*program: str) -> str:
    """Return the output of a program, with its arguments, under torchrun on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    return _output([*command, *program], CUDA_VISIBLE_DEVICES="")


def _output(command: list[str], **variables: str) -> str:
    """Return what a command prints, at its first run that gloo lets exit.

    A thread of gloo frees the tensor of the last collective, and needs the interpreter for that. Where the program has
    ended it by then, Python ends the thread and C++ the process, and the launcher ends the other rank: one run in some
    twenty on two cores.
    """
    for _ in range(RUNS):
        run = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if "terminate called without an active exception" not in run.stderr:
            break
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def losses(printed: str) -> tuple[float, float]:
    """Return the loss at the end, and that of byte frequencies alone: every example prints both."""
    found = re.search(r"loss (\d+\.\d+) \(byte frequencies alone: (\d+\.\d+)\)", printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])
