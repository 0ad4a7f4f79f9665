"""A sweep keeps every row, goes on where it stopped, and its report says what it was measured with."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import evidence
from benchmarks.pages import table
from evidence import experiment
from evidence.__main__ import main
from evidence.experiment import SIZES, Experiment, Row, Rows, called_for, load, sweep
from evidence.report import grouped, report, spread

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"command": "c", "date": "2026-01-01", "card": "CPU", "versions": {"torch": "2", "CUDA": "none"}}
MARKED = "before\n<!-- evidence toy: begin -->\n<!-- evidence toy: end -->\nafter\n"


@dataclass(frozen=True)
class Setting:
    rate: float
    seed: int
    betas: tuple[float, float] = (0.9, 0.99)


class Toy:
    """Counts what it measured; fails where it is told to."""

    def __init__(self) -> None:
        self.measured: list[Setting] = []
        self.fails: set[int] = set()

    def settings(self, size: str) -> list[Setting]:
        return [Setting(0.1, seed) for seed in range({"small": 3, "full": 4}[size])]

    def measure(self, setting: Setting) -> Row:
        if setting.seed in self.fails:
            raise RuntimeError("out of memory")
        self.measured.append(setting)
        return {"loss": float(setting.seed)}

    def tables(self, rows: Sequence[Row]) -> list[str]:
        body = [[str(rate), spread([row["loss"] for row in of])] for (rate,), of in grouped(rows, "rate").items()]
        return table(["rate", "loss"], body)

    def draw(self, figure: Any, rows: Sequence[Row]) -> None:
        figure.subplots().plot([row["loss"] for row in rows])


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    made = Toy()
    experiment = Experiment("A toy", made.settings, made.measure, made.tables, made.draw)
    monkeypatch.setitem(sys.modules, "evidence.toy", SimpleNamespace(EXPERIMENT=experiment))
    for module in (evidence, sys.modules["evidence.__main__"]):
        monkeypatch.setattr(module, "NAMES", ("toy",))
    return made


def test_rows_that_are_there_are_not_measured_again(toy: Toy, tmp_path: Path) -> None:
    for _ in range(2):
        assert main(["toy", "--output", str(tmp_path)]) == 0
    assert [setting.seed for setting in toy.measured] == [0, 1, 2]
    assert main(["--size", "full", "--output", str(tmp_path)]) == 0
    assert len(toy.measured) == 3 + 4, "another size is measured for itself"
    content = json.loads((tmp_path / "toy.json").read_text())
    assert [(row["size"], row["seed"], row["loss"]) for row in content["rows"]][:3] == [
        ("small", 0, 0.0), ("small", 1, 1.0), ("small", 2, 2.0),
    ]  # fmt: skip
    assert content["environments"][0]["command"] == "python -m evidence --size small"


def test_rows_call_for_more_which_come_first(monkeypatch: pytest.MonkeyPatch, toy: Toy, tmp_path: Path) -> None:
    """Each row calls for its rate's half, down to a quarter; one that fails is not tried again in the same sweep."""

    def halved(size: str, rows: Sequence[Row]) -> list[Setting]:
        return [Setting(row["rate"] / 2, row["seed"]) for row in rows if row["rate"] > 0.03]

    made = replace(load("toy"), follow_up=halved)
    monkeypatch.setattr(sys.modules["evidence.toy"], "EXPERIMENT", made)
    toy.fails = {1}
    rows = Rows(tmp_path / "toy.json")
    assert sweep("toy", "small", rows, ENVIRONMENT) == [Setting(0.1, 1)]
    assert [(one.rate, one.seed) for one in toy.measured] == [
        (0.1, 0), (0.05, 0), (0.025, 0), (0.1, 2), (0.05, 2), (0.025, 2),
    ]  # fmt: skip
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    assert report("toy", tmp_path, page) == f"toy: 6 of 7 rows of size small in {page}"


