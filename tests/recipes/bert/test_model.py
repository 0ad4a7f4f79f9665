"""The losses are those of transformers; vectors are kept apart in the optimizer."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForPreTraining

from ds_vrgd_recipes.bert.examples import ExampleBuilder, SpecialIds
from ds_vrgd_recipes.bert.model import PretrainingModel, bert_config
from ds_vrgd_recipes.bert.packing import pack
from ds_vrgd_recipes.bert.prepared import PreparedData
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.run.groups import parameter_groups


@pytest.fixture(scope="module")
def model(run: RunFile, data: PreparedData) -> PretrainingModel:
    torch.manual_seed(0)
    return PretrainingModel(bert_config(run.model, len(data.tokenizer)))


def test_loss_equals_that_of_transformers(model: PretrainingModel, data: PreparedData) -> None:
    builder = ExampleBuilder(data.train, data.chunks["train", 32], 32, SpecialIds.of(data.tokenizer))
    batch = builder.batch([0, 1, 2], [(0,), (1,), (2,)])
    model.eval()
    masked_lm, next_sentence = model(**pack(batch), longest=32)
    padded = AutoModelForPreTraining.from_config(copy.deepcopy(model.network.config), attn_implementation="eager")
    padded.load_state_dict(model.network.state_dict())
    whole = padded.eval()(**batch).loss  # logits at all positions, labels of -100 ignored
    assert (masked_lm + next_sentence).item() == pytest.approx(whole.item(), rel=1e-6)


def test_a_batch_that_masks_nothing_has_no_masked_lm_loss(model: PretrainingModel) -> None:
    ids = torch.full((2, 8), 7)
    batch = {
        "input_ids": ids,
        "token_type_ids": torch.zeros_like(ids),
        "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
        "next_sentence_label": ids[:, 0] * 0,
    }
    masked_lm, _ = model(**pack(batch), longest=8)
    assert masked_lm.item() == 0.0


def test_position_table_and_padded_vocabulary(run: RunFile) -> None:
    config = bert_config(run.model, 30522)
    assert config.vocab_size == 30528  # the next multiple of 8
    assert bert_config(run.model, 8192).vocab_size == 8192
    assert config.max_position_embeddings == 512  # although the longest sequence of the run is 32


def test_biases_and_norms_have_neither_decay_nor_adaptation(model: PretrainingModel) -> None:
    matrices, vectors = parameter_groups(model)
    assert vectors["weight_decay"] == 0.0
    assert vectors["adapt"] is False
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    in_vectors = {names[id(parameter)] for parameter in vectors["params"]}
    assert in_vectors == {name for name in names.values() if name.endswith("bias") or "LayerNorm" in name}
    assert len(matrices["params"]) + len(vectors["params"]) == len(names)  # the tied head is one parameter
