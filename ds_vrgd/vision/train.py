"""The training run on images: updates, evaluation, checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch.nn import functional
from tqdm import tqdm

from ds_vrgd.training import checkpoint
from ds_vrgd.training.errors import InputError, Interrupted, require_finite
from ds_vrgd.training.files import write_binary
from ds_vrgd.training.groups import parameter_groups
from ds_vrgd.training.launch import fill_deepspeed_config
from ds_vrgd.training.log import RunLog
from ds_vrgd.training.output import finish, whole_state
from ds_vrgd.training.preemption import StopRequest
from ds_vrgd.training.ranks import Ranks
from ds_vrgd.training.start import begin
from ds_vrgd.vision.network import Classifier, SmallResNet, average_statistics, resnet50
from ds_vrgd.vision.order import Order
from ds_vrgd.vision.runfile import RunFile, SmallNetwork
from ds_vrgd.vision.source import IGNORED, MicroBatch, Source, open_source

MONITORED = ("loss", "accuracy", "lr", "images_per_second")


@dataclass(frozen=True)
class Training:
    """Everything that one rank's training loop uses."""

    run: RunFile
    source: Source
    engine: Any
    ranks: Ranks
    stop: StopRequest
    output: Path
    description: dict[str, Any]
    log: RunLog | None  # on rank 0
    lr: float  # the JSON's

    def train(self, first_step: int) -> tuple[float, float]:
        """Train from update ``first_step`` to the end. Collective.

        Returns:
            The evaluation at the end, see ``evaluate``.

        Raises:
            TrainingFailed: the loss is not finite, or a checkpoint cannot be written.
            Interrupted: a rank was asked to stop; all have saved.
        """
        run, images = self.run, self.source.images
        steps, rank, ranks = run.steps(images), dist.get_rank(), dist.get_world_size()
        order = Order(images, run.seed, run.global_batch, run.micro_batch)
        batches = self.source.training(order, order.places(first_step, steps, rank, ranks))
        evaluation = None
        bar = tqdm(total=steps, initial=first_step, disable=self.log is None, dynamic_ncols=True)
        for step in range(first_step, steps):
            started = time.perf_counter()
            lr = run.lr_at(step, images, self.lr)
            loss, accuracy, stop = self.update(batches, lr)
            self.check(loss, step + 1)
            speed = run.global_batch / (time.perf_counter() - started)
            if self.log is not None:
                record = {"step": step + 1, "epoch": (step + 1) * run.global_batch / images, "loss": loss}
                record |= {"accuracy": accuracy, "lr": lr, "images_per_second": speed}
                self.log.made(record, self.engine, steps)
            bar.set_postfix(loss=f"{loss:.3f}", lr=f"{lr:.2e}", images_s=f"{speed:.0f}", refresh=False)
            bar.update()
            saves = stop or step + 1 == steps or run.is_due(run.checkpoint_every, step + 1, images)
            if saves or run.is_due(run.evaluate_every, step + 1, images):
                evaluation = self.evaluate(step + 1)
                # Weights that the last update has ruined never become the newest checkpoint.
                self.check(evaluation[0], step + 1)
            if saves:
                checkpoint.save(self.engine, self.ranks, self.output, step + 1, self.description, run.keep_checkpoints)
            if stop and step + 1 < steps:
                bar.close()
                raise Interrupted(step + 1, self.output)
        bar.close()
        # Nothing was left to train if an interrupted run had saved its last checkpoint.
        return evaluation or self.evaluate(steps)

    def update(self, batches: Iterator[MicroBatch], lr: float) -> tuple[float, float, bool]:
        """One optimizer step over the global batch. Collective.

        Returns:
            (loss, accuracy, stop): means over the micro-batches of all ranks, and whether any rank has been asked to
            stop. The same on every rank.
        """
        engine = self.engine
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        accumulation, ranks = engine.gradient_accumulation_steps(), dist.get_world_size()
        sums = torch.zeros(3, dtype=torch.float64, device=engine.device)
        for turn in range(accumulation):
            images, labels = next(batches)
            engine.set_gradient_accumulation_boundary(turn == accumulation - 1)
            logits = engine(images)
            loss = functional.cross_entropy(logits, labels, label_smoothing=self.run.label_smoothing)
            engine.backward(loss)
            engine.step()
            correct = (logits.detach().argmax(1) == labels).double().mean()
            sums[:2] += torch.stack([loss.detach().double(), correct])
        sums /= accumulation * ranks
        # The ranks agree here whether to stop; asking costs no collective of its own.
        sums[2] = float(self.stop.requested)
        dist.all_reduce(sums)
        loss_mean, accuracy, stops = sums.tolist()
        return loss_mean, accuracy, stops > 0

    def check(self, loss: float, step: int) -> None:
        """Stop a run that has come apart. The loss is that of all ranks, so every rank stops.

        Raises:
            TrainingFailed: the loss is NaN or infinite.
        """
        way_out = "lower lr in the DeepSpeed JSON or lengthen warmup_epochs, and start again in another --output"
        require_finite([loss], step, way_out)

    def evaluate(self, step: int) -> tuple[float, float]:
        """Held-out (cross-entropy without smoothing, accuracy), with all ranks' BatchNorm statistics. Collective."""
        engine = self.engine
        average_statistics(engine.module)
        batches = self.source.held_out(self.run.micro_batch, dist.get_rank(), dist.get_world_size())
        sums = held_out_sums(engine, batches, engine.device)
        dist.all_reduce(sums)
        loss, correct, images = sums.tolist()
        loss, accuracy = loss / images, correct / images
        if self.log is not None:
            self.log.evaluation(step, {"held_out_loss": loss, "held_out_accuracy": accuracy})
        return loss, accuracy


