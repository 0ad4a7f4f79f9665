"""A pre-LN language model of a few million weights and its text, on the device: what the experiments on it share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import ds_vrgd
from benchmarks.ranks import device_type
from ds_vrgd_recipes.bert.evaluation import unigram_log_probabilities
from ds_vrgd_recipes.bert.examples import IGNORED_LABEL
from ds_vrgd_recipes.bert.store import Split
from ds_vrgd_recipes.run.groups import parameter_groups
from evidence.bert_data import prepared
from evidence.experiment import Row

#: Layers, width and heads.
MODELS = {"small": (4, 256, 4), "wide": (2, 512, 8), "toy": (2, 32, 2)}
CAUSAL, MASKED = "causal", "masked"
MASKED_SHARE = 0.15
HELD_OUT_SEED = 10_000  # of the masks
MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": ds_vrgd.VRAdamW,
    "LAMB": ds_vrgd.VRLAMB,
    "Momentum": ds_vrgd.VRMomentum,
}
#: Momentum has none, as its decay would not be decoupled.
WEIGHT_DECAY = {"AdamW": 0.01, "LAMB": 0.01, "Momentum": 0.0}
GAMMA = 0.1


@dataclass(frozen=True)
class Text:
    """Token ids in rows of one length, on the device.

    Attributes:
        train, held_out: ``(n, length)`` int64.
        unigram: log probabilities of the pieces, ``(pieces,)``.
        mask: id of the piece that stands for a masked one.
    """

    train: Tensor
    held_out: Tensor
    unigram: Tensor
    mask: int

    def entropy(self, labels: Tensor) -> float:
        """Return the loss of a model that knows the pieces' frequencies alone, nats per label that is not ignored."""
        return -float(self.unigram[labels[labels != IGNORED_LABEL]].mean())


@lru_cache(maxsize=1)
def load_text(text: str, length: int) -> Text:
    """Return one of ``bert_data.TEXTS``: its documents end to end, cut into rows."""
    data = prepared(text)
    tokenizer = data.tokenizer
    train, held_out = (_rows(split, length, tokenizer.sep_token_id) for split in (data.train, data.held_out))
    unigram = torch.from_numpy(unigram_log_probabilities(data.unigram_counts)).to(device_type())
    return Text(train, held_out, unigram, tokenizer.mask_token_id)


