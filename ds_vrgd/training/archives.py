"""Files out of wheels, npm's and Debian's archives, without unpacking them to the disk."""

from __future__ import annotations

import gzip
import re
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_AR_HEADER = 60  # bytes: name 16, time 12, owner 6, group 6, mode 8, size 10, end 2


def read_archive(path: Path, wanted: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of the files whose name fits ``wanted``, a regular expression for its end.

    A wheel's by name, others' in the order in which they lie in the archive; ``.gz`` and ``.dz`` are decompressed.

    Raises:
        OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, zlib.error: the archive is damaged.
    """
    pattern = re.compile(rf"(?:.*/)?(?:{wanted})")
    for name, content in _members(path, pattern):
        yield name, gzip.decompress(content) if name.endswith((".gz", ".dz")) else content


def _members(path: Path, pattern: re.Pattern[str]) -> Iterator[tuple[str, bytes]]:
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if pattern.fullmatch(name):
                    yield name, wheel.read(name)
        return
    with path.open("rb") as file:
        if path.suffix == ".deb":
            _seek_data(file)
        # As a stream: an archive of 200 MB of files is decompressed once, and never held.
        with tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                if member.isfile() and pattern.fullmatch(member.name):
                    content = archive.extractfile(member)
                    assert content is not None  # of a regular file
                    yield member.name, content.read()


def _seek_data(file: BinaryIO) -> None:
    """Go to where the files' archive begins in a Debian package: the last member of an ar archive (deb(5))."""
    if file.read(8) != b"!<arch>\n":
        raise tarfile.ReadError("this is no Debian package")
    while len(header := file.read(_AR_HEADER)) == _AR_HEADER:
        if header.startswith(b"data.tar"):
            return
        size = int(header[48:58])
        file.seek(size + size % 2, 1)
    raise tarfile.ReadError("the Debian package holds no data.tar")
