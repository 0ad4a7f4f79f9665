"""Does the watch name the rank? Faults are put into trainings, one rank at a time, and beside them trainings without.

The ranks of a training are the chunks of one process, whose gradients go through the same comparison and the same
``ds_vrgd.RankWatch`` as those of an engine (:meth:`ds_vrgd.RankReport.of_gradients`). The thresholds were set on the
perceptron, with seeds below 100, and on the clean language model with seed 100, which had two false alarms; how a fault
is named, on both trainings with seed 100. The rows of faults, and the clean ones of seed 300, are of other seeds.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import ds_vrgd
from evidence.experiment import FULL, Experiment, Row
from evidence.ranks_report import draw, tables

RANKS = (4, 8, 16, 32)
#: Steps before a fault, steps in which a lasting one may be told, and one that passes; steps of a clean training.
BEFORE, LASTING, PASSING, CLEAN = 150, 60, 2, 10_000
#: The rank with the fault; for "same", the data are those of rank 0.
FAULTY = 2
#: Faults of the whole gradient, and faults of one layer.
WHOLE = ("same", "repeat", "labels", "drift 1", "drift 10", "drift 100", "half", "double", "flip")
OF_LAYER = ("half", "double", "zero", "flip", "nan", *(f"bit {bit}" for bit in range(8)))
#: What the watch may call a fault.
NAMES = {
    "same": {"identical"}, "repeat": {"repeated"}, "labels": {"wrong"}, "drift": {"drifted", "wrong"},
    "half": {"scaled"}, "double": {"scaled"}, "zero": {"zero"}, "flip": {"flipped"}, "nan": {"nonfinite"},
    "bit": {"element", "nonfinite", "scaled"},
}  # fmt: skip

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Setting:
    """Attributes:
    kind: "faults" after :data:`BEFORE` steps, or "clean".
    training: "perceptron" or "language".
    ranks: chunks of a step.
    seed: of weights and data.
    """

    kind: str
    training: str
    ranks: int
    seed: int


class Perceptron:
    """Classes of a noisy linear teacher; layers of 10 to 16,384 elements; SGD."""

    layers: ClassVar = {"bias": "2.bias", "small": "4.weight", "large": "2.weight"}

    def __init__(self) -> None:
        sizes = (64, 128, 128, 10)
        blocks = [(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
        self.model: nn.Module = nn.Sequential(*[module for block in blocks for module in block][:-1])
        self._teacher = torch.randn(64, 10) * 0.5

    def batch(self, ranks: int, generator: torch.Generator) -> Batch:
        """Return inputs and classes, ``(ranks, 16, ...)``."""
        inputs = torch.randn(ranks, 16, 64, generator=generator)
        noise = torch.randn(ranks, 16, 10, generator=generator)
        return inputs, (inputs @ self._teacher + noise).argmax(-1)

    def loss(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of one rank's batch."""
        return nn.functional.cross_entropy(functional_call(self.model, dict(params), (inputs,)), targets)

    def optimizer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Attention(nn.Module):
    """A transformer's block, before whose parts there is a normalisation."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(batch, length, width)``."""
        batch, length, width = x.shape
        q, k, v = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


@functools.cache
def text() -> Tensor:
    """Return bytes of the standard library's sources."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-h]*.py")))
    return torch.frombuffer(bytearray(found), dtype=torch.uint8).clamp_(max=127)


class Language:
    """The next byte of Python sources; layers of 32 to 4,096 elements, an embedding with rare rows; Adam."""

    layers: ClassVar = {"bias": "2.up.bias", "small": "2.out.weight", "large": "2.up.weight"}

    def __init__(self) -> None:
        width, self.length = 32, 24
        blocks = [Attention(width, 4) for _ in range(2)]
        self.model: nn.Module = nn.Sequential(nn.Embedding(128, width), *blocks, nn.Linear(width, 128))

    def batch(self, ranks: int, generator: torch.Generator) -> Batch:
        """Return bytes and those that follow, ``(ranks, 4, length)``."""
        starts = torch.randint(len(text()) - self.length - 1, (ranks, 4, 1), generator=generator)
        bytes_ = text()[starts + torch.arange(self.length + 1)].long()
        return bytes_[..., :-1], bytes_[..., 1:]

    def loss(self, params: Mapping[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of one rank's batch."""
        logits = functional_call(self.model, dict(params), (inputs,))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def optimizer(self, params: list[Tensor]) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(params, lr=3e-3)


