"""Releases are stated once: older ones are refused, and newer ones compared with what the adapter relies on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ds_vrgd.engines.deepspeed.fused import choose_reduction
from ds_vrgd.engines.deepspeed.versions import (
    DEEPSPEED,
    ENGINE,
    MEASURED,
    OVERRIDE,
    TORCH,
    WRAPPERS,
    check_class,
    check_engine,
    check_versions,
    is_among,
    is_newer,
)

ROOT = Path(__file__).parents[3]
GOOD_DEEPSPEED, GOOD_TORCH = "0.19.8", "2.13.0+cpu"


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)


@pytest.mark.parametrize("version", ["0.19.8", "0.19.12", "0.20.0", "1.0"])
@pytest.mark.parametrize("build", ["", "+cu128", ".dev3", "rc1"])
def test_supported_deepspeed_is_accepted(version: str, build: str) -> None:
    check_versions(version + build, GOOD_TORCH)


@pytest.mark.parametrize("version", ["0.9.5", "0.18.9", "0.19.0", "0.19.7", "0.19.7.dev1"])
def test_other_deepspeed_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"DeepSpeed {version} is not among .* deepspeed>=0\.19\.8.*{OVERRIDE}=1"):
        check_versions(version, GOOD_TORCH)


@pytest.mark.parametrize("version", ["0.0.0", "unknown", ""])
def test_source_tree_without_a_version_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match="is not among the supported releases"):
        check_versions(version, GOOD_TORCH)


@pytest.mark.parametrize("version, named", [("0.18.2", False), ("0.18.3", True), ("0.19.3", True), ("0.19.4", False)])
def test_refusal_names_the_fault_of_a_release(version: str, named: bool) -> None:
    with pytest.raises(RuntimeError, match=r"several configurations reduce the gradients wrongly") as refused:
        check_versions(version, GOOD_TORCH)
    assert ("issue 8224" in str(refused.value)) == named


def test_other_torch_is_refused_and_both_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"^torch 1\.13\.1\+cpu is not among .* torch>=2\.9"):
        check_versions(GOOD_DEEPSPEED, "1.13.1+cpu")
    with pytest.raises(RuntimeError, match=r"DeepSpeed 0\.18\.2 .*; torch 1\.13\.1 "):
        check_versions("0.18.2", "1.13.1")


def test_override_warns_of_what_is_at_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERRIDE, "1")
    with pytest.warns(UserWarning, match=r"DeepSpeed 0\.18\.3 is not among .* may be silently wrong"):
        check_versions("0.18.3", GOOD_TORCH)
    monkeypatch.setenv(OVERRIDE, "0")
    with pytest.raises(RuntimeError):
        check_versions("0.18.3", GOOD_TORCH)


def test_import_of_the_adapter_is_refused_before_any_name_of_deepspeed_is_needed(tmp_path: Path) -> None:
    """A DeepSpeed that has nothing but a version. (That ``import ds_vrgd`` survives it: tests/engines.)"""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text('__version__ = "0.9.5"\n')
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    found = subprocess.run(
        [sys.executable, "-c", "import ds_vrgd.engines.deepspeed"],
        env={name: value for name, value in os.environ.items() if name != OVERRIDE} | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "UnsupportedRelease: DeepSpeed 0.9.5 is not among the supported releases" in found.stderr.splitlines()[-1]


class _Changed(DeepSpeedEngine):
    def step(self, closure: object = None) -> None:
        pass


def test_newer_engine_class_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    check_class(DeepSpeedEngine, "0.20.0")
    check_class(_Changed, GOOD_DEEPSPEED)  # measured: tests/engines/deepspeed/test_privates.py
    changed = r"DeepSpeed 0\.20\.0 is newer than 0\.19\.8.*changed or removed DeepSpeedEngine\.step, which"
    with pytest.raises(RuntimeError, match=rf"{changed}.*Install deepspeed==0\.19\.8"):
        check_class(_Changed, "0.20.0")
    monkeypatch.setenv(OVERRIDE, "1")
    with pytest.warns(UserWarning, match=changed):
        check_class(_Changed, "0.20.0")


def engine_with(wrapper: str, *without: str) -> SimpleNamespace:
    """Return what has every attribute that the adapter relies on, except for some of the wrapper's."""
    parts = dict.fromkeys(name for name in WRAPPERS[wrapper] if name not in without)
    return SimpleNamespace(**dict.fromkeys(ENGINE) | {"optimizer": type(wrapper, (), parts)()})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_newer_engine_is_compared(wrapper: str) -> None:
    with pytest.warns(UserWarning, match=r"DeepSpeed 0\.20\.0: newer than .* ds-vrgd doctor --deepspeed_config"):
        check_engine(engine_with(wrapper), "0.20.0")
    with pytest.raises(RuntimeError, match=rf"changed or removed {wrapper}\.clip_grad, which"):
        check_engine(engine_with(wrapper, "clip_grad"), "0.20.0")
    engine = engine_with(wrapper)
    del engine.device
    with pytest.raises(RuntimeError, match=r"changed or removed DeepSpeedEngine\.device, which"):
        check_engine(engine, "0.20.0")


