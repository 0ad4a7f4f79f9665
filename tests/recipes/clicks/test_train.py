"""The whole run on two ranks: the log, the checkpoints, a resumed run, SIGTERM; and the script as it is launched."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml

from ds_vrgd_recipes.run.errors import InputError, Interrupted, TrainingFailed
from ds_vrgd_recipes.run.log import read_log
from tests.recipes.bert.launching import ROOT, launch
from tests.recipes.clicks.cases import run_settings, write_files
from tests.support.ranks import run_on_ranks

CONFIG = {"optimizer": {"type": "VRSGD", "params": {"lr": 1.0}}, "zero_optimization": {"stage": 2}}


def updates(output: Path) -> list[dict[str, Any]]:
    """Records of the updates, without what depends on the clock."""
    return [
        {name: value for name, value in record.items() if not name.endswith(("_per_second", "memory_gb"))}
        for record in read_log(output)
        if "loss" in record
    ]


def trained(output: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = torch.load(output / "model.pt", weights_only=True)
    return state


def _runs(rank: int, folder: str) -> list[str]:
    """A whole run, one from its third update on, one that gets SIGTERM and goes on, one that comes apart."""
    from ds_vrgd_recipes.clicks import train as module
    from ds_vrgd_recipes.clicks.runfile import RunFile
    from ds_vrgd_recipes.clicks.train import Clicks
    from ds_vrgd_recipes.run.loop import train

    root = Path(folder)
    settings = run_settings(root / "day_0", root / "day_1")
    run = RunFile.model_validate(settings)
    said = [train(Clicks(run), CONFIG, root / "whole", None)]
    said.append(train(Clicks(run), CONFIG, root / "resumed", root / "whole" / "checkpoints" / "step-000003"))
    batches = module.training_batches

    def with_signal(*arguments: Any) -> Iterator[torch.Tensor]:
        for number, batch in enumerate(batches(*arguments)):
            if rank == 1 and number == 18:  # of 4 in each update: the fifth
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    module.training_batches = with_signal
    try:
        train(Clicks(run), CONFIG, root / "stopped", None)
    except Interrupted as interruption:
        said.append(str(interruption))
    module.training_batches = batches
    said.append(train(Clicks(run), CONFIG, root / "stopped", "auto"))
    wild = RunFile.model_validate({**settings, "lr": 1e30, "prepared_data": root / "whole" / "data"})
    try:
        train(Clicks(wild), CONFIG, root / "wild", None)
    except TrainingFailed as failure:
        said.append(str(failure))
    # A checkpoint of another JSON; a loss scale at which every gradient overflows, and which stays.
    clipped = {**CONFIG, "gradient_clipping": 0.5}
    slower = {**CONFIG, "optimizer": {"type": "VRSGD", "params": {"lr": 1.0, "weight_decay": 0.1}}}
    for config in (clipped, slower):
        try:
            train(Clicks(run), config, root / "changed", root / "whole" / "checkpoints" / "step-000003")
        except InputError as error:
            said.append(f"{error} {(root / 'changed').exists()}")
    overflowing = {**CONFIG, "fp16": {"enabled": True, "loss_scale": 2.0**60}}
    with patch("ds_vrgd_recipes.run.loop._MOST_SKIPPED_UPDATES", 3):
        try:
            train(Clicks(run), overflowing, root / "skipping", None)
        except TrainingFailed as failure:
            said.append(str(failure))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("clicks")
    write_files(made)
    return made


@pytest.fixture(scope="module")
def said(folder: Path) -> list[str]:
    first, second = run_on_ranks(2, _runs, str(folder))
    assert first == second
    return first


def test_what_a_run_leaves(folder: Path, said: list[str]) -> None:
    output = folder / "whole"
    records = updates(output)
    # 600 rows are 4 groups of 128 in an epoch: two epochs are 8 updates of 128
    assert [record["step"] for record in records] == list(range(1, 9))
    assert {record["gsnr"]["k"] for record in records} == {8}
    # up over 2 updates, then down: (1 - n/6)**2
    assert [record["lr"] for record in records] == pytest.approx([0.5, 1, *((1 - n / 6) ** 2 for n in range(6))])
    evaluations = [record for record in read_log(output) if "held_out_auc" in record]
    assert [record["step"] for record in evaluations] == [3, 6, 8]
    assert said[0].startswith(f"held-out AUC {evaluations[-1]['held_out_auc']:.4f}, log loss ")
    assert json.loads((output / "result.json").read_text())["summary"] == said[0]
    state = trained(output)
    assert state["tables.0.weight"].shape == (42, 4)  # 40 values, the rare and the missing
    assert state["bottom.0.weight"].shape == (8, 13)


def test_resumed_it_is_the_same_run(folder: Path, said: list[str]) -> None:
    """Bitwise: weights, schedule and data go on where they were; also after SIGTERM, which saves on all ranks."""
    whole, model = updates(folder / "whole"), trained(folder / "whole")
    assert said[1] == said[0]
    assert updates(folder / "resumed") == whole[3:]
    assert said[2].startswith("SIGTERM: saved after update 5 and stopped")
    assert said[3] == said[0]
    assert updates(folder / "stopped") == whole
    for name in ("resumed", "stopped"):
        assert all(torch.equal(tensor, model[key]) for key, tensor in trained(folder / name).items())


def test_a_run_that_comes_apart_stops_and_says_so(folder: Path, said: list[str]) -> None:
    assert "the loss is" in said[4]
    assert "lower lr" in said[4]
    assert not (folder / "wild" / "result.json").exists()


def test_a_checkpoint_is_not_resumed_with_another_json(said: list[str]) -> None:
    """Nothing of the new run is written."""
    for message, expected in zip(
        said[5:7], ("gradient_clipping=0.0, not 0.5", "optimizer_params.1.weight_decay=0.0, not 0.1"), strict=True
    ):
        assert f"step-000003 was saved with {expected}; use the settings of that run" in message
        assert message.endswith(" False")


def test_a_run_that_skips_every_update_ends(folder: Path, said: list[str]) -> None:
    assert said[7].startswith("update 4: 4 updates in a row were skipped because gradients overflowed or were NaN; ")
    assert [record["skipped"] for record in updates(folder / "skipping")] == [True, True, True]


@pytest.mark.slow
def test_the_script_on_two_ranks_and_on_one(folder: Path) -> None:
    """The same chunks, so the same run up to the order of sums in fp32, carried over too; and a refusal in one line."""
    run_file, config = folder / "run.yaml", ROOT / "configs" / "dlrm" / "ds_vrsgd.json"
    run_file.write_text(yaml.safe_dump(run_settings(folder / "day_0", folder / "day_1")), encoding="utf-8")
    arguments = ["--deepspeed_config", str(config), "--run", str(run_file), "--output"]
    script = ROOT / "scripts" / "train_dlrm.py"
    losses = []
    for ranks in (2, 1):
        output = folder / f"script-{ranks}"
        done = launch(ranks, *arguments, str(output), script=script)
        assert done.status == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("held-out AUC 0.")
        losses.append([record["loss"] for record in updates(output)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    middle = folder / "script-2" / "checkpoints" / "step-000003"
    done = launch(1, *arguments, str(folder / "carried-over"), "--resume", str(middle), script=script)
    assert done.status == 0, done.stderr
    assert [record["loss"] for record in updates(folder / "carried-over")] == pytest.approx(losses[0][3:], rel=1e-5)
    run_file.write_text(yaml.safe_dump(run_settings(folder / "day_0", folder / "day_1", global_batch=1024)))
    refused = launch(1, *arguments, str(folder / "large"), script=script)
    assert refused.status == 2
    assert "error: global_batch=1024, but an epoch has 512 rows" in refused.stderr
