"""Run files that no run can use: a bounded message, quickly."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.runfile import Section, read_run_file


class Inner(Section):
    steps: int = 1


class RunFile(Section):
    seed: int = 1
    lr: float = 0.1
    name: str = ""
    phases: list[Inner] | None = None
    more: dict[str, Any] | None = None


def read(path: Path, text: str | bytes) -> RunFile:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_run_file(path, RunFile, "configs/demo.yaml")


def bomb(last: str, link: str = "[{}]") -> str:
    """Nine levels of nine aliases: 387 million values of some 400 bytes."""
    levels = ["l0: &l0 {x: 1}"]
    for number in range(1, 10):
        body = link.format(", ".join([f"*l{number - 1}"] * 9))
        levels.append(f"l{number}: &l{number} {body}")
    return "\n".join([*levels, last])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bomb("seed: *l9"), "stands for more than 10,000 values, with its aliases; write them out"),
        (bomb("seed: 3"), "stands for more than 10,000 values"),
        (bomb("more: *l9", "{{<<: [{}]}}"), "stands for more than 10,000 values"),  # merge keys
        ("more: &a {b: *a}", "stands for more than 10,000 values"),  # within itself
        ("phases: &a [*a]", "stands for more than 10,000 values"),
        ("seed: " + "[" * 100_000, "is nested too deeply for a run file; see configs/demo.yaml"),
        ("more: " + "{a: " * 20_000, "is nested too deeply"),
        ("- " * 20_000, "is nested too deeply"),
        ("name: " + "a" * 5000, r"line 1: 'aaa.*a\.\.\. is too long for a value"),
        ("seed: " + "9" * 5000, "is too long for a value"),
        ("seed: 0x" + "f" * 5000, "is too long for a value"),
        ("# " + "a" * 300_000, "has more than 262,144 characters"),
        ("seed: 2024-99-99", "month must be in 1..12"),
        ("seed: 3\nlr: 1.0\nseed: 4", "line 3: the key 'seed' occurs twice in one section; remove one of them"),
        ("phases:\n  - {steps: 2, steps: 3}", "line 2: the key 'steps' occurs twice"),
        ("seed: !!python/object/apply:os.getcwd []", "is not a YAML file"),
        (b"seed: \xff", "is not a YAML file"),
        ("seed: \x00", "is not a YAML file"),
        ("lr: .inf", "lr=inf: input should be a finite number; change the value"),
        ("lr: .nan", "lr=nan: input should be a finite number"),
        ("lr: -1.0e+999", "lr=-inf: input should be a finite number"),
        ("".join(f"key{number}: 1\n" for number in range(900)), "key19=1: unknown key; .*\n  and 880 more"),
        ("seed: [" + "1, " * 3000 + "]", r"seed=\[1, 1, .*\.\.\.: input should be a valid integer"),
    ],
)  # fmt: skip
def test_what_is_no_run_file(tmp_path: Path, text: str | bytes, expected: str) -> None:
    started = time.monotonic()
    with pytest.raises(InputError, match=rf"(?s)--run .*run\.yaml.*{expected}") as found:
        read(tmp_path / "run.yaml", text)
    assert time.monotonic() - started < 10.0
    assert len(str(found.value)) < 2500


def test_aliases_of_ordinary_size_are_fine(tmp_path: Path) -> None:
    run = read(tmp_path / "run.yaml", "phases:\n- &first {steps: 3}\n- *first\n- {<<: *first}\n")
    assert run.phases is not None
    assert [phase.steps for phase in run.phases] == [3, 3, 3]


def test_a_file_without_an_end(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has more than 262,144 characters"):
        read_run_file(Path("/dev/zero"), RunFile, "configs/demo.yaml")


def test_overrides_replace_values(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 2\nphases: [{steps: 3}, {steps: 4}]", encoding="utf-8")

    def overridden(*overrides: str) -> RunFile:
        return read_run_file(path, RunFile, "configs/demo.yaml", overrides=overrides)

    run = overridden("lr=1e-3", "phases.1.steps=9", "name=a=b", "more.key=[1]")
    assert (run.seed, run.lr, run.name, run.more) == (2, 1e-3, "a=b", {"key": [1]})
    assert run.phases is not None
    assert [phase.steps for phase in run.phases] == [3, 9]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("sed=1", "sed=1: unknown key; did you mean seed?"),
        ("phases.0.step=1", r"phases.0.step=1: unknown key; did you mean steps\?"),
        ("phases.0.weight=1", "phases.0.weight=1: unknown key; remove it"),
        ("seed", "'seed' is not KEY=VALUE; write for example phases.0.lr=1e-3"),
        ("seed=fast", "seed='fast': input should be a valid integer"),
        ("phases.1.steps=2", "phases.1.steps=2: the run file has no place phases.1.steps"),
        ("seed.x=1", "seed.x=1: the run file has no place seed.x"),
        ("seed=[1", "'seed=\\[1': the key or the value cannot be read"),
        ("seed=" + "[" * 5000, "the key or the value cannot be read"),
    ],
)
def test_overrides_that_cannot_be_used(tmp_path: Path, override: str, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 2\nphases: [{steps: 3}]", encoding="utf-8")
    with pytest.raises(InputError, match=expected):
        read_run_file(path, RunFile, "configs/demo.yaml", overrides=[override])
