"""Table 4 on flights: VRSGD against SGD on DLRM, at 1/128 of the paper's batches, each at its own best rate."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isnan
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import ds_vrgd
from benchmarks.pages import table
from benchmarks.ranks import device_type
from ds_vrgd import gsnr
from ds_vrgd_recipes.clicks.criteo import DENSE
from ds_vrgd_recipes.clicks.evaluation import score
from ds_vrgd_recipes.clicks.model import DLRM
from ds_vrgd_recipes.clicks.prepare import prepare
from ds_vrgd_recipes.clicks.prepared import FORMAT, Batch, open_prepared
from ds_vrgd_recipes.clicks.runfile import Schedule
from ds_vrgd_recipes.clicks.sources import FlightsData
from ds_vrgd_recipes.run.fetching import cache_folder
from evidence.experiment import SMALL, Experiment, Row
from evidence.report import grouped, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCALE = 128  # the paper's batches are so many times larger; its data, 14,000 times
PAPER = {
    32: (0.8014, 0.8026),
    64: (0.8025, 0.8048),
    128: (0.8021, 0.8042),
    256: (0.7827, 0.8023),
    512: (0.7787, 0.8013),
}

SGD, VRSGD, VRSGD_MLPS = "SGD", "VRSGD", "VRSGD, MLPs only"
LOGISTIC = "Adam, logistic regression"  # for comparison
GAMMA, GSNR_EPS = 0.1, 1e-6  # the optimizer's defaults
SEEDS = (0, 1, 2)
CHANCE = 0.5  # AUC


@dataclass(frozen=True)
class Setting:
    """One training run."""

    optimizer: str
    batch: int
    rate: float
    seed: int
    chunks: int  # k
    epochs: int
    embedding_dim: int
    bottom_mlp: tuple[int, ...]
    top_mlp: tuple[int, ...]


def settings(size: str) -> list[Setting]:
    """Largest batch first, in which the paper sees the largest difference."""
    if size == SMALL:
        shape = {"chunks": 8, "epochs": 1, "embedding_dim": 8, "bottom_mlp": (32, 8), "top_mlp": (32, 16)}
        rates = {512: (0.5, 1.0, 2.0), 128: (1.0, 2.0, 4.0)}
        optimizers: tuple[str, ...] = (SGD, VRSGD)
    else:
        shape = {"chunks": 8, "epochs": 1, "embedding_dim": 64, "bottom_mlp": (256, 64), "top_mlp": (256, 128)}
        rates = dict.fromkeys((512, 256, 128, 64, 32), (0.5, 1.0, 2.0, 4.0, 8.0))
        optimizers = (SGD, VRSGD, VRSGD_MLPS)
    trained = [
        Setting(optimizer, thousands * 1024 // SCALE, rate, seed, **shape)  # type: ignore[arg-type]
        for thousands in rates
        for seed in SEEDS
        for rate in rates[thousands]
        for optimizer in optimizers
    ]
    return trained + [Setting(LOGISTIC, 128 * 1024 // SCALE, 0.005, seed, **shape) for seed in SEEDS]  # type: ignore[arg-type]


@cache
def _data() -> tuple[list[int], Tensor, Tensor]:
    """Sizes of the tables, training and test records on the device."""
    folder = cache_folder() / f"flights-prepared-{FORMAT}"
    prepare(FlightsData(source="flights"), folder, print)
    data = open_prepared(folder)
    sets = (torch.from_numpy(clicks.span(0, len(clicks))) for clicks in (data.train, data.test))
    train, test = (records.to(device_type()) for records in sets)
    return data.table_sizes, train, test


def measure(setting: Setting) -> Row:
    """Train; AUC on one half of the test set, by which a rate is chosen, and on the other, which is reported."""
    sizes, train, test = _data()
    torch.manual_seed(setting.seed)
    model: nn.Module = (
        Logistic(sizes)
        if setting.optimizer == LOGISTIC
        else DLRM(sizes, setting.embedding_dim, setting.bottom_mlp, setting.top_mlp)
    )
    model.to(train.device)
    optimizer = _optimizer(setting, model)
    # SGD takes the batch at once: to cut it into chunks would cost time and change nothing.
    chunks = setting.chunks if setting.optimizer in (VRSGD, VRSGD_MLPS) else 1
    schedule = Schedule(lr=setting.rate, warmup_ratio=0.125, decay_from=0.75)  # NVIDIA's proportions
    steps_of_epoch = len(train) // setting.batch
    steps = setting.epochs * steps_of_epoch
    order = torch.Generator().manual_seed(setting.seed)
    for step in range(steps):
        if step % steps_of_epoch == 0:
            rows = torch.randperm(len(train), generator=order).to(train.device)
        for group in optimizer.param_groups:
            group["lr"] = schedule.lr_at(step, steps)
        first = step % steps_of_epoch * setting.batch
        for chunk in rows[first : first + setting.batch].chunk(chunks):
            (_loss(model, train[chunk]) / chunks).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = torch.cat([model(batch.dense, batch.categories) for batch in map(Batch.of, test.split(8192))])
    middle = len(test) // 2
    labels = test[:, 0].float()
    chosen_by, reported = score(logits[:middle], labels[:middle]), score(logits[middle:], labels[middle:])
    row = {
        "steps": steps,
        # A model that has come apart ranks nothing.
        "validation_auc": CHANCE if isnan(chosen_by.auc) else chosen_by.auc,
        "test_auc": CHANCE if isnan(reported.auc) else reported.auc,
        "test_loss": reported.loss,
        "base_loss": reported.base_loss,
    }
    if setting.optimizer == VRSGD:
        del optimizer  # its hooks go with it
        gc.collect()
        row |= _ratios(model, train[rows[: setting.batch]], setting.chunks)
    return row


class Logistic(nn.Module):
    """A weight for each category and each dense feature."""

    def __init__(self, table_sizes: Sequence[int]) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, 1) for size in table_sizes)
        self.dense = nn.Linear(DENSE, 1)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        """Logits, [rows]."""
        columns = zip(self.tables, categories.t(), strict=True)
        return (self.dense(dense) + sum(table(column) for table, column in columns)).squeeze(1)


def _optimizer(setting: Setting, model: nn.Module) -> torch.optim.Optimizer:
    if setting.optimizer == LOGISTIC:
        return torch.optim.Adam(model.parameters(), lr=setting.rate)
    if setting.optimizer == SGD:
        return torch.optim.SGD(model.parameters(), lr=setting.rate)
    assert isinstance(model, DLRM)
    tables, mlps = list(model.tables.parameters()), [*model.bottom.parameters(), *model.top.parameters()]
    of_tables = {"params": tables, "gamma": 1.0 if setting.optimizer == VRSGD_MLPS else GAMMA}
    return ds_vrgd.VRSGD([of_tables, {"params": mlps}], lr=setting.rate, gamma=GAMMA, gsnr_eps=GSNR_EPS)


def _loss(model: nn.Module, records: Tensor) -> Tensor:
    batch = Batch.of(records)
    return binary_cross_entropy_with_logits(model(batch.dense, batch.categories), batch.labels)


def _ratios(model: nn.Module, records: Tensor, chunks: int) -> Row:
    """What equations 2 and 7 to 9 make of one batch at the end of the training, in tables and in MLPs.

    Returns:
        zero_rows: fraction of the tables' rows that no chunk touches.
        table_ratio, table_ones: mean of r, and fraction of it that is 1, over elements of the other rows.
        mlp_ratio, mlp_ones: the same over the MLPs' elements with a gradient.
    """
    names = [name for name, _ in model.named_parameters()]
    weights = list(model.parameters())
    gradients = [torch.autograd.grad(_loss(model, chunk), weights) for chunk in records.chunk(chunks)]
    rows = zero_rows = 0
    seen: dict[str, list[Tensor]] = {"table": [], "mlp": []}
    for name, *of_chunks in zip(names, *gradients, strict=True):
        stacked = torch.stack(of_chunks)
        mean = stacked.mean(0)
        raw = gsnr.raw_ratio(mean, (stacked - mean).square().sum(0), chunks, GSNR_EPS)
        ratio = gsnr.clamped_ratio(gsnr.normalized_ratio(raw, raw.mean()), GAMMA)
        if name.startswith("tables."):
            touched = stacked.ne(0).any(0).any(1)
            rows, zero_rows = rows + len(touched), zero_rows + int((~touched).sum())
            seen["table"].append(ratio[touched].flatten())
        else:
            seen["mlp"].append(ratio[mean != 0])
    result: Row = {"zero_rows": zero_rows / rows}
    for part, ratios in seen.items():
        together = torch.cat(ratios)
        result |= {f"{part}_ratio": together.mean().item(), f"{part}_ones": (together == 1).float().mean().item()}
    return result


def best(rows: Sequence[Row]) -> list[Row]:
    """The rows of the rate with the best median validation AUC; rates that lack a seed are left out."""
    by_rate = grouped(rows, "rate")
    most = max(map(len, by_rate.values()))
    whole = [members for members in by_rate.values() if len(members) == most]
    return max(whole, key=lambda members: statistics.median(row["validation_auc"] for row in members))


def tables(rows: Sequence[Row]) -> list[str]:
    """AUC beside the paper's, and what r does to tables."""
    body, inside = [], []
    for (batch, optimizer), members in sorted(grouped(rows, "batch", "optimizer").items()):
        chosen = best(members)
        thousands = batch * SCALE // 1024
        at_paper = f"{PAPER[thousands][optimizer == VRSGD]:.4f}" if optimizer in (SGD, VRSGD) else ""
        rates = ", ".join(f"{rate:g}" for rate in sorted({row["rate"] for row in members}))
        body.append(
            [
                f"{batch:,}",
                f"{chosen[0]['steps']:,}",
                optimizer,
                f"{chosen[0]['rate']:g} of {rates}",
                spread([row["test_auc"] for row in chosen], 4),
                spread([row["test_loss"] for row in chosen], 4),
                f"{thousands}k: {at_paper}" if at_paper else "",
            ]
        )
        if optimizer == VRSGD:
            columns = ("zero_rows", "table_ratio", "table_ones", "mlp_ratio", "mlp_ones")
            inside.append([f"{batch:,}", *(spread([row[name] for row in chosen]) for name in columns)])
    head = ["batch", "updates", "optimizer", "best rate", "test AUC", "log loss", "the paper's AUC"]
    share = "of it r = 1"
    inside_head = ["batch", "rows no chunk touches", "mean r, other rows", share, "mean r, MLPs", share]
    return [*table(head, body), "", *table(inside_head, inside)]


