"""Train TinyLM in plain PyTorch beside the dense float64 reference.

The reference gets its chunk gradients from a copy of the model that no optimizer watches, one backward pass a chunk.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ds_vrgd.doctor.chunks import chunk_gradients
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS
from tests.support.model import batches, make_model, param_groups
from tests.support.trajectory import ADAPTIVE, ARGUMENTS

#: |theta - theta_ref| / |theta_ref| after five steps in fp32: what docs/EXACTNESS.md promises.
BOUND = 8e-7
STEPS = 5


class Training:
    """A model, its optimizer, and the reference; both decay matrices only, and adapt only them.

    Args:
        name: of the optimizer.
        accumulation: micro-batches a step on one rank.
        checkpointing: activation checkpointing of the model.
        ranks: data-parallel ranks, in DistributedDataParallel where there are several.
        arguments: optimizer arguments over the ones that all exactness tests use.
    """

    def __init__(
        self, name: str, accumulation: int = 4, checkpointing: str | None = None, ranks: int = 1, **arguments: Any
    ) -> None:
        self.accumulation, self.ranks = accumulation, ranks
        self.rank = torch.distributed.get_rank() if ranks > 1 else 0
        self.model = make_model(checkpointing)
        self.plain = make_model()
        arguments = {**ARGUMENTS[name], **arguments}
        without_decay = {"adapt": False} if name in ADAPTIVE else {}
        self.optimizer = OPTIMIZERS[name](param_groups(self.model, **without_decay), **arguments)
        start = {n: weight for n, weight in self.plain.named_parameters() if weight.requires_grad}
        matrices = [n for n, weight in start.items() if weight.dim() > 1]
        vectors = [n for n in start if n not in matrices]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, **without_decay}]
        self.reference = DenseOptimizer(name, start, groups, **arguments)
        self.trained: torch.nn.Module = DistributedDataParallel(self.model) if ranks > 1 else self.model

    def backward(self, step: int) -> list[dict[str, torch.Tensor]]:
        """This rank's micro-batches of a step; returns the chunk gradients of all ranks."""
        micro_batches = batches(step, self.accumulation * self.ranks)
        self.plain.load_state_dict(self.model.state_dict())
        chunks = chunk_gradients(self.plain, micro_batches, 1.0)
        for index in range(self.accumulation):
            last = index == self.accumulation - 1
            with contextlib.nullcontext() if last or self.ranks == 1 else self.trained.no_sync():
                loss = self.trained(micro_batches[index * self.ranks + self.rank])
                (loss / self.accumulation).backward()
        return chunks

    def step(self, step: int, clip: float = 0.0) -> None:
        """One optimizer step of both."""
        chunks = self.backward(step)
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.reference.step(chunks, clip=clip)

    def error(self) -> float:
        """|theta - theta_ref| / |theta_ref|."""
        weights = {n: weight for n, weight in self.model.named_parameters() if weight.requires_grad}
        found = torch.cat([weights[n].detach().double().flatten() for n in self.reference.params])
        expected = torch.cat([weight.flatten() for weight in self.reference.params.values()])
        return float((found - expected).norm() / expected.norm())

    def moved(self) -> float:
        """|theta - theta_0| / |theta_0|, so that a test can see that it tests something."""
        start = {n: weight for n, weight in make_model().named_parameters() if weight.requires_grad}
        weights = dict(self.model.named_parameters())
        before = torch.cat([weight.detach().flatten() for weight in start.values()])
        after = torch.cat([weights[n].detach().flatten() for n in start])
        return float((after - before).norm() / before.norm())
