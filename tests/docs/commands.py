"""The commands of the documentation: found in its ``sh`` blocks, and their arguments parsed by their own programs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed.launcher import runner
from torch.distributed.run import get_args_parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "docker/README.md", "recipes/README.md"]
PAGES += [f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# docs/CLUSTERS.md writes this word for the command that it gives first.
RUN = (
    "scripts/pretrain_bert.py --deepspeed_config configs/ds_vrgd.json --run configs/bert-large/32k.yaml "
    "--output /shared/bert-large --resume auto"
)
FOLDERS = (
    *("configs/", "scripts/", "docker/", "tests/", "examples/", "benchmarks/", "evidence/", "recipes/"),
    *("constraints/", ".ci/"),
)


@dataclass(frozen=True)
class Command:
    """One command, without variables in front of it and without ``.venv/bin/``."""

    page: str
    line: int
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return shlex.join(self.words)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}: {self}"


def commands_of(page: str, text: str) -> Iterator[Command]:
    """Every command of a page's shell blocks."""
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n") + 1
        for joined in block.group(1).replace("\\\n", "\\\0").split("\n"):
            # [--option VALUE] is an option that may be left out.
            given = re.sub(r" \[(--[^]]*)\]", r" \1", joined.replace("\\\0", " "))
            given = re.sub(r"\bRUN$", RUN, given)
            words = shlex.split(given, comments=True)
            environment = []
            while words and re.match(r"[A-Z_]+=", words[0]):
                name, _, value = words.pop(0).partition("=")
                environment.append((name, value))
            if words:
                words[0] = words[0].removeprefix(".venv/bin/")
                yield Command(page, line, tuple(words), tuple(environment))
            line += 1 + joined.count("\0")


def all_commands() -> list[Command]:
    return [command for page in PAGES for command in commands_of(page, (ROOT / page).read_text(encoding="utf-8"))]


class Parsed(Exception):
    """A program has parsed its arguments, and does no more."""


@contextlib.contextmanager
def only_parsing() -> Iterator[None]:
    """Programs end where they have parsed their arguments."""
    with contextlib.ExitStack() as patches:
        for name in ("parse_args", "parse_intermixed_args"):
            parse = getattr(argparse.ArgumentParser, name)

            def parse_and_end(parser: argparse.ArgumentParser, *arguments: Any, parse: Any = parse) -> None:
                parse(parser, *arguments)
                raise Parsed

            patches.enter_context(mock.patch.object(argparse.ArgumentParser, name, parse_and_end))
        yield


def parse_program(program: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Let a Python program parse its arguments. Wrong ones end as argparse ends: SystemExit."""
    run = runpy.run_module if module else runpy.run_path
    named = program if module else str(ROOT / program)
    with (
        mock.patch.object(sys, "argv", [program, *arguments]),
        mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        only_parsing(),
        contextlib.suppress(Parsed),
    ):
        run(named, run_name="__main__")
        raise AssertionError(f"{program} has parsed no arguments")


def check_arguments(words: Sequence[str]) -> None:
    """Check a command without running it: files that it names are there, options are options of its program.

    Raises:
        AssertionError, SystemExit: they are not.
        LookupError: nothing is known of the program.
    """
    for word in words:
        name = word.rpartition("=")[2].partition(" ")[0]
        if name.startswith(FOLDERS):
            assert (ROOT / name).exists(), f"{name} is not in the repository"
    program, *arguments = words
    if program.endswith(".py"):
        parse_program(program, arguments)
    elif program in ("python", "python3"):
        if arguments[0] == "-m":
            parse_program(arguments[1], arguments[2:], module=True)
        else:
            parse_program(arguments[0], arguments[1:])
    elif program in ("ds-vrgd", "ds-vrgd-recipes"):
        parse_program(f"{program.replace('-', '_')}.cli", arguments, module=True)
    elif program == "deepspeed":
        parsed = runner.parse_args(arguments)
        parse_program(parsed.user_script, parsed.user_args, module=parsed.module)
    elif program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        parse_program(parsed.training_script, parsed.training_script_args, module=parsed.module)
    elif program == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        for word in arguments:
            if "=" in word:
                assert re.search(rf"\b{word.partition('=')[0]}\b", makefile), f"the Makefile knows no {word}"
            else:
                assert re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE), f"the Makefile has no {word}"
    elif program in ("sbatch", "docker", "kubectl"):
        inner = [i for i, word in enumerate(words) if word in ("ds-vrgd", "scripts/pretrain_bert.py")]
        if inner:
            check_arguments(words[inner[0] :])
    elif program.endswith((".sh", ".ci/run")):
        assert os.access(ROOT / program, os.X_OK), f"{program} cannot be executed"
        subprocess.run(["bash", "-n", ROOT / program], check=True)
    elif program not in ("pip", "pre-commit", "source"):
        raise LookupError(program)
