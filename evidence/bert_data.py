"""Pre-training examples that lie on the device, so that a step waits for no loader: a micro-batch is a few slices.

Everything is made by the first call ever, in ``FOLDER``, and may be brought along from another machine:
``general``, ``general-8k`` and ``speeches`` (prepared text), ``cloze`` (questions) and ``banks`` (examples, made of the
text).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertTokenizerFast

from benchmarks.ranks import device_type
from ds_vrgd_recipes.bert.evaluation import unigram_log_probabilities
from ds_vrgd_recipes.bert.examples import Batch, ExampleBuilder, SpecialIds
from ds_vrgd_recipes.bert.prepare import prepare
from ds_vrgd_recipes.bert.prepared import PreparedData, open_prepared
from ds_vrgd_recipes.bert.runfile import Phase, RunFile
from ds_vrgd_recipes.bert.stream import MicroBatches, RankOrder, evaluation_batches, training_batches
from ds_vrgd_recipes.run.files import write_binary

FOLDER = Path("out/evidence/bert-data")
#: By name: corpora of docs/DATA.md, pieces of the vocabulary, and the sequence lengths that are prepared.
SPEECHES, GENERAL, GENERAL_8K = "speeches", "general", "general-8k"
TEXTS = {
    SPEECHES: (["sotu", "wiki"], 8192, (64, 128)),
    GENERAL: (["general"], 30522, (128, 512)),
    GENERAL_8K: (["general"], 8192, (64,)),
}
HELD_OUT_BATCH = 256
TOKENS = ("input_ids", "token_type_ids", "position_ids")
_SEED, _BLOCK = 1, 256
_ANY_MODEL = {"num_hidden_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "intermediate_size": 1}


@dataclass(frozen=True)
class Bank:
    """n packed examples end to end, of T tokens, m of them masked, as ``ds_vrgd_recipes.bert.packing.pack`` makes them.

    Attributes:
        tokens: the per-token tensors by name, each ``(T,)``.
        masked, labels: ``(m,)``, places in those, ascending, and the ids to be found there.
        next_sentence: ``(n,)``.
        starts, masked_starts: ``(n + 1,)`` int64, of each example in the tokens and among the masked; on the host.
    """

    tokens: dict[str, Tensor]
    masked: Tensor
    labels: Tensor
    next_sentence: Tensor
    starts: Tensor
    masked_starts: Tensor

    @classmethod
    def of(cls, blocks: list[Batch], device: torch.device) -> Bank:
        """All examples of packed batches, in order."""
        ends = torch.tensor([0] + [len(block["input_ids"]) for block in blocks]).cumsum(0)
        joined = {name: torch.cat([block[name] for block in blocks]) for name in (*TOKENS, "labels")}
        starts = torch.cat([block["starts"][:-1].long() + end for block, end in zip(blocks, ends[:-1], strict=True)])
        starts = torch.cat([starts, ends[-1:]])
        masked = torch.cat([block["masked_positions"] + end for block, end in zip(blocks, ends[:-1], strict=True)])
        return cls(
            {name: joined[name].to(device) for name in TOKENS},
            masked.to(device),
            joined["labels"].to(device),
            torch.cat([block["next_sentence_label"] for block in blocks]).to(device),
            starts,
            torch.searchsorted(masked, starts),
        )

    def ordered(self, order: Tensor) -> Bank:
        """Some of the examples, in the order of their numbers in ``order``, on the host."""
        device = self.labels.device
        starts, of_tokens = _gathered(self.starts, order, device)
        masked_starts, of_masked = _gathered(self.masked_starts, order, device)
        moved = _repeated(starts[:-1] - self.starts[order], masked_starts, device)
        return Bank(
            {name: tensor[of_tokens] for name, tensor in self.tokens.items()},
            self.masked[of_masked] + moved,
            self.labels[of_masked],
            self.next_sentence[order.to(device)],
            starts,
            masked_starts,
        )

    def micro_batch(self, first: int, count: int) -> Batch:
        """What ``pack`` makes of ``count`` examples from ``first`` on; views, and no wait for the device."""
        begin, end = int(self.starts[first]), int(self.starts[first + count])
        masked = slice(int(self.masked_starts[first]), int(self.masked_starts[first + count]))
        starts = (self.starts[first : first + count + 1] - begin).int()
        return {
            **{name: tensor[begin:end] for name, tensor in self.tokens.items()},
            "starts": starts.to(self.labels.device, non_blocking=True),
            "masked_positions": self.masked[masked] - begin,
            "labels": self.labels[masked],
            "next_sentence_label": self.next_sentence[first : first + count],
        }


def _gathered(starts: Tensor, order: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """New starts, and on the device for every new place the old one, of segments that are put into another order."""
    new = torch.nn.functional.pad(starts.diff()[order].cumsum(0), (1, 0))
    return new, _repeated(starts[:-1][order] - new[:-1], new, device) + torch.arange(int(new[-1]), device=device)


def _repeated(values: Tensor, starts: Tensor, device: torch.device) -> Tensor:
    """The value of each segment at each of its places; computed on the device, where there are millions of them."""
    lengths = starts.diff().to(device)
    return torch.repeat_interleave(values.to(device), lengths, output_size=int(starts[-1]))


@dataclass(frozen=True)
class Material:
    """What all runs of one length share.

    Attributes:
        held_out: packed batches on the device.
        entropy: of the held-out masked tokens for who ignores context, nats.
        tokenizer: None where nothing is asked about text.
    """

    bank: Bank
    held_out: list[Batch]
    entropy: float
    pieces: int
    tokenizer: BertTokenizerFast | None = None


def prepared(text: str) -> PreparedData:
    """One of ``TEXTS``, prepared if it is not."""
    names, size, lengths = TEXTS[text]
    run = RunFile.model_validate(
        {
            "model": _ANY_MODEL,
            "corpus": {"source": "packages", "names": names},
            "vocabulary": {"size": size},
            "checkpoint_every": 1,
            "phases": [_phase(length, _BLOCK).model_dump(exclude_none=True) for length in lengths],
        }
    )
    folder = FOLDER / text
    prepare(run.data_settings, run.sequence_lengths, folder, report=lambda line: print(f"data: {line}", flush=True))
    return open_prepared(run, folder)


@lru_cache(maxsize=1)
def material(text: str, sequence_length: int, examples: int, held_out: int) -> Material:
    """Examples of one of ``TEXTS``, from a file of ``FOLDER/banks``, which is made if it is not there."""
    data = prepared(text)
    path = FOLDER / "banks" / f"{data.sha256[:16]}-{sequence_length}-{examples}-{held_out}.pt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(material_of(data, sequence_length, examples, held_out), path)
    return replace(_load(path), tokenizer=data.tokenizer)


def _save(made: Material, path: Path) -> None:
    """Token ids and places in an example fit in 32 bits."""
    bank = vars(made.bank) | {"tokens": {name: tensor.int() for name, tensor in made.bank.tokens.items()}}
    write_binary(path, lambda file: torch.save({**vars(made), "bank": bank}, file))


def _load(path: Path) -> Material:
    found = torch.load(path, map_location=device_type(), weights_only=True)
    bank = found.pop("bank")
    tokens = {name: tensor.long() for name, tensor in bank.pop("tokens").items()}
    on_host = {name: bank.pop(name).cpu() for name in ("starts", "masked_starts")}
    return Material(Bank(tokens=tokens, **bank, **on_host), **found)


def material_of(data: PreparedData, sequence_length: int, examples: int, held_out: int) -> Material:
    """The first ``examples`` of an endless walk over the data, and ``held_out`` sequences at most; on the device."""
    device = torch.device(device_type())
    ids = SpecialIds.of(data.tokenizer)
    builders = {
        split: ExampleBuilder(documents, data.chunks[split, sequence_length], sequence_length, ids)
        for split, documents in (("train", data.train), ("held_out", data.held_out))
    }
    phase = _phase(sequence_length, examples)
    workers = max(0, min(24, (os.cpu_count() or 1) - 2)) if examples > 16 * _BLOCK else 0
    blocks = training_batches(MicroBatches(builders["train"], _SEED, 0, phase), RankOrder(phase, 0, 0, 1), workers)
    # Copies: what a loader's process sends is shared memory, and an open file as long as it lives.
    bank = Bank.of([{name: tensor.clone() for name, tensor in block.items()} for block in blocks], device)
    batches = list(evaluation_batches(builders["held_out"], held_out, HELD_OUT_BATCH, 0, 1))
    unigram = unigram_log_probabilities(data.unigram_counts)
    found = torch.cat([batch["labels"] for batch in batches])
    return Material(
        bank,
        [_on(batch, device) for batch in batches],
        -float(unigram[found.numpy()].mean()),
        len(data.tokenizer),
    )


def _on(batch: Mapping[str, Tensor], device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _phase(sequence_length: int, examples: int) -> Phase:
    block = min(_BLOCK, examples)
    return Phase(
        sequence_length=sequence_length, global_batch=examples, micro_batch=block, steps=1, lr=1.0, warmup_steps=0
    )
