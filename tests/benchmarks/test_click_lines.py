from __future__ import annotations

import json
from pathlib import Path

from benchmarks.click_lines import measure
from tests.recipes.clicks.cases import write_files


def test_every_line_is_read_and_prepared_each_time(tmp_path: Path) -> None:
    train, test = write_files(tmp_path, train_rows=300, test_rows=20)
    *_, read, prepared, _ = measure(train, test, tmp_path, repetitions=2)
    assert read.startswith("| read once | 300 | ")
    assert prepared.startswith("| prepared | 320 | ")
    for number in range(2):
        manifest = json.loads((tmp_path / f"prepared-{number}" / "manifest.json").read_text())
        assert [manifest["clicks"][name]["rows"] for name in ("train", "test")] == [300, 20]
