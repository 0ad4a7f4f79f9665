"""The WordPiece vocabulary, trained on a corpus or read from a folder, as a transformers tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizerFast

from ds_vrgd_recipes.run.errors import InputError

_NORMALIZER = normalizers.BertNormalizer(lowercase=True)
_PRE_TOKENIZER = pre_tokenizers.BertPreTokenizer()
_MOST_CHARACTERS = 1000  # rarer ones become [UNK]; the library's own limit

_LONGEST_WORD = 100  # characters, the library's own limit, too: a longer word is [UNK] in any vocabulary
_RUN = re.compile(rf"\S{{{_LONGEST_WORD + 1},8192}}")  # 8192 at once, so that memory stays bounded

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def count_characters(texts: Iterable[str]) -> Counter[str]:
    """Count the characters of normalised texts."""
    counts = Counter[str]()
    for text in texts:
        codes = np.frombuffer(_NORMALIZER.normalize_str(text).encode("utf-32-le"), dtype="<u4")
        characters, occurrences = np.unique(codes, return_counts=True)
        counts.update(dict(zip(map(chr, characters.tolist()), occurrences.tolist(), strict=True)))
    return counts


def train_tokenizer(characters: Counter[str], texts: Iterable[str], size: int) -> BertTokenizerFast:
    """Train an uncased WordPiece vocabulary of at most ``size`` pieces, the special tokens first.

    The same texts give the same vocabulary. (By itself the library numbers pieces in the order of a randomised hash
    table, which decides between equally frequent merges; numbering all single characters beforehand prevents that.)
    Memory grows with the number of different words. Words of more than 100 characters are left out: their pieces would
    never be used, and a word of a million characters (a picture in base64) would take hours.

    Args:
        characters: ``count_characters`` of the texts.
        size: a small corpus yields fewer pieces.
    """
    by_frequency = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = sorted([character for character in by_frequency if not character.isspace()][:_MOST_CHARACTERS])
    continuing = ["##" + character for character in alphabet if _continues_a_word(character)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=SPECIAL_TOKENS + continuing,  # the only way to fix the numbers of continuing characters
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained = _tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(map(_without_endless_words, texts), trainer)
    # Built anew from the pieces, so that the continuing characters are ordinary pieces again.
    return BertTokenizerFast(tokenizer_object=_tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]")))


def _without_endless_words(text: str) -> str:
    return _RUN.sub(_usable_words, text)


def _usable_words(run: re.Match[str]) -> str:
    """Keep the short words of a run without blanks: ``https://a.b/c`` or Chinese is many words to BERT."""
    words = _PRE_TOKENIZER.pre_tokenize_str(_NORMALIZER.normalize_str(run[0]))
    return " ".join(word for word, _ in words if len(word) <= _LONGEST_WORD)


def _tokenizer(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _NORMALIZER
    tokenizer.pre_tokenizer = _PRE_TOKENIZER
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _continues_a_word(character: str) -> bool:
    """Return whether the character can continue a word: punctuation and Chinese characters are words of their own."""
    return len(_PRE_TOKENIZER.pre_tokenize_str(_NORMALIZER.normalize_str("a" + character))) == 1


def load_tokenizer(folder: Path | str) -> BertTokenizerFast:
    """Load a BERT tokenizer saved by transformers, or a folder that holds only BERT's ``vocab.txt``.

    Args:
        folder: a string is the name of a model on the hub.

    Raises:
        InputError: there is no tokenizer.
    """
    if isinstance(folder, str):
        try:  # not from_pretrained(name): it makes an empty tokenizer where there is no such model
            downloaded = snapshot_download(folder, allow_patterns=["vocab.txt", "tokenizer*.json"])
        except (OSError, ValueError) as error:
            raise InputError(
                f"vocabulary.name={folder} cannot be loaded ({error}); correct the name, or download the files of that "
                "tokenizer and give vocabulary: {folder: ...}"
            ) from error
        return load_tokenizer(Path(downloaded))
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        raise InputError(
            f"vocabulary.folder={folder} holds neither tokenizer.json nor vocab.txt; give the folder of a BERT "
            "tokenizer, or train one with vocabulary: {size: ...}"
        )
    return BertTokenizerFast.from_pretrained(str(folder))


def vocabulary_sha256(tokenizer: BertTokenizerFast) -> str:
    """Return the sha256 of the equivalent ``vocab.txt``: the pieces in the order of their ids, one per line."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece_and_id: piece_and_id[1])
    return hashlib.sha256("".join(piece + "\n" for piece, _ in pieces).encode()).hexdigest()
