"""A small tokenizer, a small BERT, and files of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import BertTokenizerFast

from ds_vrgd_recipes.bert.runfile import ModelSection

NAMES = ["Ada", "Bo", "Cy", "Dee", "Eli", "Flo", "Gus", "Hal", "Ida", "Jo"]
CITIES = ["Rome", "Oslo", "Lima", "Bonn", "Cork", "Nice", "Graz", "Pisa", "Metz", "York"]
FILL = "then it was quiet and nobody said a word about it for a very long time ."
MODEL = ModelSection(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)


def small_tokenizer() -> BertTokenizerFast:
    """Words of the cases below, and the letters of all others."""
    words = {
        word.lower()
        for word in [*NAMES, *CITIES, *FILL.split(), "lives", "in", "where", "does", "live", "?", "the", "a"]
    }
    letters = {chr(code) for code in range(ord("a"), ord("z") + 1)} | set("0123456789.,-'")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words | letters)]
    pieces += [f"##{letter}" for letter in sorted(letters)]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return BertTokenizerFast(tokenizer_object=tokenizer)


def paragraph(context: str, *questions: tuple[str, str, str]) -> dict[str, Any]:
    """``questions``: (id, question, answer, which stands in ``context``)."""
    return {
        "context": context,
        "qas": [
            {"id": name, "question": question, "answers": [{"text": answer, "answer_start": context.index(answer)}]}
            for name, question, answer in questions
        ],
    }


def squad(*paragraphs: dict[str, Any]) -> dict[str, Any]:
    return {"version": "1.1", "data": [{"title": "cases", "paragraphs": list(paragraphs)}]}


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def twenty_questions() -> dict[str, Any]:
    """Where ten people live, asked twice: in a short text, and in one of several windows."""
    paragraphs = []
    for number, (name, city) in enumerate(zip(NAMES, CITIES, strict=True)):
        fact, question = f"{name} lives in {city} .", f"Where does {name} live ?"
        paragraphs.append(paragraph(fact, (f"short-{name}", question, city)))
        before = " ".join([FILL] * (number % 4))
        after = " ".join([FILL] * (4 - number % 4))
        paragraphs.append(paragraph(f"{before} {fact} {after}".strip(), (f"long-{name}", question, city)))
    return squad(*paragraphs)