TRAININGS: dict[str, Callable[[], Any]] = {"perceptron": Perceptron, "language": Language}


@dataclass
class State:
    """A training that can be copied: weights, optimizer, data and watch.

    Attributes:
        params: the weights, by layer.
        optimizer: over them.
        generator: of the data.
        watch: of the ranks.
        step: number of steps taken.
        before: the weights before the last steps, the newest last.
    """

    params: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    generator: torch.Generator
    watch: ds_vrgd.RankWatch
    step: int = 0
    before: deque[dict[str, Tensor]] = field(default_factory=lambda: deque(maxlen=100))

    def copied(self) -> State:
        """Return a copy that trains on alone."""
        params, optimizer = copy.deepcopy((self.params, self.optimizer))
        generator = torch.Generator()
        generator.set_state(self.generator.get_state())
        return State(params, optimizer, generator, copy.deepcopy(self.watch), self.step, self.before.copy())


def begin(training: Any, seed: int) -> State:
    """Return the training before its first step."""
    params = {name: param.detach().clone().requires_grad_() for name, param in training.model.named_parameters()}
    generator = torch.Generator().manual_seed(seed)
    return State(params, training.optimizer(list(params.values())), generator, ds_vrgd.RankWatch())


class Fault:
    """A fault of one rank: what it does to the data, the weights and the gradients of a step."""

    def __init__(self, name: str, layer: str | None, state: State) -> None:
        self.name, self.layer = name, layer
        self.passes = name.startswith(("bit", "nan"))
        self._first, self._kept = state.step, None
        # The weights of a rank that missed the last updates, as they differ from the others' for good.
        missed = int(name.split()[1]) if name.startswith("drift") else 0
        self._behind = {
            name: state.before[-missed][name] - param.detach() for name, param in state.params.items() if missed
        }

    def data(self, batch: Batch, generator: torch.Generator) -> Batch:
        """Return the data with the fault."""
        inputs, targets = (part.clone() for part in batch)
        if self.name == "same":
            inputs[FAULTY], targets[FAULTY] = inputs[0], targets[0]
        elif self.name == "repeat":
            self._kept = self._kept or (inputs[FAULTY].clone(), targets[FAULTY].clone())
            inputs[FAULTY], targets[FAULTY] = self._kept
        elif self.name == "labels":
            own = targets[FAULTY].flatten()
            order = torch.randperm(len(own), generator=generator)
            targets[FAULTY] = own[order].view(targets[FAULTY].shape)
        return inputs, targets

    def gradients(self, found: dict[str, Tensor], step: int, generator: torch.Generator) -> None:
        """Put the fault into the ranks' gradients, in place."""
        factor = {"half": 0.5, "double": 2.0, "zero": 0.0, "flip": -1.0}.get(self.name)
        if factor is not None:
            for name in found if self.layer is None else [self.layer]:
                found[name][FAULTY] *= factor
        elif self.passes and step == self._first:
            assert self.layer is not None
            values = found[self.layer][FAULTY].view(-1)
            if self.name == "nan":
                values[int(torch.randint(len(values), (1,), generator=generator))] = math.nan
            else:
                _flip(values, int(self.name.split()[1]), generator)

    def behind(self, training: Any, params: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor] | None:
        """Return the gradients of a rank with other weights; None where it has the same."""
        if not self._behind:
            return None
        own = {name: (param.detach() + self._behind[name]) for name, param in params.items()}
        found: dict[str, Tensor] = grad(training.loss)(own, batch[0][FAULTY], batch[1][FAULTY])
        return found


def _flip(values: Tensor, bit: int, generator: torch.Generator) -> None:
    """Set a bit of an element's exponent that is not set; clear one where it is set in all elements."""
    bits, mask = values.view(torch.int32), 1 << (23 + bit)
    unset = ((bits & mask == 0) & (values != 0)).nonzero()[:, 0]
    where = unset if len(unset) else (values != 0).nonzero()[:, 0]
    if len(where):
        bits[where[int(torch.randint(len(where), (1,), generator=generator))]] ^= mask


