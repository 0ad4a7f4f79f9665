"""Documents of a corpus, one string each, streamed: no corpus is ever held in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ds_vrgd.bert.errors import InputError
from ds_vrgd.bert.packages import package_documents
from ds_vrgd.bert.runfile import DatasetsCorpus, FolderCorpus, PackagesCorpus


def documents(corpus: PackagesCorpus | FolderCorpus | DatasetsCorpus) -> Iterator[str]:
    """Documents in a fixed order; lines of a document are separated by line breaks.

    Raises:
        InputError: the corpus is missing, empty, unreadable or not UTF-8. Raised while iterating, at the place.
    """
    if isinstance(corpus, PackagesCorpus):
        for name in corpus.names:
            yield from package_documents(name)
    elif isinstance(corpus, FolderCorpus):
        yield from _folder_documents(corpus.path)
    else:
        yield from _dataset_documents(corpus)


def _folder_documents(folder: Path) -> Iterator[str]:
    if not folder.is_dir():
        raise InputError(f"corpus.path={folder} is not a folder; give a folder of UTF-8 .txt files")
    files = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    if not files:
        raise InputError(f"corpus.path={folder} holds no .txt file; put the text there as UTF-8 .txt files")
    if not any(path.stat().st_size for path in files):
        raise InputError(f"corpus.path={folder}: all {len(files)} .txt files are empty; fill them or change the path")
    for path in files:
        yield from _file_documents(path)


def _file_documents(path: Path) -> Iterator[str]:
    """Blocks of lines between blank lines."""
    block: list[str] = []
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise InputError(
                    f"corpus.path: {path} line {number} is not UTF-8 (byte 0x{raw[error.start]:02x}); convert the "
                    "file, for example with iconv -f latin1 -t utf-8"
                ) from error
            if line:
                block.append(line)
            elif block:
                yield "\n".join(block)
                block = []
    if block:
        yield "\n".join(block)


def _dataset_documents(corpus: DatasetsCorpus) -> Iterator[str]:
    import datasets  # costs a second to import; most runs do not need it

    try:
        rows = datasets.load_dataset(corpus.name, corpus.subset, split=corpus.split, streaming=True)
    except (ValueError, OSError) as error:  # the library's own errors derive from these two
        raise InputError(
            f"corpus.name={corpus.name} (subset {corpus.subset}, split {corpus.split}) cannot be loaded: {error}; "
            "correct the name, or download the text and use corpus: {source: folder, path: ...}"
        ) from error
    for row in rows:
        text = row.get(corpus.text_column)
        if not isinstance(text, str):
            raise InputError(
                f"corpus.text_column={corpus.text_column} is no text column of {corpus.name}, which has "
                f"{sorted(row)}; name one of them"
            )
        if text.strip():
            yield text
