"""Old import paths warn the user and are the modules that took their place."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ds_vrgd.moved import MOVED, new_name

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("old, new", MOVED.items())
def test_the_old_name_is_the_new_module(old: str, new: str) -> None:
    expected = importlib.import_module(new)
    spec = expected.__spec__
    importlib.import_module(old.partition(".")[0])
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=rf"^{old} is now {new}\. Import it from there\.$") as caught:
        found = importlib.import_module(old)
    assert found is expected
    assert found.__spec__ is spec  # its own, under its own name
    assert {warning.filename for warning in caught} == {__file__}


def test_an_attribute_of_the_package_forwards_too() -> None:
    import ds_vrgd.engines.deepspeed

    vars(ds_vrgd).pop("zero", None)
    sys.modules.pop("ds_vrgd.zero", None)
    with pytest.warns(FutureWarning, match="ds_vrgd.zero is now ds_vrgd.engines.deepspeed") as caught:
        assert ds_vrgd.zero.leave_out_shared_memory_op is ds_vrgd.engines.deepspeed.leave_out_shared_memory_op
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match="module 'ds_vrgd' has no attribute 'zeroth'"):
        _ = ds_vrgd.zeroth


def test_import_ds_vrgd_alone_reaches_the_modules_of_the_pages() -> None:
    program = "import ds_vrgd; ds_vrgd.schedules.legw_warmup_ratio; ds_vrgd.hf.RankCallback"
    subprocess.run([sys.executable, "-W", "error::FutureWarning:__main__", "-c", program], check=True, cwd=ROOT)


def test_a_module_of_a_package_that_has_moved_is_not_loaded_twice() -> None:
    from ds_vrgd.engines.deepspeed import observer

    sys.modules.pop("ds_vrgd.zero.observer", None)
    with pytest.warns(FutureWarning, match="ds_vrgd.zero.observer is now ds_vrgd.engines.deepspeed.observer"):
        assert importlib.import_module("ds_vrgd.zero.observer") is observer


def test_no_old_name_hides_a_module_that_exists() -> None:
    for old in MOVED:
        place = ROOT / old.replace(".", "/")
        assert not place.is_dir() or not any(place.glob("*.py")), f"{old} has moved, and {place} has modules"
        assert not place.with_suffix(".py").is_file()


def test_other_names_are_left_alone() -> None:
    assert new_name("ds_vrgd.optim") is None
    assert new_name("ds_vrgd.zeroth") is None
    assert new_name("ds_vrgd.training.log") == "ds_vrgd_recipes.run.log"
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ds_vrgd.no_such_module")
    assert find_spec("ds_vrgd.no_such_module") is None


def test_python_m_runs_it_and_says_where_it_is() -> None:
    command = [sys.executable, "-m", "benchmarks.evidence", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("usage: python -m evidence "), done.stderr
    assert "FutureWarning: benchmarks.evidence is now evidence." in done.stderr
