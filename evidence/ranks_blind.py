"""Does ``watch=`` name the rank in trainings that its author has not seen? Handwritten digits, faults drawn blind.

Nothing here was chosen by what the detector finds: fault, rank, layer, element, bit and step come from the setting's
seed, and one training has one fault. A transformer and a convolutional network learn to read digits; "fsdp2" trains on
ranks that are processes, with an optimizer of this package, and "replicas" computes the ranks' gradients side by side
in one process and hands them to ``RankReport.of_gradients`` and ``RankWatch``.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

import ds_vrgd
from evidence.experiment import FULL, Experiment, Row
from evidence.meter import CLASSES, digits
from evidence.ranks_blind_report import draw, tables

BATCH = 8  # of a rank
SEED = 104729  # another one after a change of the detector that these trainings led to: it has seen them
FIRST_STEP = 25  # of a fault
LIMIT = 40  # steps that the watch has to report the fault
#: What goes wrong, and the class that docs/RANKS.md has for it.
FAULTS = {
    "same batch as another rank": "identical",
    "the last batch again and again": "repeated",
    "labels shuffled": "wrong",
    "one update missed": "drifted",
    "one layer halved": "scaled",
    "one layer doubled": "scaled",
    "one layer zero": "zero",
    "one layer's sign flipped": "flipped",
    "one exponent bit flipped": "element",
    "one NaN": "nonfinite",
}
#: These are there for one step; the others stay.
ONCE = ("one exponent bit flipped", "one NaN")
EXPONENT = range(23, 31)  # bits of a float32
LARGEST = 2.0**48  # a RankReport counts larger values as not finite
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one layer halved": lambda grad: 0.5 * grad,
    "one layer doubled": lambda grad: 2.0 * grad,
    "one layer zero": torch.zeros_like,
    "one layer's sign flipped": torch.neg,
}


@dataclass(frozen=True)
class Setting:
    """Attributes:
    ranks: "fsdp2" or "replicas".
    model: "transformer", with Adam, or "convolution", with momentum.
    k: number of ranks.
    seed: of everything.
    decks: trainings of each fault.
    clean: steps of a training without fault.
    last: a fault begins before this step; half as late is as likely.
    """

    ranks: str
    model: str
    k: int
    seed: int
    decks: int
    clean: int
    last: int


@dataclass(frozen=True)
class Fault:
    """Attributes:
    name: of ``FAULTS``.
    rank: the faulty one.
    other: the rank whose batch it has.
    layer: the name of a parameter.
    step: the first one that has the fault.
    element: its place in the layer, as a fraction of the layer's size.
    bit: the bit that is flipped, from 0.
    """

    name: str
    rank: int
    other: int
    layer: str
    step: int
    element: float
    bit: int

    def holds(self, step: int) -> bool:
        """Return whether the step has the fault."""
        return step == self.step if self.name in ONCE else step >= self.step

    def change(self, grad: Tensor) -> Tensor:
        """Return the layer's gradient as the faulty rank has it."""
        if self.name not in ONCE:
            return CHANGES.get(self.name, torch.clone)(grad)
        flat = grad.flatten().clone()
        place = int(self.element * len(flat))
        if self.name == "one NaN":
            flat[place] = math.nan
        else:
            flat.view(torch.int32)[place] ^= 1 << self.bit
        return flat.view_as(grad)


class Block(nn.Module):
    """A transformer's block, normalized before attention and before the perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.perceptron_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``(batch, tokens, width)`` to the same shape."""
        parts = self.qkv(self.attention_norm(hidden)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        weights = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1)
        hidden = hidden + self.out((weights @ value).transpose(1, 2).flatten(2))
        return hidden + self.down(nn.functional.gelu(self.up(self.perceptron_norm(hidden))))


class Transformer(nn.Module):
    """A small vision transformer over 16 patches of 2 x 2 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(0.02 * torch.randn(16, width))
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map images ``(batch, 64)`` to logits ``(batch, 10)``."""
        hidden = self.patches(images.view(-1, 1, 8, 8)).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden.mean(1)))


def made(setting: Setting) -> nn.Module:
    """Return the network before its first update."""
    torch.manual_seed(setting.seed)
    if setting.model == "transformer":
        return Transformer()
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        nn.Linear(128, CLASSES),
    )


def settings(size: str) -> list[Setting]:
    """Ranks that are processes first."""
    if size != FULL:
        return [Setting("replicas", "convolution", 4, SEED, 1, 50, 40)]
    cases = [("fsdp2", "convolution", 8, 150, 80), ("fsdp2", "transformer", 4, 150, 80)]
    cases += [("replicas", model, k, 400, 250) for k in (4, 8, 16) for model in ("transformer", "convolution")]
    return [
        Setting(ranks, model, k, SEED + 31 * place, 2, clean, last)
        for place, (ranks, model, k, clean, last) in enumerate(cases)
    ]


