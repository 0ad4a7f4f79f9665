"""A run from its first update to its last: the same under DeepSpeed and without, interrupted or not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

import ds_vrgd
from ds_vrgd_recipes.run.errors import InputError, Interrupted, TrainingFailed
from ds_vrgd_recipes.run.groups import parameter_groups
from ds_vrgd_recipes.run.log import read_log
from ds_vrgd_recipes.run.loop import Training, train
from ds_vrgd_recipes.run.ranks import share
from ds_vrgd_recipes.vision import train as module
from ds_vrgd_recipes.vision.network import average_statistics
from ds_vrgd_recipes.vision.order import Order
from ds_vrgd_recipes.vision.source import InMemory
from ds_vrgd_recipes.vision.train import Images, held_out_sums, make_network
from evidence.resnet import update
from tests.recipes.vision.cases import run_file, small_images
from tests.support.ranks import run_on_ranks

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "VRMomentum": {"lr": 0.01, "weight_decay": 1e-3},
    "LARS": {"lr": 0.1, "weight_decay": 1e-3},
}
STOP_AFTER = 3


def config(name: str, **others: Any) -> dict[str, Any]:
    silent = {"tensorboard": {"enabled": False}, "csv_monitor": {"enabled": False}}
    return {
        "optimizer": {"type": name, "params": OPTIMIZERS[name]},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1 unless it is told
        **silent,
        **others,
    }


def stop_after(update: int) -> Any:
    """SIGTERM during an update, counted over all ranks alike."""
    original, seen = Training.update, []

    def stopping(self: Training, *arguments: Any) -> Any:
        seen.append(None)
        self.stop.requested = self.stop.requested or len(seen) == update
        return original(self, *arguments)

    return patch.object(Training, "update", stopping)


def statistics_of_ranks(rank: int) -> list[float]:
    network = torch.nn.Sequential(torch.nn.BatchNorm2d(1))
    network[0].running_mean.fill_(float(rank))
    network[0].running_var.fill_(4.0 * rank)
    average_statistics(network)
    return [float(network[0].running_mean), float(network[0].running_var)]


def all_runs(rank: int, folder: Path) -> list[float]:
    """Whole runs, and one that is stopped and goes on."""
    source = small_images()
    with patch.object(module, "open_source", lambda data, device: InMemory(source, device)):
        for name in OPTIMIZERS:
            line = train(Images(run_file()), config(name), folder / name, None)
            assert line.startswith("held-out accuracy ")
        with stop_after(STOP_AFTER), pytest.raises(Interrupted, match="saved after update 3"):
            train(Images(run_file()), config("VRMomentum"), folder / "stopped", None)
        # Another seed is another run.
        with pytest.raises(InputError, match=r"was saved with seed=3, not 4"):
            train(Images(run_file(seed=4)), config("VRMomentum"), folder / "stopped", folder / "stopped")
        # The JSON's lr is the run's here, and weight decay that of matrices alone.
        for params, expected in (
            ({"lr": 0.02, "weight_decay": 1e-3}, r"was saved with lr=0\.01, not 0\.02; use"),
            ({"lr": 0.01, "weight_decay": 1e-2}, r"with optimizer_params\.1\.weight_decay=0\.001, not 0\.01; use"),
            ({"lr": 0.01, "weight_decay": 1e-3, "momentum": 0.5}, r"params\.2\.momentum=0\.9, not 0\.5; use"),
        ):
            changed = config("VRMomentum", optimizer={"type": "VRMomentum", "params": params})
            with pytest.raises(InputError, match=expected):
                train(Images(run_file()), changed, folder / "stopped", "auto")
        with (  # as on an accelerator, with bf16: auto in the run file
            patch.object(module, "_autocasts", lambda run: True),
            pytest.raises(InputError, match="was saved with autocast=False, not True; use"),
        ):
            train(Images(run_file()), config("VRMomentum"), folder / "stopped", "auto")
        train(Images(run_file()), config("VRMomentum"), folder / "stopped", "auto")
        # ZeRO-3, where every rank must evaluate as many batches.
        train(
            Images(run_file(epochs=0.4, warmup_epochs=0)),
            config("VRMomentum", zero_optimization={"stage": 3}),
            folder / "three",
            None,
        )
        infinite = patch.object(Training, "update", lambda *arguments: ({"loss": math.inf, "accuracy": 0.0}, False))
        with infinite, pytest.raises(TrainingFailed, match="update 1: the loss is inf; lower lr"):
            train(Images(run_file()), config("VRMomentum"), folder / "infinite", None)
        # A finite loss, and a gradient that is never finite: in fp32, too, every update would be skipped for ever.
        with (
            patch.object(module, "make_network", with_nan),
            patch("ds_vrgd_recipes.run.loop._MOST_SKIPPED_UPDATES", 3),
            pytest.raises(TrainingFailed, match="update 4: 4 updates in a row were skipped"),
        ):
            train(Images(run_file()), config("VRMomentum"), folder / "skipping", None)
    return statistics_of_ranks(rank)


def with_nan(*arguments: Any) -> torch.nn.Module:
    """A network whose gradient is not finite on the last rank alone."""
    network = make_network(*arguments)
    if torch.distributed.get_rank() == 1:
        list(network.parameters())[-1].register_hook(lambda gradient: gradient * math.nan)
    return network


def plain(name: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The experiment's loop, one process without DeepSpeed: weights, and the losses of the updates."""
    run, source = run_file(), InMemory(small_images(), torch.device("cpu"))
    model = make_network(run, source)
    optimizer = getattr(ds_vrgd, name)(parameter_groups(model), **OPTIMIZERS[name])
    order = Order(source.images, run.seed, run.global_batch, run.micro_batch)
    steps = run.steps(source.images)
    batches = source.training(order, order.places(0, steps, 0, 1))
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = run.lr_at(step, source.images, OPTIMIZERS[name]["lr"])
        losses.append(float(update(model, optimizer, batches, run)))
    return dict(model.network.named_parameters()), losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, run_on_ranks(2, all_runs, folder)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_follow_the_plain_optimizer(runs: tuple[Path, list[list[float]]], name: str) -> None:
    trained = torch.load(runs[0] / name / "model.pt")
    weights, losses = plain(name)
    start = make_network(run_file(), InMemory(small_images(), torch.device("cpu"))).network.state_dict()
    logged = [record["loss"] for record in read_log(runs[0] / name) if "loss" in record]
    # Two ranks sum in another order than one process, and BatchNorm over four images and GSNR over four chunks amplify
    # that. A gradient that is clipped, or cut short by a chunk, is far outside.
    assert logged == pytest.approx(losses, rel=1e-4)
    for key, weight in weights.items():
        moved = weight.detach() - start[key]
        assert float((trained[key] - weight.detach()).norm() / moved.norm()) < 1e-2, key


