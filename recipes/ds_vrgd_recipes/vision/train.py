"""The training on images as a task of the training loop."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.loop import Place, Task
from ds_vrgd_recipes.run.output import save_state
from ds_vrgd_recipes.run.ranks import Ranks
from ds_vrgd_recipes.vision.network import Classifier, SmallResNet, average_statistics, resnet50
from ds_vrgd_recipes.vision.order import Order
from ds_vrgd_recipes.vision.runfile import RunFile, SmallNetwork
from ds_vrgd_recipes.vision.source import IGNORED, MicroBatch, Source, open_source

_SCHEDULE = ("global_batch", "micro_batch", "epochs", "warmup_epochs", "lr_base_batch", "label_smoothing", "bf16")


class Images(Task):
    """The class of an image."""

    values = ("loss", "accuracy")
    unit = "images"
    way_out = "lower lr in the DeepSpeed JSON or lengthen warmup_epochs, and start again in another --output"
    prepares = False

    def __init__(self, run: RunFile) -> None:
        self.run = run

    @override
    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        """See ``Task``.

        Raises:
            InputError: the DeepSpeed JSON has no learning rate, or lets DeepSpeed cast the network.
        """
        for key in ("bf16", "fp16"):
            if config.get(key, {}).get("enabled"):
                raise InputError(
                    f"{key}.enabled={json.dumps(config[key]['enabled'])} in the DeepSpeed JSON would keep BatchNorm's "
                    "running statistics in 16 bits. Remove it, and set bf16: true in the run file, for the layers alone"
                )
        lr = (config["optimizer"].get("params") or {}).get("lr")
        if not isinstance(lr, float | int):
            raise InputError(f"optimizer.params.lr={lr!r} in the DeepSpeed JSON. Give the peak learning rate there")
        self.peak_lr = float(lr)
        # "auto" means something else on another accelerator.
        return {"lr": self.peak_lr, "autocast": _autocasts(self.run)}

    @override
    def open(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        device = torch.device(get_accelerator().current_device_name())

        def fetch() -> None:
            open_source(self.run.data, device)

        ranks.on_rank_zero(fetch)  # before the others look for it
        self.source = open_source(self.run.data, device)
        self.phases = [self.run.steps(self.source.images)]
        settings = self.run.model_dump(mode="json")
        phase = {**{key: settings[key] for key in _SCHEDULE}, "steps": self.phases[0]}
        described = {"model": settings["model"], "data_sha256": self.source.sha256}
        return {**described, "seed": self.run.seed, "phases": [phase]}

    @override
    def network(self) -> Classifier:
        return make_network(self.run, self.source)

    @override
    def batches(self, phase: int, first_step: int, rank: int, ranks: int, device: torch.device) -> Iterator[MicroBatch]:
        order = Order(self.source.images, self.run.seed, self.run.global_batch, self.run.micro_batch)
        return self.source.training(order, order.places(first_step, self.phases[0], rank, ranks))

    @override
    def lr(self, phase: int, step: int) -> float:
        return self.run.lr_at(step, self.source.images, self.peak_lr)

    @override
    def loss(self, engine: Any, batch: MicroBatch, place: Place) -> tuple[Tensor, Sequence[Tensor]]:
        images, labels = batch
        logits = engine(images)
        loss = functional.cross_entropy(logits, labels, label_smoothing=self.run.label_smoothing)
        return loss, (loss.double(), (logits.detach().argmax(1) == labels).double().mean())

    @override
    def where(self, phase: int, step: int) -> dict[str, float]:
        return {"epoch": step * self.run.global_batch / self.source.images}

    @override
    def evaluates(self, step: int) -> bool:
        return self.run.is_due(self.run.evaluate_every, step, self.source.images)

    @override
    def saves(self, step: int) -> bool:
        return self.run.is_due(self.run.checkpoint_every, step, self.source.images)

    @override
    def evaluate(self, engine: Any, phase: int) -> dict[str, float]:
        """Return cross-entropy without smoothing and accuracy, with all ranks' BatchNorm statistics. Collective."""
        average_statistics(engine.module)
        batches = self.source.held_out(self.run.micro_batch, dist.get_rank(), dist.get_world_size())
        sums = held_out_sums(engine, batches, engine.device)
        dist.all_reduce(sums)
        loss, correct, images = sums.tolist()
        return {"held_out_loss": loss / images, "held_out_accuracy": correct / images}

    @override
    def finish(self, engine: Any, output: Path) -> None:
        save_state(engine, engine.module.network, output)

    @override
    def summary(self, evaluation: dict[str, float]) -> str:
        loss, accuracy = evaluation["held_out_loss"], evaluation["held_out_accuracy"]
        after = f"after {self.phases[0]} updates of {self.run.global_batch} images"
        return f"held-out accuracy {accuracy:.4f}, loss {loss:.4f}, {after}"


def held_out_sums(network: Any, batches: Iterator[MicroBatch], device: torch.device) -> Tensor:
    """Return cross-entropy, right answers and images of the batches, summed: (3,), fp64."""
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
    """Return the network of a run file, with random weights from its seed."""
    torch.manual_seed(run.seed)
    model, classes = run.model, source.classes
    network = SmallResNet(model.depth, classes) if isinstance(model, SmallNetwork) else resnet50(classes)
    return Classifier(network, *source.statistics, bf16=_autocasts(run))


def _autocasts(run: RunFile) -> bool:
    """Return whether layers compute in bf16 here."""
    return get_accelerator().device_name() != "cpu" if run.bf16 == "auto" else run.bf16
