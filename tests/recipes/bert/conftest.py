"""A small corpus and its prepared data; no network."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ds_vrgd_recipes.bert.prepare import prepare
from ds_vrgd_recipes.bert.prepared import PreparedData, open_prepared
from ds_vrgd_recipes.bert.runfile import RunFile
from tests.recipes.bert.cases import PART, corpus_text, run_settings
from tests.recipes.bert.launching import ROOT, Whole, launch


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


@pytest.fixture(scope="session")
def whole(corpus_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    run_file = folder / "run.yaml"
    run_file.write_text(yaml.safe_dump(run_settings(corpus_folder)), encoding="utf-8")
    arguments = ["--config", str(ROOT / "configs" / "ds_vrgd.json"), "--run", str(run_file), "--output"]
    launched = launch(2, *arguments, str(folder / "whole"))
    assert launched.status == 0, launched.stderr
    return Whole(folder / "whole", arguments, launched)
