"""A small corpus and its prepared data; no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vrgd.bert.prepare import PreparedData, open_prepared, prepare
from ds_vrgd.bert.runfile import RunFile
from tests.bert.cases import corpus_text, run_settings


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
    prepare(run, folder, report=lambda text: None)
    return folder


@pytest.fixture(scope="session")
def data(run: RunFile, data_folder: Path) -> PreparedData:
    return open_prepared(run, data_folder)
