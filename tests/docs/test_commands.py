"""Every command of the documentation runs, or says here why not; its arguments and files are checked all the same."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ds_vrgd_cli import main
from ds_vrgd_recipes.cli import main as recipes
from tests.docs.commands import PAGES, ROOT, Command, all_commands, check_arguments, commands_of

# Commands that run as they stand: at once, or in a copy of the repository, for they write.
AT_ONCE = ("ds-vrgd plan", "ds-vrgd-recipes plan")
IN_A_COPY = (
    "ds-vrgd doctor --deepspeed_config configs/ds_vrgd.json",
    "python -m evidence report",
    "python -m benchmarks.model",
)

# Beginning of a command -> why it does not run here. The longest that fits counts.
CLUSTER = "needs several nodes, or their scheduler; tests/clusters runs it with stand-ins"
DOCKER = "needs Docker"
SUITE = "is what runs this test, or a part of it"
PAID = (
    "takes GPUs and days; tests/recipes/bert/test_scripts.py and tests/clusters start the same program on a small run"
)
NOT_RUN = {
    "make demo": "takes minutes, and packages from a registry; tests/recipes/bert trains the same in small",
    "make test": SUITE,
    "make test-slow": SUITE,
    "make test-full": SUITE,
    "make lint": "CI runs it before the tests",
    "make package": "CI runs it before the tests",
    "make package-full": "installs all dependencies anew: minutes, gigabytes",
    "make format": "rewrites the working tree",
    "pip install": "installs from an index; make package installs the wheels that are built here",
    "make docs": "installs the site's tools; test_pages.py gathers its pages",
    "make venv": "installs an environment: every target does",
    "python -m http.server": "serves until it is stopped",
    "make release-check": "fails until the addresses are filled in; test_release.py runs its script",
    "make results": "needs a GPU; tests/benchmarks runs the parts",
    "make results-small": "takes minutes; tests/benchmarks runs the parts",
    ".ci/run": SUITE,
    "deepspeed scripts/pretrain_bert.py": PAID,
    "deepspeed --hostfile": CLUSTER,
    "deepspeed scripts/train_resnet.py": "takes minutes and a data set; tests/recipes/vision trains the same in small",
    "deepspeed --num_gpus 2 scripts/train_dlrm.py": "takes minutes and data; tests/recipes/clicks has it in small",
    "torchrun": CLUSTER,
    "sbatch": CLUSTER,
    "kubectl": CLUSTER,
    "docker": DOCKER,
    "scripts/launch_local.sh": PAID,
    "scripts/pretrain_bert.py": PAID,
    "ds-vrgd plot": "draws a run of minutes; tests/recipes/run/test_plot.py draws a log",
    "ds-vrgd suggest": "reads a run of minutes; tests/recipes/run/test_suggest.py reads a log",
    "ds-vrgd to-universal": "needs a checkpoint; tests/cli/test_to_universal.py makes one",
    "python scripts/prepare_bert_data.py": "names a reader's corpus; tests/recipes/bert/test_prepare_main.py has one",
    "ds-vrgd-recipes prepare-bert-data": "needs the hub; tests/recipes/bert/test_wikipedia_books.py has a stand-in",
    "python scripts/finetune_glue.py": "needs a model and a task; tests/recipes/bert/test_glue.py makes both",
    "python scripts/finetune_squad.py": "needs a model and questions; tests/recipes/bert/squad makes both",
    "python scripts/make_cloze_squad.py": "takes minutes, and packages; tests/recipes/bert/squad makes it of a text",
    "python scripts/compatibility.py": "installs other releases: minutes each",
    "python -m benchmarks --ranks": "takes GPUs; tests/benchmarks runs it on a tiny model",
    "python -m benchmarks.report results": "writes what the command above it has measured",
    "python -m benchmarks.model results": "writes what another command has measured",
    "python -m evidence bert": "takes a GPU; tests/evidence/test_bert.py runs a toy",
    "python -m evidence branches": "takes a GPU; tests/evidence/test_branches.py runs a toy",
    "python -m evidence language": "takes a GPU; tests/evidence/test_evidence_language.py runs a toy",
    "python -m evidence batch_warmup": "takes a GPU; tests/evidence/test_batch_warmup.py runs a toy",
    "python -m benchmarks.click_lines": "takes a minute, and a package; tests/benchmarks/test_click_lines.py has lines",
    "python -m benchmarks.checks": "takes GPUs; tests/benchmarks/test_checks.py has its parts",
    "python -m benchmarks.cpu_update": "takes minutes; tests/benchmarks/test_cpu_update.py runs it on a tiny model",
}
COMMANDS = all_commands()


def of(commands: list[Command], beginnings: tuple[str, ...]) -> list[Command]:
    """Those that begin so, each once."""
    found = {str(c): c for c in commands if reason_not_to_run(c) is None and str(c).startswith(beginnings)}
    return list(found.values())


def reason_not_to_run(command: Command) -> str | None:
    """The reason, from the longest entry that fits; an exact command that runs has none."""
    if str(command) in IN_A_COPY:
        return None
    fits = [start for start in NOT_RUN if f"{command} ".startswith(f"{start} ")]
    return NOT_RUN[max(fits, key=len)] if fits else None


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 30


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_every_command_runs_or_says_why_not(command: Command) -> None:
    runs = str(command).startswith(AT_ONCE) or str(command) in IN_A_COPY
    assert runs or reason_not_to_run(command), (
        f"{command.place}\nis new to this test. Add it to AT_ONCE or IN_A_COPY in {Path(__file__).name}, or to NOT_RUN "
        "with the reason why it cannot run here"
    )


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.place)
def test_arguments_and_files_are_right(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check_arguments(command.words)
    except LookupError:
        pytest.fail(f"{command.place}\n{command.words[0]} is a program that check_arguments does not know: teach it")
    except SystemExit:
        pytest.fail(f"{command.place}\n{capsys.readouterr().err}")


def test_make_test_is_not_given_a_file_of_slow_tests_alone() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for file in re.findall(r"make test PYTEST_ARGS='?(tests/\S+\.py)", text):
            lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
            assert "pytestmark = pytest.mark.slow" not in lines, (
                f"{page}: make test leaves out all of {file}. Use make test-slow"
            )


def test_every_entry_has_its_command() -> None:
    texts = [f"{command} " for command in COMMANDS]
    unused = [start for start in (*NOT_RUN, *AT_ONCE, *IN_A_COPY) if not any(t.startswith(f"{start} ") for t in texts)]
    assert unused == []


@pytest.mark.parametrize("command", of(COMMANDS, AT_ONCE), ids=str)
def test_it_runs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program = {"ds-vrgd": main, "ds-vrgd-recipes": recipes.main}[command.words[0]]
    assert program(command.words[1:]) == 0


@pytest.mark.slow  # the doctor trains two ranks
@pytest.mark.parametrize("text", IN_A_COPY)
def test_it_runs_in_a_copy(text: str, tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "*.egg-info", "__pycache__"))
    (command,) = {str(c): c for c in COMMANDS if str(c) == text}.values()
    words = list(command.words)
    words[:1] = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "ds_vrgd.cli"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **dict(command.environment)}
    environment["PYTHONPATH"] = f"{copy}:{copy / 'recipes'}"
    done = subprocess.run(words, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_blocks_are_read_as_a_shell_reads_them() -> None:
    page = (
        "text\n```sh\nA=1 make test   # some\nds-vrgd plan --run x \\\n  --gpus 2\n\nds-vrgd x [--tag T]\n```\n"
        "```json\n{}\n```\n"
    )
    found = list(commands_of("page.md", page))
    assert [command.words for command in found] == [
        ("make", "test"),
        ("ds-vrgd", "plan", "--run", "x", "--gpus", "2"),
        ("ds-vrgd", "x", "--tag", "T"),
    ]
    assert [command.line for command in found] == [3, 4, 7]
    assert found[0].environment == (("A", "1"),)


@pytest.mark.parametrize(
    "words, error",
    [
        (["ds-vrgd", "plan", "--runs", "x"], SystemExit),
        (["deepspeed", "scripts/pretrain_bert.py", "--run", "configs/demo.yaml", "--out", "x"], SystemExit),
        (["ds-vrgd", "plan", "--run", "configs/gone.yaml", "--gpus", "1"], AssertionError),
        (["make", "no-such-target"], AssertionError),
        (["no-such-program"], LookupError),
    ],
)
def test_what_is_wrong_is_found(words: list[str], error: type[BaseException]) -> None:
    with pytest.raises(error):
        check_arguments(words)
