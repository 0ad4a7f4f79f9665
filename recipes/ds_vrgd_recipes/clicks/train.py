"""The training of DLRM on clicks as a task of the training loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed.comm as dist
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm
from typing_extensions import override

from ds_vrgd_recipes.clicks.evaluation import held_out_scores
from ds_vrgd_recipes.clicks.model import DLRM
from ds_vrgd_recipes.clicks.prepare import prepare
from ds_vrgd_recipes.clicks.prepared import Batch, open_prepared
from ds_vrgd_recipes.clicks.runfile import RunFile
from ds_vrgd_recipes.clicks.stream import TrainingOrder, evaluation_batches, training_batches
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.loop import Place, Task
from ds_vrgd_recipes.run.manifest import verify_files
from ds_vrgd_recipes.run.output import save_state
from ds_vrgd_recipes.run.ranks import Ranks
from ds_vrgd_recipes.run.settings import ONE_GROUP

_SCHEDULE = ("lr", "warmup_ratio", "decay_from", "decay_power", "epochs", "global_batch", "micro_batch")


class Clicks(Task):
    """The probability of a click."""

    values = ("loss",)
    unit = "rows"
    way_out = "lower lr or lengthen the warm-up, and resume from the last checkpoint with --resume {output}"
    group_options = ONE_GROUP

    def __init__(self, run: RunFile) -> None:
        self.run = run

    @override
    def describe(self, config: dict[str, Any]) -> dict[str, Any]:
        return {}

    @override
    def open(self, ranks: Ranks, folder: Path) -> dict[str, Any]:
        """See ``Task``.

        Raises:
            InputError: an epoch has fewer rows than a batch, so that an update would see one twice; or no update fits.
        """
        run = self.run
        ranks.on_rank_zero(lambda: prepare(run.data, folder, report=lambda text: tqdm.write(f"data: {text}")))
        verify_files(folder, ranks)
        self.data = open_prepared(folder)
        self.order = TrainingOrder(self.data.train, run.seed)
        rows = self.order.epoch_rows
        if rows < run.global_batch:
            raise InputError(
                f"global_batch={run.global_batch}, but an epoch has {rows:,} rows, and one update must not see a row "
                "twice; lower global_batch or give more data"
            )
        self.phases = [int(run.epochs * rows / run.global_batch)]
        if not self.phases[0]:
            raise InputError(f"epochs={run.epochs} of {rows:,} rows is less than one global_batch={run.global_batch}")
        phase = {name: getattr(run, name) for name in _SCHEDULE} | {"steps": self.phases[0]}
        model = run.model.model_dump()
        return {"model": model, "data_sha256": self.data.sha256, "seed": run.seed, "phases": [phase]}

    @override
    def network(self) -> DLRM:
        torch.manual_seed(self.run.seed)
        model = self.run.model
        return DLRM(self.data.table_sizes, model.embedding_dim, model.bottom_mlp, model.top_mlp)

    @override
    def groups(self, model: torch.nn.Module) -> Iterator[Tensor]:
        return model.parameters()

    @override
    def batches(self, phase: int, first_step: int, rank: int, ranks: int, device: torch.device) -> Iterator[Tensor]:
        steps = range(first_step, self.phases[0])
        return training_batches(self.order, self.run.micro_batch, self.run.global_batch, steps, rank, ranks)

    @override
    def lr(self, phase: int, step: int) -> float:
        return self.run.lr_at(step, self.phases[0])

    @override
    def loss(self, engine: Any, batch: Tensor, place: Place) -> tuple[Tensor, Sequence[Tensor]]:
        rows = Batch.of(batch.to(engine.device, non_blocking=True))
        loss = binary_cross_entropy_with_logits(engine(rows.dense, rows.categories), rows.labels)
        return loss, (loss,)

    @override
    def evaluate(self, engine: Any, phase: int) -> dict[str, float]:
        test, rank, ranks = self.data.test, dist.get_rank(), dist.get_world_size()
        rows = min(self.run.evaluation_rows or len(test), len(test))
        scores = held_out_scores(engine, evaluation_batches(test, rows, self.run.micro_batch, rank, ranks))
        return {f"held_out_{name}": value for name, value in asdict(scores).items()}

    @override
    def finish(self, engine: Any, output: Path) -> None:
        save_state(engine, engine.module, output)

    @override
    def summary(self, evaluation: dict[str, float]) -> str:
        auc, loss, base = (evaluation[f"held_out_{name}"] for name in ("auc", "loss", "base_loss"))
        return f"held-out AUC {auc:.4f}, log loss {loss:.4f} (of the click rate alone {base:.4f})"
