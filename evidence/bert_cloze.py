"""Machine-made questions over Wikipedia passages (docs/SQUAD.md), answered by the networks of the BERT runs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import BertConfig, BertTokenizerFast

from benchmarks.ranks import device_type
from ds_vrgd_recipes.bert.squad.cloze import main as make_questions
from ds_vrgd_recipes.bert.squad.data import Questions, read_squad
from ds_vrgd_recipes.bert.squad.finetune import answered
from ds_vrgd_recipes.bert.squad.settings import Settings
from ds_vrgd_recipes.bert.squad.training import train
from ds_vrgd_recipes.bert.squad.weights import Weights
from ds_vrgd_recipes.bert.squad.windows import TokenisedQuestions, WindowSize, tokenise
from evidence.bert_data import FOLDER
from evidence.experiment import Row

QUESTIONS = FOLDER / "cloze"
ENCODER = "bert."
#: The same for every network; a window holds any of these passages whole.
SETTINGS = Settings(
    model=Path(),
    output=Path(),
    train_file=QUESTIONS / "train.json",
    predict_file=QUESTIONS / "dev.json",
    epochs=2,
    batch_size=64,
    lr=5e-4,
)


def make() -> None:
    """The questions, if they are not there."""
    if not SETTINGS.predict_file.exists() and make_questions(["--output", str(QUESTIONS)]):
        raise RuntimeError(f"no questions in {QUESTIONS}: see above")


def fine_tuned(
    config: BertConfig, state: Mapping[str, Tensor], tokenizer: BertTokenizerFast, seed: int, settings: Settings
) -> Row:
    """Scores after fine-tuning.

    Args:
        config: of the network; its vocabulary may be padded.
        state: of a ``transformers.BertForPreTraining``; fp32.
        seed: of the head's weights, dropout, and the order of the questions.

    Returns:
        ``cloze_f1`` and ``cloze_exact_match``, percent.
    """
    encoder = {name: tensor for name, tensor in state.items() if name.startswith(ENCODER)}
    device = torch.device(device_type())
    model = Weights(config, tokenizer, encoder, "a run of this sweep").model(seed).to(device)
    assert settings.train_file is not None
    to_train, asked, to_answer = _questions(tokenizer, settings.train_file, settings.predict_file, settings.window)
    train(model, to_train, settings, seed, device)
    *_, scores = answered(model, asked, to_answer, settings, device)
    return {"cloze_f1": scores.f1, "cloze_exact_match": scores.exact_match}


@lru_cache(maxsize=1)
def _questions(
    tokenizer: BertTokenizerFast, train_file: Path, predict_file: Path, size: WindowSize
) -> tuple[TokenisedQuestions, Questions, TokenisedQuestions]:
    asked = read_squad(predict_file, "dev")
    to_train = tokenise(read_squad(train_file, "train"), tokenizer, size, training=True)
    return to_train, asked, tokenise(asked, tokenizer, size, training=False)
