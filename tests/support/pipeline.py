"""A small pipeline with tied embeddings, and the same model without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from tests.support.model import VOCABULARY, WIDTH, batches

HIDDEN = 11


class Tokens(nn.Module):
    """A table of tokens, to embed them and to tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Block(nn.Module):
    """A layer between embedding and output, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(torch.tanh(self.up(x))))


class Bias(nn.Module):
    """A layer that has the last stage's parameters begin at another offset than the first's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.scale = nn.Parameter(torch.empty(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + self.scale.T) + self.shift


def logits_of(tokens: Tokens, x: Tensor) -> Tensor:
    return nn.functional.linear(x, tokens.weight)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


#: The output's copy of the table in a :class:`Plain` whose two uses of it are apart.
COPY = "copy.weight"


class Plain(nn.Module):
    """The same model in one piece, with the names that the pipeline's stages have.

    Args:
        blocks: between the embedding and the output.
        tied: whether these two share their weight.
        apart: whether the output has a copy of that weight, :data:`COPY`, so that autograd does not add up the two
            parts of the gradient in the model's dtype.
    """

    def __init__(self, blocks: int, *, tied: bool = True, apart: bool = False) -> None:
        super().__init__()
        if tied:
            self.tied_modules = nn.ModuleDict({"tokens": Tokens()})
        else:
            self.add_module("0", Tokens())
        for index in range(blocks):
            self.add_module(str(index + 1), Block())
        self.add_module(str(blocks + 1), Bias())
        if not tied:
            self.add_module(str(blocks + 2), Head())
        self.copy = Tokens() if apart else None
        self.blocks, self.tied = blocks, tied

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean next-token loss of ``(batch, LENGTH + 1)`` token numbers."""
        first = self.tied_modules["tokens"] if self.tied else getattr(self, "0")
        x = first(tokens[:, :-1])
        for index in range(1, self.blocks + 2):
            x = getattr(self, str(index))(x)
        logits = logits_of(self.copy or first, x) if self.tied else getattr(self, str(self.blocks + 2))(x)
        return loss_of(logits, tokens[:, 1:])


class Head(Tokens):
    """An output layer with a weight of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return logits_of(self, x)


def plain_model(blocks: int, *, tied: bool = True, apart: bool = False) -> Plain:
    """Return the model, with the same weights wherever it is made; a copy of the table has weights of its own."""
    generator = torch.Generator().manual_seed(77)
    model = Plain(blocks, tied=tied, apart=apart)
    with torch.no_grad():
        for name, param in model.named_parameters():
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            param.copy_(mean + 0.3 * torch.randn(param.shape, generator=generator))
    return model


def pipeline(blocks: int, stages: int, *, tied: bool = True, **options: Any) -> PipelineModule:
    """Return the stage of this rank, with the weights of :func:`plain_model`."""
    first = TiedLayerSpec("tokens", Tokens) if tied else LayerSpec(Tokens)
    last = TiedLayerSpec("tokens", Tokens, forward_fn=logits_of) if tied else LayerSpec(Head)
    layers = [first, *(LayerSpec(Block) for _ in range(blocks)), LayerSpec(Bias), last]
    options = {"partition_method": "uniform", "loss_fn": loss_of} | options
    module = PipelineModule(layers=layers, num_stages=stages, **options)
    weights = dict(plain_model(blocks, tied=tied).named_parameters())
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(weights[name])
    return module


def samples(micro_batches: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches as the engine reads them: inputs for the first stage, labels for the last."""
    for tokens in micro_batches:
        yield tokens[:, :-1], tokens[:, 1:]


def shares(step: int, ranks: int, accumulation: int) -> list[list[Tensor]]:
    """Return the micro-batches of a step, by data-parallel rank."""
    everything = batches(step, ranks * accumulation)
    return [everything[rank * accumulation : (rank + 1) * accumulation] for rank in range(ranks)]
