"""The model that the doctor trains: a tiny transformer, or the user's."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, HIDDEN, LENGTH = 83, 15, 3, 22, 7

# Brings the norm of the gradient above 1, so that the usual clipping clips.
LOSS_FACTOR = 8.0

Batches = Callable[[int, int], Any]


class TinyTransformer(nn.Module):
    """A transformer of one layer, with everything that breaks sharded statistics.

    Its sizes are odd, so that shards cut through layers and need padding. No batch uses all rows of the embedding, to
    which the head is tied. Only some micro-batches use its branch, whose two layers often have no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.before = nn.LayerNorm(WIDTH)
        # Without bias: a key's has a gradient of 0 but for rounding, which Adam and LAMB would blow up to whole steps.
        self.projections = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.mixed = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.3)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, with_branch: bool = True) -> Tensor:
        """Return the mean next-token loss of ``(batch, LENGTH + 1)`` token numbers, times :data:`LOSS_FACTOR`."""
        x = self.tokens(tokens[:, :-1]) + self.places.weight
        heads = self.projections(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        scores = torch.softmax(query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5, dim=-1)
        x = x + self.mixed((scores @ value).transpose(1, 2).flatten(2))
        x = x + self.down(torch.tanh(self.up(self.between(x))))
        if with_branch:
            x = x + torch.tanh(self.branch(x))
        loss = nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())
        return loss * LOSS_FACTOR


def random_tokens(samples: int, step: int, index: int) -> tuple[Tensor, bool]:
    """Return micro-batch ``index`` of a step: ``(samples, LENGTH + 1)`` token numbers, and whether the branch is used.

    All ranks use the branch in the same micro-batches, as DeepSpeed's buckets require: in the first step always, in the
    second after the first micro-batch, in the third never, and so on. That shows a gradient kept from an earlier step.
    """
    generator = torch.Generator().manual_seed(100_003 * step + index)
    tokens = torch.randint(0, VOCABULARY - 20, (samples, LENGTH + 1), generator=generator)
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    return tokens, step % 3 == 0 or (step % 3 == 1 and index >= ranks)


def load_model(named: str | None, samples: int) -> tuple[nn.Module, Batches]:
    """Return the model, with the same weights on every rank, and its batches.

    ``named`` is the user's ``module:function``, or None for the tiny transformer with ``samples`` in a micro-batch.

    Raises:
        ValueError: there is no such function, or it does not return ``(model, batches)``.
    """
    torch.manual_seed(1234)
    if named is None:
        return TinyTransformer(), functools.partial(random_tokens, samples)
    module, _, function = named.partition(":")
    if not module or not function:
        raise ValueError(f"--model {named}: give module:function, importable from this folder")
    if os.getcwd() not in sys.path:  # as in a program that is started here
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--model {named}: {error}; give module:function, importable from this folder") from error
    made = make()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(
            f"--model {named}: the function returns {type(made).__name__}; return (model, batches), a torch module and "
            "a function batches(step, index)"
        )
    return made


def on_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on ``device``."""
    if isinstance(batch, Mapping):
        return {name: on_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(on_device(value, device) for value in batch)
    return batch.to(device) if isinstance(batch, Tensor) else batch