def test_a_stopped_run_goes_on_as_if_it_had_not_been(runs: tuple[Path, list[list[float]]]) -> None:
    folder, _ = runs
    whole, resumed = torch.load(folder / "VRMomentum" / "model.pt"), torch.load(folder / "stopped" / "model.pt")
    assert whole.keys() == resumed.keys()
    assert [key for key, tensor in whole.items() if not torch.equal(tensor, resumed[key])] == []

    def updates(name: str) -> list[tuple[int, float, float]]:
        return [(each["step"], each["loss"], each["lr"]) for each in read_log(folder / name) if "loss" in each]

    assert updates("stopped") == updates("VRMomentum")
    assert [step for step, _, _ in updates("stopped")] == [1, 2, 3, 4, 5, 6]


def go_on(rank: int, folder: Path) -> None:
    source = small_images()
    with patch.object(module, "open_source", lambda data, device: InMemory(source, device)):
        resumed = folder / "VRMomentum" / "checkpoints"
        train(Images(run_file()), config("VRMomentum"), folder / "half", resumed / "step-000004")
        train(Images(run_file()), config("VRMomentum"), folder / "end", resumed)  # nothing left but to evaluate


@pytest.mark.slow
def test_one_rank_goes_on_from_two(runs: tuple[Path, list[list[float]]]) -> None:
    folder, _ = runs
    run_on_ranks(1, go_on, folder)
    logs = {name: read_log(folder / name) for name in ("VRMomentum", "half", "end")}
    losses = {name: [each["loss"] for each in log if "loss" in each] for name, log in logs.items()}
    assert losses["half"] == pytest.approx(losses["VRMomentum"][4:], rel=1e-4)
    # BatchNorm's running statistics came along: without them the accuracy would be chance.
    for name in ("held_out_loss", "held_out_accuracy"):
        assert logs["end"][-1][name] == pytest.approx(logs["VRMomentum"][-1][name], rel=1e-5)


def test_what_a_run_leaves(runs: tuple[Path, list[list[float]]]) -> None:
    folder = runs[0] / "VRMomentum"
    tags = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    assert tags == ["step-000002", "step-000004", "step-000006"]  # 0.8 epochs are two updates
    records = read_log(folder)
    assert records[0]["gsnr"]["k"] == 4  # 16 / 4, of both ranks
    assert any("layers" in record for record in records)
    assert "gsnr" not in read_log(runs[0] / "LARS")[0]
    held_out = [record for record in records if "held_out_accuracy" in record]
    assert [record["step"] for record in held_out] == [2, 3, 4, 5, 6]  # an epoch is 2.5 updates
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    assert f"accuracy {held_out[-1]['held_out_accuracy']:.4f}" in result["summary"]
    assert 11 * held_out[-1]["held_out_accuracy"] == pytest.approx(round(11 * held_out[-1]["held_out_accuracy"]))


def test_running_statistics_are_averaged_over_the_ranks(runs: tuple[Path, list[list[float]]]) -> None:
    assert runs[1] == [[0.5, 2.0], [0.5, 2.0]]


def test_rows_that_fill_up_a_batch_do_not_count() -> None:
    source = InMemory(small_images(), torch.device("cpu"))
    model = make_network(run_file(), source).eval()
    with torch.no_grad():
        logits = model(small_images().held_out.images)
    labels = small_images().held_out.labels
    expected = [
        float(functional.cross_entropy(logits, labels, reduction="sum")),
        int((logits.argmax(1) == labels).sum()),
    ]
    for ranks in (1, 2, 3):
        sums = sum(held_out_sums(model, source.held_out(4, rank, ranks), torch.device("cpu")) for rank in range(ranks))
        assert isinstance(sums, torch.Tensor)
        assert sums.tolist() == pytest.approx([*expected, 11], rel=1e-5)
        assert len({len(list(share(11, 4, rank, ranks))) for rank in range(ranks)}) == 1


@pytest.mark.parametrize(
    "others, expected",
    [
        ({"bf16": {"enabled": True}}, "bf16.enabled=true in the DeepSpeed JSON would keep BatchNorm's running"),
        ({"optimizer": {"type": "LARS", "params": {}}}, "optimizer.params.lr=None in the DeepSpeed JSON. Give"),
    ],
)
def test_unusable_json(others: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as refused:
        Images(run_file()).describe(config("LARS") | others)
    assert expected in str(refused.value)
