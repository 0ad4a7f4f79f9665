"""The WordPiece vocabulary: trained on a corpus or taken from a folder, always as a transformers tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertTokenizerFast

from ds_vrgd.bert.errors import InputError

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train_tokenizer(texts: Iterable[str], size: int) -> BertTokenizerFast:
    """Train an uncased WordPiece vocabulary of at most ``size`` pieces, the special tokens first.

    A small corpus yields fewer pieces than ``size``.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=SPECIAL_TOKENS,
        continuing_subword_prefix="##",
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", tokenizer.token_to_id("[SEP]")), ("[CLS]", tokenizer.token_to_id("[CLS]"))
    )
    return BertTokenizerFast(tokenizer_object=tokenizer)


def load_tokenizer(folder: Path) -> BertTokenizerFast:
    """Load a BERT tokenizer saved by transformers, or a folder that holds only BERT's ``vocab.txt``.

    Raises:
        InputError: the folder holds no tokenizer, or one without BERT's special tokens.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.txt")):
        raise InputError(
            f"vocabulary.folder={folder} holds neither tokenizer.json nor vocab.txt; give the folder of a BERT "
            "tokenizer, or train one with vocabulary: {size: ...}"
        )
    tokenizer = BertTokenizerFast.from_pretrained(str(folder))
    missing = [token for token in SPECIAL_TOKENS if token not in tokenizer.get_vocab()]
    if missing:
        raise InputError(
            f"vocabulary.folder={folder} lacks the special tokens {missing}; use a BERT tokenizer, or train one with "
            "vocabulary: {size: ...}"
        )
    return tokenizer


def vocabulary_sha256(tokenizer: BertTokenizerFast) -> str:
    """Hash of the pieces in the order of their ids, one a line: the sha256 of the equivalent ``vocab.txt``."""
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece_and_id: piece_and_id[1])
    return hashlib.sha256("".join(piece + "\n" for piece, _ in pieces).encode()).hexdigest()