def test_what_rows_call_for_comes_first_also_where_the_plan_has_it_last(
    monkeypatch: pytest.MonkeyPatch, toy: Toy, tmp_path: Path
) -> None:
    made = replace(load("toy"), follow_up=lambda size, rows: [Setting(0.1, 2)] if rows else [])
    monkeypatch.setattr(sys.modules["evidence.toy"], "EXPERIMENT", made)
    rows = Rows(tmp_path / "toy.json")
    assert sweep("toy", "small", rows, ENVIRONMENT) == []
    assert [one.seed for one in toy.measured] == [0, 2, 1]
    # A page lists them as they are planned, however they were measured.
    assert [row["seed"] for row in rows.of("small", called_for(made, "small", rows))] == [0, 1, 2]


def test_a_failure_has_no_row_and_is_tried_again(toy: Toy, tmp_path: Path) -> None:
    toy.fails = {1}
    assert main(["toy", "--output", str(tmp_path)]) == 1
    assert [setting.seed for setting in toy.measured] == [0, 2]
    toy.fails = set()
    assert main(["toy", "--output", str(tmp_path)]) == 0
    assert [setting.seed for setting in toy.measured] == [0, 2, 1]


@pytest.mark.slow
def test_several_workers_measure_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In processes of their own, which load the experiment themselves."""
    linear = load("linear")
    few = [setting for setting in linear.settings("small") if setting.k == 8][:2]
    monkeypatch.setattr(sys.modules["evidence.linear"], "EXPERIMENT", replace(linear, settings=lambda _: few))
    rows = Rows(tmp_path / "linear.json")
    assert sweep("linear", "small", rows, ENVIRONMENT, workers=2) == []
    for setting in few:
        found = rows.find("small", setting)
        assert found is not None
        assert linear.measure(setting).items() <= found.items()


@pytest.mark.parametrize("path", sorted((ROOT / "evidence/rows").glob("*.json")), ids=lambda path: path.stem)
def test_the_rows_that_are_kept_are_those_of_settings(path: Path) -> None:
    """A sweep resumes from them: none would be measured again because a field has changed.

    Not all are called for: others may have made another point the best that variants start from.
    """
    rows, experiment = Rows(path), load(path.stem)
    kinds = {type(one): one for one in experiment.settings(SIZES[-1])}.values()
    for row in json.loads(path.read_text())["rows"]:
        one = next(one for one in kinds if row.keys() >= asdict(one).keys())
        kept = {name: tuple(row[name]) if isinstance(row[name], list) else row[name] for name in asdict(one)}
        assert rows.find(row["size"], replace(one, **kept)) == row
    found = [row for size in SIZES for row in rows.of(size, called_for(experiment, size, rows))]
    assert len(found) > 0.9 * len(json.loads(path.read_text())["rows"])


def test_workers_are_shared_out_to_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert experiment._devices(3) == ["3", "5", "3"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(experiment.torch.cuda, "device_count", lambda: 0)
    assert experiment._devices(2) == ["", ""]


def test_nothing_begins_that_would_end_after_the_deadline(toy: Toy, tmp_path: Path) -> None:
    rows = Rows(tmp_path / "toy.json")
    assert sweep("toy", "small", rows, ENVIRONMENT, deadline=0.0) == toy.settings("small")
    assert toy.measured == []


def test_each_kind_of_setting_has_a_duration_of_its_own(
    monkeypatch: pytest.MonkeyPatch, toy: Toy, tmp_path: Path
) -> None:
    """One that would end after the deadline leaves the time to shorter ones."""
    clock, seconds = [100.0], {"long": 50.0, "short": 3.0}
    kinds = ("short", "long", "long", "short")

    def measure(name: str, setting: Setting) -> tuple[Row, float]:
        toy.measure(setting)
        clock[0] += seconds[kinds[setting.seed]]
        return {"loss": 0.0}, seconds[kinds[setting.seed]]

    monkeypatch.setattr(experiment, "_measure", measure)
    monkeypatch.setattr(experiment.time, "monotonic", lambda: clock[0])
    made = replace(load("toy"), kind=lambda setting: kinds[setting.seed])
    monkeypatch.setattr(sys.modules["evidence.toy"], "EXPERIMENT", made)
    rows = Rows(tmp_path / "toy.json")
    assert sweep("toy", "full", rows, ENVIRONMENT, deadline=160.0) == [Setting(0.1, 2)]
    assert [one.seed for one in toy.measured] == [0, 1, 3]


def test_what_is_prepared_is_for_what_has_no_row(monkeypatch: pytest.MonkeyPatch, toy: Toy, tmp_path: Path) -> None:
    prepared: list[Sequence[Setting]] = []
    made = replace(load("toy"), prepare=prepared.append)
    monkeypatch.setattr(sys.modules["evidence.toy"], "EXPERIMENT", made)
    toy.fails = {1}
    for _ in range(2):
        sweep("toy", "small", Rows(tmp_path / "toy.json"), ENVIRONMENT)
    assert prepared == [toy.settings("small"), [Setting(0.1, 1)]]
    toy.fails.clear()
    for _ in range(2):
        sweep("toy", "small", Rows(tmp_path / "toy.json"), ENVIRONMENT)
    assert len(prepared) == 3


def test_a_result_may_not_hide_a_field(toy: Toy, tmp_path: Path) -> None:
    toy.measure = lambda setting: {"rate": 1.0}  # type: ignore[method-assign]
    experiment = Experiment("A toy", toy.settings, toy.measure, toy.tables, toy.draw)
    sys.modules["evidence.toy"].EXPERIMENT = experiment  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="rate is a field of the setting as well as a result"):
        sweep("toy", "small", Rows(tmp_path / "toy.json"), ENVIRONMENT)


def test_the_report_has_table_figure_and_origin(toy: Toy, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(MARKED)
    assert report("toy", tmp_path, page) is None
    sweep("toy", "small", Rows(tmp_path / "toy.json"), ENVIRONMENT)
    toy.fails = {0}
    for _ in range(2):
        assert report("toy", tmp_path, page) == f"toy: 3 of 3 rows of size small in {page}"
        text, drawn = page.read_text(), (tmp_path / "figures" / "toy.svg").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "| 0.1 | 1.000 (0.000–2.000) |" in text
    assert "![A toy](figures/toy.svg)" in text
    assert "`python -m evidence toy --size small`: 3 of 3 settings" in text
    assert "2026-01-01, CPU; torch 2.\n" in text, "what is not there is not named"
    report("toy", tmp_path, page)
    assert (tmp_path / "figures" / "toy.svg").read_text() == drawn, "the same rows give the same file"
    sweep("toy", "full", Rows(tmp_path / "toy.json"), ENVIRONMENT | {"card": "GPU"})
    assert report("toy", tmp_path, page) == f"toy: 3 of 4 rows of size full in {page}"
    assert "GPU" in page.read_text()


def test_the_spread_of_one_value_is_that_value() -> None:
    assert spread([2.0]) == "2.000"
    assert spread([3.0, 1.0, 2.0], digits=1) == "2.0 (1.0–3.0)"


def test_what_came_apart_is_the_worst_of_a_spread_and_has_no_digits() -> None:
    nan = float("nan")
    assert spread([nan, 1.0, 2.0], digits=1) == "2.0 (1.0–apart)"
    assert spread([1.0, nan, nan]) == "apart (1.000–apart)"
    assert spread([1.0, 1.2e29, 2.0], digits=1) == "2.0 (1.0–1e+29)"
    assert spread([nan]) == "apart"


def test_an_unknown_name_is_named(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["linaer"])
    assert "linaer: no such experiment" in capsys.readouterr().err


@pytest.mark.parametrize("name", evidence.NAMES)
def test_every_experiment_has_settings_of_both_sizes_and_a_place_on_the_page(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / load(name).page).read_text()
    assert f"<!-- evidence {name}: begin -->" in page
    for size in ("small", "full"):
        settings = load(name).settings(size)
        assert len(settings) == len(set(settings)) > 0
