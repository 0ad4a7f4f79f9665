"""A small corpus and its prepared data; no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd.bert.prepare import prepare
from ds_vrgd.bert.prepared import PreparedData, open_prepared
from ds_vrgd.bert.runfile import RunFile
from tests.bert.cases import PART, corpus_text, run_settings


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(corpus_text(), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def run(corpus_folder: Path) -> RunFile:
    return RunFile.model_validate(run_settings(corpus_folder))


@pytest.fixture(scope="session")
def data_folder(run: RunFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared") / "data"
    # Parts of so few characters that there are several shards.
    prepare(run.data_settings, run.sequence_lengths, folder, report=lambda text: None, part_characters=PART)
    return folder


@pytest.fixture(scope="session")
def data(run: RunFile, data_folder: Path) -> PreparedData:
    return open_prepared(run, data_folder)
