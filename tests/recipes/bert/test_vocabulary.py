"""The vocabulary: reproducible, uncased, and what `transformers` loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from transformers import AutoTokenizer, BertTokenizerFast

from ds_vrgd_recipes.bert.vocabulary import (
    SPECIAL_TOKENS,
    count_characters,
    load_tokenizer,
    train_tokenizer,
    vocabulary_sha256,
)
from ds_vrgd_recipes.run.errors import InputError
from tests.recipes.bert.cases import corpus_text


def train() -> BertTokenizerFast:
    texts = corpus_text().split("\n\n")
    return train_tokenizer(count_characters(texts), texts, 200)


@pytest.fixture(scope="module")
def tokenizer() -> BertTokenizerFast:
    return train()


def pieces(tokenizer: BertTokenizerFast) -> list[str]:
    return sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)


def test_special_tokens_come_first_and_the_size_is_kept(tokenizer: BertTokenizerFast) -> None:
    assert pieces(tokenizer)[:5] == SPECIAL_TOKENS
    assert len(tokenizer) == 200
    assert sorted(tokenizer.all_special_ids) == [0, 1, 2, 3, 4]


def test_words_that_are_always_unknown_take_no_part(tokenizer: BertTokenizerFast) -> None:
    """A million letters without a blank would take hours; what BERT splits into words anyway counts as before."""
    texts = corpus_text().split("\n\n")
    characters = count_characters(texts)
    with_run = train_tokenizer(characters, [*texts, "ba" * 500_000, texts[0] + " " + "da" * 51], 200)
    without = train_tokenizer(characters, [*texts, texts[0]], 200)
    assert pieces(with_run) == pieces(without)
    assert with_run.tokenize("da" * 51) == ["[UNK]"]
    slashed = train_tokenizer(characters, [text.replace(" ", "/") for text in texts], 200)
    spaced = train_tokenizer(characters, [text.replace(" ", " / ") for text in texts], 200)
    assert pieces(slashed) == pieces(spaced)


def test_same_text_gives_the_same_vocabulary(tokenizer: BertTokenizerFast) -> None:
    # Left to itself the library breaks ties by a randomised hash table: 12 runs never agree on this corpus.
    for _ in range(3):
        assert pieces(train()) == pieces(tokenizer)


def test_uncased_without_accents_and_punctuation_apart(tokenizer: BertTokenizerFast) -> None:
    assert tokenizer.tokenize("BÁdo, bado.") == tokenizer.tokenize("bado , BADO .")


def test_punctuation_never_continues_a_word(tokenizer: BertTokenizerFast) -> None:
    assert "." in pieces(tokenizer)
    assert "##." not in pieces(tokenizer)
    assert "##a" in pieces(tokenizer)


def test_saved_folder_and_vocab_txt_load_alike(tokenizer: BertTokenizerFast, tmp_path: Path) -> None:
    tokenizer.save_pretrained(str(tmp_path / "saved"))
    vocab_txt = "".join(piece + "\n" for piece in pieces(tokenizer))
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "vocab.txt").write_text(vocab_txt, encoding="utf-8")
    text = "Bado tuge, kiru!"
    for folder in ("saved", "plain"):
        loaded = load_tokenizer(tmp_path / folder)
        assert loaded(text).input_ids == tokenizer(text).input_ids
        # the hash is the one that `sha256sum vocab.txt` prints
        assert vocabulary_sha256(loaded) == hashlib.sha256(vocab_txt.encode()).hexdigest()
    pair = AutoTokenizer.from_pretrained(tmp_path / "saved")("bado", "tuge")
    assert (pair.input_ids[0], pair.input_ids[-1]) == (2, 3)  # [CLS] ... [SEP]
    assert set(pair.token_type_ids) == {0, 1}


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vocabulary\.folder=.* holds neither"):
        load_tokenizer(tmp_path)


def test_a_name_is_looked_up_on_the_hub(
    tokenizer: BertTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here in the hub's cache, offline: the folders that a download of the model leaves there."""
    from huggingface_hub import constants

    model = tmp_path / "models--bert-large-uncased"
    tokenizer.save_pretrained(str(model / "snapshots" / "0123"))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0123", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert vocabulary_sha256(load_tokenizer("bert-large-uncased")) == vocabulary_sha256(tokenizer)
    with pytest.raises(InputError, match=r"(?s)vocabulary\.name=bert-large-cased cannot be loaded .* correct the name"):
        load_tokenizer("bert-large-cased")