def held_out_sums(network: Any, batches: Iterator[MicroBatch], device: torch.device) -> torch.Tensor:
    """Cross-entropy, right answers and images of the batches, summed: (3,), fp64."""
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    network.eval()
    with torch.no_grad():
        for images, labels in batches:
            logits = network(images)
            losses = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
            correct = (logits.argmax(1) == labels).sum()
            sums += torch.stack([losses.double(), correct.double(), (labels != IGNORED).sum().double()])
    network.train()
    return sums


def make_network(run: RunFile, source: Source) -> Classifier:
    """The network of a run file, with random weights from its seed."""
    torch.manual_seed(run.seed)
    network = (
        SmallResNet(run.model.depth, source.classes)
        if isinstance(run.model, SmallNetwork)
        else resnet50(source.classes)
    )
    bf16 = get_accelerator().device_name() != "cpu" if run.bf16 == "auto" else run.bf16
    return Classifier(network, *source.statistics, bf16=bf16)


def describe(run: RunFile, data_sha256: str, ranks: int, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must agree on, see ``ds_vrgd.training.checkpoint.check``."""
    schedule = ("global_batch", "micro_batch", "epochs", "warmup_epochs", "lr_base_batch", "label_smoothing", "bf16")
    settings = run.model_dump(mode="json")
    return {
        "model": settings["model"],
        "data_sha256": data_sha256,
        "seed": run.seed,
        "phases": [{**{key: settings[key] for key in schedule}, "steps": steps}],
        "ranks": ranks,
        "zero_stage": config.get("zero_optimization", {}).get("stage", 0),
        "optimizer": config["optimizer"]["type"],
    }


def train(run: RunFile, deepspeed_config: dict[str, Any], output: Path, resume: Path | Literal["auto"] | None) -> str:
    """Run (or go on with) a training run, see ``start.begin``. Collective; torch.distributed is initialised.

    Returns:
        The line that sums the run up.

    Raises:
        InputError: something that the user gave cannot be used; nothing was trained or overwritten.
        TrainingFailed: the run came apart, or a checkpoint could not be written.
        Interrupted: SIGTERM came, and all ranks have saved.
    """
    start = begin(run, output, resume)
    if start.finished is not None:
        return start.finished
    ranks, lr = start.ranks, _lr(deepspeed_config)
    config = ranks.on_rank_zero(lambda: fill_deepspeed_config(deepspeed_config, run.batches, 0, ranks.size, output))
    device = torch.device(get_accelerator().current_device_name())
    ranks.on_rank_zero(lambda: _fetch(run, device))  # before the others look for it
    source = open_source(run.data, device)
    steps = run.steps(source.images)
    description = describe(run, source.sha256, ranks.size, config, steps)
    start.check(description)
    model = make_network(run, source)
    engine = start.engine(model, parameter_groups(model), config)
    log = RunLog(output, start.step, engine.monitor, MONITORED) if dist.get_rank() == 0 else None
    with StopRequest() as stop:
        training = Training(run, source, engine, ranks, stop, output, description, log, lr)
        loss, accuracy = training.train(start.step)
    state = whole_state(engine, engine.module.network)
    line = f"held-out accuracy {accuracy:.4f}, loss {loss:.4f}, after {steps} updates of {run.global_batch} images"
    if dist.get_rank() == 0:
        write_binary(output / "model.pt", lambda file: torch.save(state, file))
        finish(run, output, line)
    return line


def _lr(config: dict[str, Any]) -> float:
    """The JSON's learning rate.

    Raises:
        InputError: it has none, or lets DeepSpeed cast the network.
    """
    for key in ("bf16", "fp16"):
        if config.get(key, {}).get("enabled"):
            raise InputError(
                f"{key}.enabled={json.dumps(config[key]['enabled'])} in the DeepSpeed JSON would keep BatchNorm's "
                "running statistics in 16 bits; remove it, and set bf16: true in the run file, for the layers alone"
            )
    lr = config["optimizer"].get("params", {}).get("lr")
    if not isinstance(lr, float | int):
        raise InputError(f"optimizer.params.lr={lr!r} in the DeepSpeed JSON; give the peak learning rate there")
    return float(lr)


def _fetch(run: RunFile, device: torch.device) -> None:
    open_source(run.data, device)
