"""The network to fine-tune: from a saved model, from a checkpoint of a pre-training run, or random."""

from __future__ import annotations

import contextlib
import io
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from transformers import (
    AutoConfig,
    AutoModelForQuestionAnswering,
    BertConfig,
    BertForQuestionAnswering,
    BertTokenizerFast,
)

from ds_vrgd.engines.deepspeed import CheckpointError, read_plain, run_nothing
from ds_vrgd.manifest import first_fault
from ds_vrgd_recipes.bert.model import bert_config
from ds_vrgd_recipes.bert.runfile import ModelSection
from ds_vrgd_recipes.bert.vocabulary import load_tokenizer, vocabulary_sha256
from ds_vrgd_recipes.run.checkpoint import description_of, newest
from ds_vrgd_recipes.run.errors import InputError

_HEAD = "qa_outputs."
_ATTENTION = "sdpa"


@dataclass(frozen=True)
class Weights:
    """A network's configuration and tokenizer, and its weights in fp32 under the names of BertForQuestionAnswering.

    Attributes:
        state: without ``qa_outputs`` if the model was only pre-trained; empty for random weights.
        origin: the source of the weights, for the user.
    """

    config: BertConfig
    tokenizer: BertTokenizerFast
    state: dict[str, torch.Tensor]
    origin: str

    @property
    def has_head(self) -> bool:
        """Return whether these weights can answer."""
        return any(name.startswith(_HEAD) for name in self.state)

    def without_state(self) -> Weights:
        """Return the same network with random weights."""
        return replace(self, state={}, origin=f"random, in the shape of {self.origin}")

    def model(self, seed: int) -> BertForQuestionAnswering:
        """Return a new network; weights that are not in ``state`` are random, from ``seed``."""
        torch.manual_seed(seed)
        model: BertForQuestionAnswering = AutoModelForQuestionAnswering.from_config(
            self.config, attn_implementation=_ATTENTION, dtype=torch.float32
        )
        if self.state:
            model.load_state_dict(self.state, strict=False)  # ``load_weights`` has compared the names
        return model


def load_weights(path: Path, tokenizer: Path | None) -> Weights:
    """Read the weights that ``--model`` names.

    Args:
        path: a saved BERT (``config.json`` and weights), an output folder of a pre-training run (its ``model``, or else
            its newest checkpoint), or one ``step-...`` folder of it.
        tokenizer: folder of the tokenizer, where it is not with the weights.

    Raises:
        InputError: no such folder holds a BERT, its files are damaged, or its tokenizer is missing or differs.
    """
    for folder in (path, path / "model"):
        if (folder / "config.json").is_file():
            weights = _saved(folder, tokenizer)
            break
    else:
        weights = _checkpoint(path, tokenizer)
    _check_names(weights)
    if len(weights.tokenizer) > weights.config.vocab_size:
        raise InputError(
            f"--tokenizer has {len(weights.tokenizer)} pieces and the model {weights.origin} has "
            f"{weights.config.vocab_size}; give the tokenizer that the model was trained with"
        )
    return weights


def _saved(folder: Path, tokenizer: Path | None) -> Weights:
    try:
        config = AutoConfig.from_pretrained(str(folder))
        if config.model_type != "bert":
            raise InputError(f"--model {folder} is a {config.model_type}, not a BERT; give the folder of a BERT")
        # "auto", the library's default, would keep bf16 weights in bf16, where small updates are lost.
        model, loading = BertForQuestionAnswering.from_pretrained(
            str(folder), dtype=torch.float32, output_loading_info=True
        )
    except pickle.UnpicklingError as error:  # transformers reads tensors alone
        raise InputError(
            f"--model {folder} cannot be loaded: its weights are damaged, or name something that is no tensor, to be "
            "called when they are read. Nothing of it was run; give a folder that transformers saved"
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"--model {folder} cannot be loaded: {error}; give a folder that transformers saved"
        ) from error
    if loading["mismatched_keys"]:
        raise InputError(f"--model {folder}: config.json and weights disagree on {sorted(loading['mismatched_keys'])}")
    missing = set(loading["missing_keys"])
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in missing}
    return Weights(config, _tokenizer(tokenizer or folder), state, str(folder))


def _checkpoint(path: Path, tokenizer: Path | None) -> Weights:
    checkpoint = newest(path)
    if checkpoint is None:
        raise InputError(
            f"--model {path} is neither a saved model (there is no config.json) nor a checkpoint of a pre-training "
            "run; give the folder model of a finished run, its --output, or one step-... folder of its checkpoints"
        )
    fault = first_fault(checkpoint)
    if fault is not None:
        raise InputError(f"--model: checkpoint {checkpoint} is damaged: {fault}; give another step-... folder")
    description = description_of(checkpoint)
    pieces = _tokenizer(tokenizer or checkpoint.parents[1] / "data" / "tokenizer")
    if vocabulary_sha256(pieces) != description["vocabulary_sha256"]:
        raise InputError(
            f"--tokenizer: {checkpoint} was trained with another vocabulary; give the folder of its tokenizer "
            "(tokenizer in prepared_data of the run file)"
        )
    whole = {name.removeprefix("network."): tensor for name, tensor in _checkpoint_state(checkpoint).items()}
    state = {
        name: tensor.float()
        for name, tensor in whole.items()
        if name.startswith("bert.") and not name.startswith("bert.pooler.")  # answers need no pooler
    }
    config = bert_config(ModelSection.model_validate(description["model"]), len(pieces))
    return Weights(config, pieces, state, f"{checkpoint} (after {description['step']} updates)")


def _checkpoint_state(checkpoint: Path) -> dict[str, Any]:
    """Return whole weights of the engine's module: ZeRO's fp32 masters, or the weights as they were trained with.

    Raises:
        InputError: a file is damaged, or names a program to be run. Nothing was run.
    """
    try:
        for path in sorted(checkpoint.glob("*.pt")):
            read_plain(path)
        if any(checkpoint.glob("*_optim_states.pt")):
            # ValueError: shards of DeepSpeed's BF16_Optimizer, which its own function does not read; rank 0 saved all
            # weights beside them, in bf16, as it does without ZeRO.
            with contextlib.suppress(ValueError), contextlib.redirect_stdout(io.StringIO()), run_nothing():
                state: dict[str, Any] = get_fp32_state_dict_from_zero_checkpoint(
                    str(checkpoint.parent), tag=checkpoint.name
                )
                return state
        module: dict[str, Any] = read_plain(checkpoint / "mp_rank_00_model_states.pt")["module"]
    except CheckpointError as error:
        raise InputError(f"--model: {error}") from error
    return module


def _tokenizer(folder: Path) -> BertTokenizerFast:
    try:
        return load_tokenizer(folder)
    except InputError as error:
        raise InputError(f"--tokenizer: {folder} holds no tokenizer; give the folder of the model's own") from error


def _check_names(weights: Weights) -> None:
    """Raise InputError unless the weights are all of an encoder, in the shapes of the configuration."""
    with torch.device("meta"):
        wanted = BertForQuestionAnswering(weights.config).state_dict()
    wrong = [
        name
        for name, tensor in wanted.items()
        if not name.startswith(_HEAD) and (name not in weights.state or weights.state[name].shape != tensor.shape)
    ]
    if wrong:
        raise InputError(
            f"--model: {weights.origin} lacks {len(wrong)} of the {len(wanted)} weights of its BERT, or has them in "
            f"another shape: {', '.join(wrong[:3])}, ...; give a folder that holds a whole BERT"
        )