def faults_of(setting: Setting) -> list[Fault | None]:
    """Draw the fault of each training; the first training has none."""
    source = random.Random(setting.seed)
    layers = [name for name, _ in made(setting).named_parameters()]
    names = [name for _ in range(setting.decks) for name in source.sample(list(FAULTS), len(FAULTS))]
    found: list[Fault | None] = [None]
    for name in names:
        rank, other = source.sample(range(setting.k), 2)
        step = int(FIRST_STEP * (setting.last / FIRST_STEP) ** source.random())
        found.append(Fault(name, rank, other, source.choice(layers), step, source.random(), source.choice(EXPONENT)))
    return found


def batches(
    setting: Setting, seed: int, fault: Fault | None, data: tuple[Tensor, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each step's images ``(k, BATCH, 64)`` and classes ``(k, BATCH)``, no image twice in an epoch."""
    generator = torch.Generator().manual_seed(seed)
    images, classes = data
    each = setting.k * BATCH
    kept, step = torch.empty(0), 0
    while True:
        order = torch.randperm(len(images), generator=generator)
        for places in order[: len(order) // each * each].view(-1, setting.k, BATCH):
            now = fault.name if fault and fault.holds(step) else None
            if fault and now == "same batch as another rank":
                places[fault.rank] = places[fault.other]
            if fault and now == "the last batch again and again":
                places[fault.rank] = kept
            labels = classes[places]
            if fault and now == "labels shuffled":
                labels[fault.rank] = labels[fault.rank][torch.randperm(BATCH, generator=generator)]
            if fault:
                kept = places[fault.rank].clone()
            yield images[places], labels
            step += 1


@dataclass
class Step:
    """Attributes:
    events: of the watch.
    loss: the mean over the ranks, or one rank's.
    changed: the layer's gradient on the faulty rank before and after the fault, where this process has them.
    """

    events: list[ds_vrgd.RankEvent]
    loss: float
    changed: tuple[Tensor, Tensor] | None = None


def replicas(setting: Setting, fault: Fault | None, drawn: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Step]:
    """Train ``k`` ranks in this process, each with its own weights and gradients."""
    model, watch = made(setting), ds_vrgd.RankWatch()
    weights = dict(model.named_parameters())
    if setting.model == "transformer":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    missed: dict[str, Tensor] = {}

    def loss(own: dict[str, Tensor], images: Tensor, classes: Tensor) -> Tensor:
        return nn.functional.cross_entropy(functional_call(model, own, (images,)), classes)

    gradients = vmap(grad_and_value(loss))
    for step in itertools.count():
        images, classes = next(drawn)
        own = {name: weight.detach().expand(setting.k, *weight.shape) for name, weight in weights.items()}
        if fault and missed:
            own = {name: weight.clone() for name, weight in own.items()}
            for name, update in missed.items():
                own[name][fault.rank] -= update
        grads, losses = gradients(own, images, classes)
        changed = None
        if fault and fault.holds(step):
            of_layer = grads[fault.layer][fault.rank]
            changed = of_layer.clone(), fault.change(of_layer)
            of_layer.copy_(changed[1])
        report = ds_vrgd.RankReport.of_gradients(
            [{name: grad[rank] for name, grad in grads.items()} for rank in range(setting.k)], step
        )
        yield Step(watch.update(report), float(losses.mean()), changed)
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = grads[name].mean(0)
        if all(bool(weight.grad.isfinite().all()) for weight in weights.values()):  # type: ignore[union-attr]
            optimizer.step()
        if fault and fault.name == "one update missed" and step == fault.step - 1:
            missed = {name: weight.detach() - before[name] for name, weight in weights.items()}


class Damage:
    """Puts a fault into the weights and gradients of this process, in the forward and the backward pass.

    The hooks see the weights that the pass uses: those of one process, or what FSDP2 has gathered.

    Args:
        model: after ``fully_shard``.
        fault: of this rank.
    """

    def __init__(self, model: nn.Module, fault: Fault) -> None:
        self.step, self.fault = 0, fault
        self.missed: dict[str, Tensor] = {}
        self.changed: tuple[Tensor, Tensor] | None = None
        for prefix, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._before, prefix))

    def _before(self, prefix: str, module: nn.Module, inputs: object) -> None:
        for name, weight in module.named_parameters(prefix, recurse=False):
            if name in self.missed:
                weight.data.sub_(self.missed[name])
            if name == self.fault.layer and self.fault.holds(self.step):
                self._handle = weight.register_hook(self._change)

    def _change(self, grad: Tensor) -> Tensor:
        self._handle.remove()
        self.changed = grad.clone(), self.fault.change(grad)
        return self.changed[1]


def sharded(setting: Setting, fault: Fault | None, drawn: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Step]:
    """Train this rank's part of the batches with FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    logging.getLogger("ds_vrgd").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".* estimates the GSNR from only k = ")
    rank, model = torch.distributed.get_rank(), made(setting)
    mesh = torch.distributed.init_device_mesh("cpu", (setting.k,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if setting.model == "transformer" else None)
    for module in [*getattr(model, "blocks", []), model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    events: list[ds_vrgd.RankEvent] = []
    if setting.model == "transformer":
        optimizer: torch.optim.Optimizer = ds_vrgd.VRAdam(model.parameters(), lr=3e-3, watch=events.append)
    else:
        optimizer = ds_vrgd.VRMomentum(model.parameters(), lr=0.03, momentum=0.9, watch=events.append)
    ds_vrgd.attach(model, optimizer)
    damage = Damage(model, fault) if fault and fault.rank == rank else None

    def whole() -> dict[str, Tensor]:
        named = model.named_parameters()
        return {name: weight.full_tensor().clone() for name, weight in named if isinstance(weight, DTensor)}

    for step in itertools.count():
        images, classes = next(drawn)
        if damage:
            damage.step = step
        loss = nn.functional.cross_entropy(model(images[rank]), classes[rank])
        loss.backward()
        misses = fault is not None and fault.name == "one update missed" and step == fault.step - 1
        before = whole() if misses else {}
        events.clear()
        optimizer.step()
        optimizer.zero_grad()
        after = whole() if misses else {}
        if damage:
            damage.missed |= {name: after[name] - before[name] for name in after}
        yield Step(list(events), float(loss.detach()), damage.changed if damage else None)


def follow(fault: Fault | None, clean: int, steps: Iterator[Step]) -> Row:
    """Follow a training to the end of its clean steps, and on until its fault is reported, or ``LIMIT`` steps.

    Returns:
        ``alarms``, events before the fault; ``losses``, of the first and the last clean steps; and of a fault:
        ``expected``, its class; ``steps``, how many with it until it was reported, or null; ``events``, of that step;
        ``numel``, of its layer; and ``size``, of a flipped bit, the change in norms of the layer's gradient.
    """
    alarms: list[Row] = []
    losses: list[float] = []
    for step in itertools.islice(steps, fault.step if fault else clean):
        alarms += map(_event, step.events)
        losses.append(step.loss)
    row: Row = {"alarms": alarms, "clean_steps": len(losses)}
    row["losses"] = [round(sum(part) / len(part), 4) for part in (losses[:20], losses[-20:])]
    if fault is None:
        return row
    row |= {**asdict(fault), "expected": FAULTS[fault.name], "steps": None, "events": []}
    for count, step in enumerate(itertools.islice(steps, LIMIT), start=1):
        if count == 1 and step.changed:
            before, after = (of.flatten().double() for of in step.changed)
            row["numel"] = len(before)
            if fault.name == "one exponent bit flipped":
                if not bool((after.abs() <= LARGEST).all()):
                    row["expected"] = "nonfinite"
                row["size"] = float(f"{float((after - before).norm() / before.norm()):.3g}")
        if step.events:
            return row | {"steps": count, "events": list(map(_event, step.events))}
    return row


def _event(event: ds_vrgd.RankEvent) -> Row:
    return {"step": event.step, "rank": event.rank, "fault": event.fault, "layers": list(event.layers[:3]),
            "peers": list(event.peers), "detail": event.detail}  # fmt: skip


def trainings(setting: Setting, data: tuple[Tensor, Tensor]) -> list[Row]:
    """Return the row of each training, as this process knows it."""
    kind = sharded if setting.ranks == "fsdp2" else replicas
    return [
        follow(fault, setting.clean, kind(setting, fault, batches(setting, 1000 * setting.seed + place, fault, data)))
        for place, fault in enumerate(faults_of(setting))
    ]


def measure(setting: Setting) -> Row:
    """Return ``trainings``, the result of :func:`follow` for each."""
    if setting.ranks == "replicas":
        return {"trainings": trainings(setting, digits())}
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
    from ds_vrgd.doctor.ranks import run_on_ranks

    hidden = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    of_ranks = run_on_ranks(setting.k, trainings, setting, digits(), timeout_s=36_000, environment=hidden)
    for rows in zip(*of_ranks, strict=True):
        told = [(row["alarms"], row.get("steps"), row.get("events")) for row in rows]
        if any(each != told[0] for each in told):
            raise RuntimeError(f"the ranks report different events: {told}")
    return {"trainings": [rows[rows[0].get("rank", 0)] for rows in zip(*of_ranks, strict=True)]}


EXPERIMENT = Experiment(
    "Faults drawn blind in trainings on handwritten digits: which rank is not like the others",
    settings,
    measure,
    tables=tables,
    draw=draw,
    figure_size=(8.0, 4.5),
    prepare=lambda wanted: [digits(), None][1],
    kind=lambda setting: (setting.ranks, setting.model, setting.k),
    page="RANKS.md",
)
