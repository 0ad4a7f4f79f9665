"""Checkpoints that an older version of this package saved load, and continue as the run that never stopped.

``data/saved_by_cfb1a73.zip`` holds what :func:`save` wrote on two CPU ranks with the code of commit cfb1a73 (DeepSpeed
0.19.8, torch 2.13), and its conversion by ``ds-vrgd to-universal`` of that commit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

from tests.support.ranks import run_on_ranks
from tests.support.resuming import differences

WORLD, SAVED_AT, STEPS = 2, 3, 6
STATES = ("exp_avg", "exp_avg_sq", "exp_avg_gsnr")
SAVED = Path(__file__).parent / "data" / "saved_by_cfb1a73.zip"
#: By the name of the folder, what the engine's JSON adds to load it.
KINDS: dict[str, dict[str, Any]] = {".": {}, "universal": {"checkpoint": {"load_universal": True}}}
# The order of the sums of another CPU's matrix products.
ROUNDING = 8e-7


def build(**more: Any) -> Any:
    """An engine around a small model with two param groups, at ZeRO stage 2."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3))
    matrices = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() == 1]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "VRLAMB", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.02}},
        "steps_per_print": 10**9,
    }
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "adapt": False}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config | more)
    return engine


def train(engine: Any, rank: int, steps: range) -> None:
    """The micro-batches of a step come from its number alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(2 * WORLD, 4, 5, generator=generator)
        for index in range(2):
            engine.backward(engine(inputs[index * WORLD + rank]).square().mean())
            engine.step()


def taken_down(engine: Any) -> dict[str, Any]:
    """This rank's shards of weights and state, and what decides the next step."""
    optimizer = engine.basic_optimizer
    tensors = [group["params"][0] for group in optimizer.param_groups]
    return {
        "fp32": [tensor.detach().clone() for tensor in tensors],
        **{key: [optimizer.state[tensor][key].clone() for tensor in tensors] for key in STATES},
        "counts": [
            engine.global_steps,
            *(float(optimizer.state[tensor]["step"]) for tensor in tensors),
            *(group["lr"] for group in optimizer.param_groups),
        ],
    }


def save(rank: int, folder: str) -> None:
    """Write the checkpoint, and where the run ends that never stopped."""
    engine = build()
    train(engine, rank, range(SAVED_AT))
    engine.save_checkpoint(folder, tag="saved", client_state={"remark": "by an older version"})
    saved = taken_down(engine)
    train(engine, rank, range(SAVED_AT, STEPS))
    torch.save({"saved": saved, "ended": taken_down(engine)}, Path(folder, f"rank{rank}.pt"))


def resume(rank: int, folder: str) -> dict[str, Any]:
    found = {}
    for kind, more in KINDS.items():
        engine = build(**more)
        _, client_state = engine.load_checkpoint(str(Path(folder, kind)))
        loaded = taken_down(engine)
        train(engine, rank, range(SAVED_AT, STEPS))
        found[kind] = (client_state["remark"], loaded, taken_down(engine))
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")
    shutil.unpack_archive(SAVED, folder)
    saved = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]
    return list(zip(saved, run_on_ranks(WORLD, resume, str(folder)), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_of_an_older_version_continues(
    found: list[tuple[dict[str, Any], dict[str, Any]]], kind: str
) -> None:
    for before, after in found:
        remark, loaded, ended = after[kind]
        assert remark == "by an older version"
        assert differences(before["saved"], loaded) == []
        assert ended["counts"] == before["ended"]["counts"]
        for key in ("fp32", *STATES):
            for expected, moved, shard in zip(before["ended"][key], before["saved"][key], ended[key], strict=True):
                assert (shard - expected).norm() <= ROUNDING * expected.norm()
                assert (moved - expected).norm() > 0