def advance(training: Any, state: State, ranks: int, fault: Fault | None = None) -> list[ds_vrgd.RankEvent]:
    """Take a step, and return what the watch makes of it."""
    batch = training.batch(ranks, state.generator)
    if fault is not None:
        batch = fault.data(batch, state.generator)
    params = {name: param.detach() for name, param in state.params.items()}
    found: dict[str, Tensor] = vmap(grad(training.loss), in_dims=(None, 0, 0))(params, *batch)
    if fault is not None:
        for name, gradient in (fault.behind(training, params, batch) or {}).items():
            found[name][FAULTY] = gradient
        fault.gradients(found, state.step, state.generator)
    report = ds_vrgd.RankReport.of_gradients(
        [{name: of_all[rank] for name, of_all in found.items()} for rank in range(ranks)], state.step
    )
    events = state.watch.update(report)
    if all(bool(torch.isfinite(of_all).all()) for of_all in found.values()):  # else the step is left out
        state.before.append({name: param.clone() for name, param in params.items()})
        for name, param in state.params.items():
            param.grad = found[name].mean(0)
        state.optimizer.step()
    state.step += 1
    return events


def outcome(training: Any, state: State, ranks: int, name: str, layer: str | None) -> Row:
    """Return what the watch makes of one fault, in the words of a row."""
    label = "whole" if layer is None else layer
    own = state.copied()
    fault = Fault(name, None if layer is None else training.layers[layer], own)
    numel = sum(p.numel() for p in own.params.values()) if fault.layer is None else own.params[fault.layer].numel()
    told: list[ds_vrgd.RankEvent] = []
    for steps in range(1, (PASSING if fault.passes else LASTING) + 1):
        told = advance(training, own, ranks, fault)
        if told:
            first = told[0]
            guilty = {first.rank, *first.peers} == {0, FAULTY} if name == "same" else first.rank == FAULTY
            named = first.fault in NAMES[name.split()[0]]
            there = not first.layers if fault.layer is None else first.layers[:1] == (fault.layer,)
            return {"fault": name, "where": label, "numel": numel, "steps": steps, "rank": guilty, "kind": named,
                    "layer": there, "told": str(first)}  # fmt: skip
    return {"fault": name, "where": label, "numel": numel, "steps": None, "rank": False, "kind": False,
            "layer": False, "told": ""}  # fmt: skip


def measure(setting: Setting) -> Row:
    """Return the outcomes of every fault, or the alarms of a clean training."""
    torch.set_num_threads(1)
    torch.manual_seed(setting.seed)
    training = TRAININGS[setting.training]()
    state = begin(training, setting.seed)
    alarms = []
    for _ in range(CLEAN if setting.kind == "clean" else BEFORE):
        alarms += [str(event) for event in advance(training, state, setting.ranks)]
    if setting.kind == "clean":
        return {"alarms": alarms, "steps": state.step}
    outcomes = [outcome(training, state, setting.ranks, name, layer) for name, layer in _faults()]
    return {"alarms": alarms, "steps": state.step, "outcomes": outcomes}


def _faults() -> Iterator[tuple[str, str | None]]:
    yield from ((name, None) for name in WHOLE)
    yield from ((name, layer) for name in OF_LAYER for layer in ("bias", "small", "large"))


def settings(size: str) -> list[Setting]:
    """Return all settings of a size: the clean trainings first."""
    if size != FULL:
        return [Setting("faults", "perceptron", 4, 200)]
    clean = [
        Setting("clean", training, ranks, seed) for seed in (100, 300) for ranks in (8, 4, 16) for training in TRAININGS
    ]
    return clean + [
        Setting("faults", training, ranks, seed)
        for seed in range(200, 210)
        for ranks in RANKS
        for training in TRAININGS
    ]


EXPERIMENT = Experiment(
    title="Which rank is not like the others",
    settings=settings,
    measure=measure,
    tables=tables,
    draw=draw,
    kind=lambda setting: (setting.kind, setting.training, setting.ranks),
    page="RANKS.md",
)
