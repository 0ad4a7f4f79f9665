"""Starting the pre-training script as DeepSpeed's launcher does, one process a rank."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "scripts" / "pretrain_bert.py"
FAULTS = Path(__file__).parent / "faults.py"


@dataclass(frozen=True)
class Launch:
    """Exit statuses of all ranks (negative: the signal), and rank 0's output."""

    statuses: list[int]
    stdout: str
    stderr: str

    @property
    def status(self) -> int:
        """The one status of all ranks."""
        assert len(set(self.statuses)) == 1, self
        return self.statuses[0]


@dataclass(frozen=True)
class Whole:
    """A run of two ranks from its first update to its last: checkpoints after 3, 4 and 6."""

    output: Path
    arguments: list[str]  # all but the output folder's name
    launch: Launch


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def environment(ranks: int, fault: str) -> dict[str, str]:
    """Of a launch on this machine; ``fault`` is that of faults.py."""
    ours = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "LOCAL_SIZE": str(ranks), "FAULT": fault}
    return {**os.environ, **ours, "PYTHONPATH": f"{ROOT}:{ROOT / 'recipes'}"}


def launch(ranks: int, *arguments: str, fault: str = "", script: Path = SCRIPT) -> Launch:
    """Run ``script`` to its end; a rank that waits four minutes for a dead one fails the test."""
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return launch_in(own, *arguments, fault=fault, script=script)


def launch_in(variables: list[dict[str, str]], *arguments: str, fault: str = "", script: Path = SCRIPT) -> Launch:
    """The same for ranks that are told who they are by ``variables``, one set each."""
    common = environment(len(variables), fault)
    processes = [
        subprocess.Popen(
            [sys.executable, str(FAULTS if fault else script), *arguments],
            env={**common, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for own in variables
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return Launch([process.returncode for process in processes], *outputs[0])


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor and number in a checkpoint, by file and place: weights, masters, optimizer state, loss scale."""
    found: dict[str, torch.Tensor] = {}

    def walk(place: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[place] = value.cpu()
        elif isinstance(value, (bool, int, float)):
            found[place] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, dict):
            for key, each in value.items():
                if key != "differentiable":  # torch fills it in when it loads a group without it
                    walk(f"{place}/{key}", each)
        elif isinstance(value, (list, tuple)):
            for number, each in enumerate(value):
                walk(f"{place}/{number}", each)
        elif type(value).__module__.startswith("deepspeed") and hasattr(value, "__dict__"):  # the loss scaler
            walk(place, vars(value))

    for path in sorted(checkpoint.glob("*.pt")):
        content = torch.load(path, weights_only=False)
        content.pop("ds_config", None)  # names the output folder
        walk(path.name, content)
    assert found, f"{checkpoint} holds nothing"
    return found


def different(one: Path, other: Path) -> list[str]:
    """Places at which two checkpoints are not bitwise the same."""
    left, right = tensors(one), tensors(other)
    return [
        place
        for place in sorted({*left, *right})
        if place not in left or place not in right or not torch.equal(left[place], right[place])
    ]
