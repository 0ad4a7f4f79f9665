"""Random programs without an engine, each step against the dense reference.

What programs do comes together here as nobody thought of it: layers that take turns, gradients that are thrown away or
edited, chunks that are not finite, windows of one chunk, groups whose gamma changes, resumed runs. Losses are linear in
the weights, so that the gradient of every chunk is known.
"""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS, VROptimizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PROGRAMS, MORE_PROGRAMS, STEPS = 60, 1000, 6
BOUND = 1e-5  # norm-wise, of the weights; r of two chunks that all but agree has fewer digits than r of many
SHAPES = [(3, 4), (7,), (2, 3, 2), (1,), (), (11, 1)]
RATES = {"VRSGD": 0.1, "VRMomentum": 0.05, "VRLARS": 1.0}
REDUCING = [name for name in OPTIMIZERS if name.startswith("VR")]
Chunk = dict[str, Tensor]


class Program:
    """A training drawn by ``seed``: its model, and the optimizer beside the reference.

    Attributes:
        observed: layers of groups that reduce variance from the start; what reaches the others alone is no chunk.
        chunks: of the open window, each with the gradients by name that still count.
        mean: what ``.grad`` should hold, by name.
        had_ratio: whether this optimizer had a window of several chunks: before, a second one of one chunk is an error.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        shapes = [self.draw.choice(SHAPES) for _ in range(self.draw.randint(1, 5))]
        self.model = nn.ParameterDict({f"layer{i}": self.normal(shape) for i, shape in enumerate(shapes)})
        self.names = list(self.model)
        self.name = self.draw.choice(REDUCING)
        cut = self.draw.randint(0, len(self.names))
        members = [part for part in (self.names[:cut], self.names[cut:]) if part]
        self.groups = [{"params": part, "gamma": self.draw.choice((0.1, 0.1, 0.3, 1.0))} for part in members]
        self.observed = [name for group in self.groups if group["gamma"] < 1.0 for name in group["params"]]
        self.arguments = {"lr": RATES.get(self.name, 1e-2), "weight_decay": self.draw.choice((0.0, 0.1))}
        self.optimizer = self.make_optimizer()
        self.reference = DenseOptimizer(self.name, dict(self.model.items()), self.groups, **self.arguments)
        self.chunks: list[Chunk] = []
        self.mean: Chunk = {}
        self.had_ratio = False

    def normal(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def make_optimizer(self) -> VROptimizer:
        groups = [{**group, "params": [self.model[name] for name in group["params"]]} for group in self.groups]
        return OPTIMIZERS[self.name](groups, **self.arguments)

    def backward(self, count: int, signal: Chunk, *, whole: bool, bad: bool) -> None:
        """Run one micro-batch of ``count`` through all layers, or through one; with ``bad`` one is not finite."""
        used = self.names if whole or self.draw.random() < 0.6 else self.draw.sample(self.names, 1)
        grads = {name: signal[name] + self.normal(self.model[name].shape) for name in used}
        if self.draw.random() < 0.1:
            grads[used[0]] = torch.zeros_like(grads[used[0]])
        if bad:
            grads[used[0]].view(-1)[0] = self.draw.choice((torch.nan, torch.inf))
        grads = {name: grad / count for name, grad in grads.items()}
        torch.stack([(self.model[name] * grad).sum() for name, grad in grads.items()]).sum().backward()
        self.chunks.append(grads)
        for name, grad in grads.items():
            self.mean[name] = self.mean[name] + grad if name in self.mean else grad

    def throw_away(self) -> None:
        """Throw the window's gradients away, all or those of one layer, in one of the ways that torch has."""
        how = self.draw.choice(("optimizer", "in place", "layer by layer", "one layer"))
        if how == "in place" and not any(self.mean[name].any() for name in self.observed if name in self.mean):
            return  # zeros in the place of zeros: nobody can tell
        gone = [self.draw.choice(self.names)] if how == "one layer" else self.names
        if how == "optimizer":
            self.optimizer.zero_grad(set_to_none=self.draw.random() < 0.5)
        elif how == "in place":
            nn.Module.zero_grad(self.model, set_to_none=False)
        else:
            for name in gone:
                self.model[name].grad = None
        self.mean = {name: grad for name, grad in self.mean.items() if name not in gone}
        self.chunks = [{name: grad for name, grad in chunk.items() if name not in gone} for chunk in self.chunks]

    def edit(self) -> None:
        """Scale the gradient of a layer in place: the step takes it, and the ratio is that of the chunks."""
        name, factor = self.draw.choice(self.names), self.draw.choice((0.5, 3.0))
        if self.model[name].grad is not None and name in self.mean:
            self.model[name].grad.mul_(factor)
            self.mean[name] = self.mean[name] * factor

    def resume(self) -> None:
        """Go on with a new optimizer that has loaded the old one's state; gamma is its own until it is set."""
        saved = pickle.loads(pickle.dumps(self.optimizer.state_dict()))
        self.optimizer, self.had_ratio = self.make_optimizer(), False
        self.optimizer.load_state_dict(saved)
        for group, of_reference in zip(self.optimizer.param_groups, self.reference.groups, strict=True):
            group["gamma"] = of_reference["gamma"]

    def change_gamma(self) -> None:
        index = self.draw.randrange(len(self.groups))
        if self.groups[index]["gamma"] < 1.0:
            gamma = self.draw.choice((0.05, 0.5, 1.0))
            self.optimizer.param_groups[index]["gamma"] = self.reference.groups[index]["gamma"] = gamma

    def window(self) -> None:
        """Run the backward passes of a step, and what the program does between them."""
        least = 1 if self.had_ratio else 2
        count, signal = self.draw.randint(least, 6), {name: self.normal(self.model[name].shape) for name in self.names}
        judged = any(group["gamma"] < 1.0 for group in self.optimizer.param_groups)
        bad = self.draw.randrange(count) if judged and self.draw.random() < 0.1 else None
        thrown = self.draw.randint(0, count - least) if self.draw.random() < 0.3 else None
        for micro_batch in range(count):
            if micro_batch == thrown:
                self.throw_away()
            self.backward(count, signal, whole=micro_batch >= count - least, bad=micro_batch == bad)
        if self.draw.random() < 0.2:
            self.edit()

    def step(self) -> None:
        """Step with the optimizer and with the reference, and begin the next window."""
        chunks = [chunk for chunk in self.chunks if any(name in chunk for name in self.observed or self.names)]
        mean = {name: self.mean.get(name, torch.zeros_like(self.model[name])) for name in self.names}
        for parameter in self.model.parameters():
            if parameter.grad is None:  # torch would leave it as it is, and the reference decays it
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        if all(torch.isfinite(grad).all() for part in (mean, *chunks) for grad in part.values()):
            self.reference.step(chunks, mean=mean)
            judged = any(group["gamma"] < 1.0 for group in self.optimizer.param_groups)
            self.had_ratio = self.had_ratio or (judged and len(chunks) > 1)
        self.optimizer.zero_grad()
        self.chunks, self.mean = [], {}


def run(seed: int) -> None:
    program = Program(seed)
    for step in range(STEPS):
        if step and program.draw.random() < 0.2:
            program.resume()
        if step and program.draw.random() < 0.2:
            program.change_gamma()
        program.window()
        program.step()
        right = program.reference.params
        error = norm_of([program.model[name].double() - right[name] for name in right]) / norm_of([*right.values()])
        assert error <= BOUND, f"seed {seed}, step {step}: {error:.1e}"


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program_follows_the_reference(seed: int) -> None:
    run(seed)


@pytest.mark.slow
def test_many_programs_follow_the_reference() -> None:
    for seed in range(PROGRAMS, MORE_PROGRAMS):
        run(seed)