def _rows(split: Split, length: int, separator: int) -> Tensor:
    """Return the whole rows of a split, with a separator before every document."""
    parts = [np.insert(of.tokens, of.sentences[of.documents[:-1]], separator) for of in split.shards]
    joined = torch.from_numpy(np.concatenate(parts).astype(np.int64))
    return joined[: len(joined) // length * length].view(-1, length).to(device_type())


Examples = tuple[Tensor, Tensor]  # input ids and labels, a row each


def inputs_and_labels(rows: Tensor, objective: str, mask: int, seed: int) -> Examples:
    """Return input ids and labels: the next tokens, or 15 % masked ones, drawn by ``seed``."""
    if objective == CAUSAL:
        return rows[:, :-1], rows[:, 1:]
    drawn = torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < MASKED_SHARE
    chosen = drawn.to(rows.device)
    return rows.masked_fill(chosen, mask), rows.masked_fill(~chosen, IGNORED_LABEL)


def drawn_rows(text: Text, count: int, seed: int) -> Tensor:
    """Return ``count`` rows for training, each once, in an order drawn by ``seed``."""
    if count > len(text.train):
        raise ValueError(
            f"examples={count}, but the text has {len(text.train)} sequences of {text.train.shape[1]} tokens: lower "
            "examples, or add a corpus to bert_data.TEXTS"
        )
    order = torch.randperm(len(text.train), generator=torch.Generator().manual_seed(seed))
    return text.train[order[:count].to(text.train.device)]


class LanguageModel(nn.Module):
    """A pre-LN transformer whose output weights are those of its embedding; without dropout.

    Attributes:
        graphs: by the number of rows, what runs instead of :meth:`loss`.
    """

    def __init__(self, model: str, pieces: int, length: int, *, causal: bool) -> None:
        super().__init__()
        layers, width, heads = MODELS[model]
        self.tokens, self.positions = nn.Embedding(pieces, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.causal = causal
        self.graphs: dict[int, Callable[..., Any]] = {}
        for weight in self.parameters():
            if weight.dim() > 1:  # the encoder's layers are copies of one
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss in nats, over the labels that are not ignored; the next call may overwrite it."""
        found: Tensor = self.graphs.get(len(ids), self.loss)(ids, labels)
        return found

    def loss(self, ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        """Return what :meth:`forward` returns, or with "none" the loss of each label; on a GPU in bf16."""
        length = ids.shape[1]
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            hidden = self.tokens(ids) + self.positions.weight[:length]
            mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device) if self.causal else None
            hidden = self.body(hidden, mask=mask, is_causal=self.causal)
            logits = functional.linear(hidden, self.tokens.weight)
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


class _Loss(nn.Module):
    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.model.loss(ids, labels)


class _CompiledLoss(_Loss):
    forward = torch.compile(_Loss.forward)


def make_model(
    model: str, text: Text, objective: str, seed: int, micro_batches: Iterable[int], *, compiled: bool = False
) -> LanguageModel:
    """Return a new model on the text's device, drawn by ``seed``.

    On a GPU, micro-batches of the given numbers of rows run as CUDA graphs, one forward and one backward: launched one
    by one, the kernels of so small a model take the host five times as long as the GPU.

    Args:
        compiled: whether the graphs are of compiled kernels, which takes half a minute for each process and size.
    """
    torch.manual_seed(seed)
    made = LanguageModel(model, len(text.unigram), text.train.shape[1], causal=objective == CAUSAL)
    made.to(text.train.device)
    if text.train.is_cuda:
        for rows in micro_batches:
            sample = inputs_and_labels(text.train[:rows], objective, text.mask, seed)
            made.graphs[rows] = torch.cuda.make_graphed_callables((_CompiledLoss if compiled else _Loss)(made), sample)
    return made


def make_optimizer(
    name: str, model: nn.Module, rate: float, beta1: float, beta2: float = 0.999, gamma: float = GAMMA
) -> torch.optim.Optimizer:
    """Return an optimizer by its name in ``MADE``, which has gamma = 1, or its twin's, which begins with VR."""
    base = name.removeprefix("VR")
    betas: dict[str, object] = {"momentum": beta1} if base == "Momentum" else {"betas": (beta1, beta2)}
    gamma = 1.0 if name == base else gamma
    return MADE[base](parameter_groups(model), lr=rate, gamma=gamma, weight_decay=WEIGHT_DECAY[base], **betas)


def chunks(examples: Examples, first: int, count: int, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Return ``count`` examples from ``first`` on, in micro-batches of ``size``."""
    return zip(*(of[first : first + count].split(size) for of in examples), strict=True)


def accumulate(model: nn.Module, examples: Examples, first: int, batch: int, k: int) -> Tensor:
    """Run ``batch`` examples from ``first`` on forward and backward, in k micro-batches; return their mean loss."""
    for param in model.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)  # it would be a graph's own buffer, which the next one overwrites
    total = torch.zeros((), device=examples[0].device)
    for ids, labels in chunks(examples, first, batch, batch // k):
        loss = model(ids, labels) / k
        loss.backward()
        total += loss.detach()
    return total


@torch.no_grad()
def held_out_loss(model: nn.Module, examples: Examples, micro_batch: int) -> float:
    """Return the loss over all predicted tokens, nats each; a CUDA graph runs micro-batches of its own size alone."""
    counts = (examples[1] != IGNORED_LABEL).sum(1)
    total = torch.zeros((), dtype=torch.float64, device=examples[0].device)
    for (ids, labels), count in zip(
        chunks(examples, 0, len(counts), micro_batch), counts.split(micro_batch), strict=True
    ):
        total += model(ids, labels).double() * count.sum()
    return float(total / counts.sum())


def prepare(to_measure: Sequence[Any]) -> None:
    """Prepare the texts of settings once for all processes."""
    for text in dict.fromkeys(setting.text for setting in to_measure):
        prepared(text)


def on_text(train: Callable[[Any, Text], Row]) -> Callable[[Any], Row]:
    """Return a function that runs ``train`` with a setting and its text.

    On a CPU with one thread: so small a model gains nothing from others, which wait for it.
    """

    def measure(setting: Any) -> Row:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return train(setting, load_text(setting.text, setting.sequence_length))
        finally:
            torch.set_num_threads(threads)
            gc.collect()  # a model and its graphs refer to each other

    return measure