def draw(figure: Figure, rows: Sequence[Row]) -> None:
    """AUC against the rate for every batch."""
    batches = sorted({row["batch"] for row in rows})
    axes: Sequence[Axes] = figure.subplots(1, len(batches), sharey=True, squeeze=False)[0]
    for axis, batch in zip(axes, batches, strict=True):
        for number, optimizer in enumerate((SGD, VRSGD, VRSGD_MLPS)):
            members = [row for row in rows if row["batch"] == batch and row["optimizer"] == optimizer]
            by_rate = sorted(grouped(members, "rate").items())
            if not by_rate:
                continue
            rates = [rate for (rate,), _ in by_rate]
            median, low, high = (
                [how([row["test_auc"] for row in of]) for _, of in by_rate] for how in (statistics.median, min, max)
            )
            axis.plot(rates, median, marker="o", color=f"C{number}", label=optimizer)
            axis.fill_between(rates, low, high, color=f"C{number}", alpha=0.2)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("peak learning rate")
        axis.set_title(f"batch {batch:,}")
    axes[0].set_ylabel("test AUC: median, range of seeds")
    axes[0].legend(fontsize="small", loc="lower left")


EXPERIMENT = Experiment(
    "DLRM on flights: test AUC against the learning rate", settings, measure, tables, draw, (12.0, 4.0)
)
