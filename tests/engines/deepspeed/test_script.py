"""A plain DeepSpeed script that knows nothing of this package but the import, started by DeepSpeed's own launcher."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
import functools, json, sys, time
import deepspeed, torch
import ds_vrgd

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not needed to train; compiling it takes a minute

config = json.load(open(sys.argv[-1]))
without = {key: value for key, value in config.items() if key != "optimizer"}


def train(make_optimizer, config):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 1))
    parameters = list(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameters, optimizer=make_optimizer(parameters), config=config
    )
    torch.manual_seed(1 + torch.distributed.get_rank())
    for _ in range(12):
        x = torch.randn(4, 7, device=engine.device)
        engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
        engine.step()
    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    return [type(engine.basic_optimizer).__name__, ds_vrgd.gsnr_stats(engine).k, weights.tolist()]


arguments = {"lr": 0.01, "weight_decay": 0.01, "gamma": 0.1}
results = {
    "json": train(lambda parameters: None, config),
    "instance": train(lambda parameters: ds_vrgd.VRLAMB(parameters, **arguments), without),
    "factory": train(lambda parameters: functools.partial(ds_vrgd.VRLAMB, **arguments), without),
}
if torch.distributed.get_rank() == 0:
    open("results.json", "w").write(json.dumps(results))
torch.distributed.destroy_process_group()  # gloo's threads may abort an exit that leaves them running
time.sleep(0.1)  # and those of groups that DeepSpeed has kept, see ds_vrgd_recipes.run.ranks.leave
"""


def test_json_instance_and_factory_train_alike(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "VRLAMB", "params": {"lr": 0.01, "weight_decay": 0.01, "gamma": 0.1}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", port]
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*launcher, "train.py", "ds.json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    said = "ds_vrgd: VRLAMB: k = 8 (2 ranks x 4 micro-batches); DeepSpeed ZeRO-2 (FusedZeroOptimizer), fused mode"
    assert (run.stdout + run.stderr).count(said) == 3  # once an engine, by the first rank alone
    results = json.loads((tmp_path / "results.json").read_text())
    # Three steps of two ranks with four micro-batches each: k = 8.
    assert {name: result[:2] for name, result in results.items()} == {name: ["VRLAMB", 8] for name in results}
    assert results["json"][2] == results["instance"][2] == results["factory"][2]
