"""The supported releases are stated once, checked at import, and told from those that were found wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ds_vrgd.zero import compat
from ds_vrgd.zero.versions import DEEPSPEED, FUSED, OVERRIDE, TORCH, check_versions, is_among

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
GOOD_DEEPSPEED, GOOD_TORCH = "0.19.8", "2.13.0+cpu"


@pytest.fixture(autouse=True)
def _no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(OVERRIDE, raising=False)


@pytest.mark.parametrize("version", ["0.19.0", "0.19.7", "0.19.8", "0.19.12"])
@pytest.mark.parametrize("build", ["", "+cu128", ".dev3", "rc1"])
def test_supported_deepspeed_is_accepted(version: str, build: str) -> None:
    check_versions(version + build, GOOD_TORCH)


@pytest.mark.parametrize("version", ["0.9.5", "0.17.2", "0.17.6", "0.18.9", "0.20.0", "0.20.0.dev1", "1.0"])
def test_other_deepspeed_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"DeepSpeed {version} is not among .* deepspeed>=0\.19\.0.*{OVERRIDE}=1"):
        check_versions(version, GOOD_TORCH)


@pytest.mark.parametrize("version", ["0.0.0", "unknown", ""])
def test_source_tree_without_a_version_is_refused(version: str) -> None:
    with pytest.raises(RuntimeError, match="is not among the supported releases"):
        check_versions(version, GOOD_TORCH)


def test_other_torch_is_refused_and_both_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"^torch 1\.13\.1\+cpu is not among .* torch>=2"):
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


def test_import_is_refused_before_any_name_of_deepspeed_is_needed(tmp_path: Path) -> None:
    """A DeepSpeed that has nothing but a version."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text('__version__ = "0.9.5"\n')
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    found = subprocess.run(
        [sys.executable, "-c", "import ds_vrgd"],
        env={name: value for name, value in os.environ.items() if name != OVERRIDE} | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "RuntimeError: DeepSpeed 0.9.5 is not among the supported releases" in found.stderr.splitlines()[-1]


def test_pyproject_asks_for_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {requirement.name: requirement.specifier for requirement in map(Requirement, project["dependencies"])}
    assert asked["deepspeed"] == SpecifierSet(DEEPSPEED)
    assert asked["torch"] == SpecifierSet(TORCH)


def test_page_has_a_figure_for_both_ends_and_nothing_wrong_among_the_supported() -> None:
    page = (ROOT / "docs" / "COMPATIBILITY.md").read_text(encoding="utf-8")
    assert f"deepspeed{DEEPSPEED}\n" in page
    assert f"torch{TORCH}\n" in page
    header, *rows = [re.split(r" *\| *", line)[1:-1] for line in page.splitlines() if line.startswith("| ")][:20]
    releases = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header) and row[0][0].isdigit()]
    assert {"0.16.9", "0.17.2", "0.19.0", "0.19.8"} <= {row["DeepSpeed"] for row in releases}
    for row in releases:
        assert (row["supported"] == "yes") == is_among(row["DeepSpeed"], DEEPSPEED)
        assert row["supported"] == "no" or row["wrong"] == "0", row


def test_fused_mode_is_for_supported_releases_only() -> None:
    for release in ("0.19.8", "0.19.9"):
        assert is_among(release, FUSED)
        assert is_among(release, DEEPSPEED)
        assert compat.too_old_to_fuse(release) is None
    assert "deepspeed>=0.19.8" in str(compat.too_old_to_fuse("0.19.7"))


def engine(stage: int, device: str = "cpu", **settings: Any) -> SimpleNamespace:
    """As much of an engine as the refusals ask for."""
    offload = SimpleNamespace(device="cpu") if settings.get("offload") else None
    zero = SimpleNamespace(offload_optimizer=offload, contiguous_gradients=settings.get("contiguous", True))
    model, accumulation = settings.get("dtypes", (torch.float32, torch.float32))
    return SimpleNamespace(
        zero_optimization_stage=lambda: stage,
        get_data_types=lambda: (model, accumulation),
        device=torch.device(device),
        _config=SimpleNamespace(zero_config=zero, grad_accum_dtype="fp32", _param_dict=settings.get("json", {})),
    )


FP16_INTO_FP32 = (torch.float16, torch.float32)
BF16_INTO_FP32 = (torch.bfloat16, torch.float32)

#: Each with the last release that has it, the first that has not, and what the message must contain.
DEFECTIVE = {
    "copies": (engine(1, "cuda", dtypes=FP16_INTO_FP32), "0.19.7", "0.19.8", "grad_accum_dtype=fp32 .* Use stage 2"),
    "copies, offload": (engine(1, dtypes=BF16_INTO_FP32, offload=True), "0.19.7", "0.19.8", "Use stage 2"),
    "no reduction": (engine(2, contiguous=False), "0.19.7", "0.19.8", "contiguous_gradients=false .* Set it to true"),
    "half a gather": (engine(3), "0.19.7", "0.19.8", r"zero_optimization.stage=3 on the CPU.* Use stage 2"),
    "own count": (
        engine(2, json={"managed_gradient_accumulation": False}), "0.19.3", "0.19.4",
        "managed_gradient_accumulation=false.* Leave it out",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTIVE)
def test_what_an_older_release_gets_wrong_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    built, last, fixed, message = DEFECTIVE[name]
    (reason,) = compat.defects(built, last)
    assert re.search(message, reason)
    assert f"or install deepspeed>={fixed} (this is {last})" in reason
    assert compat.defects(built, fixed) == []


def test_what_an_older_release_gets_right_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for built in (
        engine(1, dtypes=BF16_INTO_FP32),  # has a wrapper of its own
        engine(2, dtypes=FP16_INTO_FP32),
        engine(2, "cuda", contiguous=False),
        engine(0, contiguous=False),
        engine(3, "cuda"),
        engine(2, json={"managed_gradient_accumulation": True}),
    ):
        assert compat.defects(built, "0.19.3") == []
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert compat.defects(engine(3), "0.19.3") == []


def test_torch_that_hides_gradients_from_hooks_is_told_of() -> None:
    with pytest.warns(UserWarning, match=r"torch 2\.6\.0.*use_reentrant=True"):
        check_versions(GOOD_DEEPSPEED, "2.6.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_versions(GOOD_DEEPSPEED, "2.10.0")