def test_measured_engine_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_engine(SimpleNamespace(optimizer=None), GOOD_DEEPSPEED)


def test_what_only_fused_mode_needs_leaves_observe_mode() -> None:
    wrapper = DeepSpeedZeroOptimizer.__new__(DeepSpeedZeroOptimizer)
    wrapper.cpu_offload = False
    engine = SimpleNamespace(optimizer=wrapper, zero_optimization_stage=lambda: 2, has_moe_layers=False)
    replaced, why = choose_reduction(engine, "auto")
    assert not replaced
    assert "DeepSpeedZeroOptimizer has no _grad_acc_hooks" in why
    with pytest.raises(ValueError, match=r"reduction=\"fused\" cannot serve .* has no _grad_acc_hooks"):
        choose_reduction(engine, "fused")


@pytest.mark.parametrize(
    "name, version, newer",
    [
        ("DeepSpeed", "0.19.8", False), ("DeepSpeed", "0.19.8+cu128", False), ("DeepSpeed", "0.19.9", True),
        ("DeepSpeed", "0.20.0.dev1", True), ("DeepSpeed", "0.19.7", False), ("torch", "2.13.1+cpu", False),
        ("torch", "2.14.0", True), ("torch", "unknown", False),
    ],
)  # fmt: skip
def test_newer_is_newer_than_the_measured_release(name: str, version: str, newer: bool) -> None:
    assert is_newer(name, version) == newer


def test_pyproject_asks_for_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["deepspeed"]]
    asked = {requirement.name: requirement.specifier for requirement in map(Requirement, requirements)}
    assert asked["deepspeed"] == SpecifierSet(DEEPSPEED)
    assert asked["torch"] == SpecifierSet(TORCH)


def test_page_has_a_figure_and_nothing_wrong_for_what_is_supported() -> None:
    page = (ROOT / "docs" / "COMPATIBILITY.md").read_text(encoding="utf-8")
    assert f"deepspeed{DEEPSPEED}\n" in page
    assert f"torch{TORCH}\n" in page
    header, *rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line.startswith("| ")][:20]
    releases = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header) and row[0][0].isdigit()]
    assert MEASURED["DeepSpeed"] == max((row["DeepSpeed"] for row in releases), key=Version)
    assert all(f"torch {MEASURED['torch']}." in row["measured with"] for row in releases)
    for row in releases:
        assert is_among(row["DeepSpeed"], DEEPSPEED), row
        assert row["wrong"] == "0", row


def test_torch_that_hides_gradients_from_hooks_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"torch 2\.9\.0.*use_reentrant=True"):
        check_versions(GOOD_DEEPSPEED, "2.9.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_versions(GOOD_DEEPSPEED, "2.10.0")
