"""``ds-vrgd completion``: what a shell completes after ``ds-vrgd``."""

from __future__ import annotations

import argparse
from pathlib import Path

# Written once into a file: a completion that asks the program itself would import torch and DeepSpeed at every TAB.
SHELLS = ("bash", "zsh", "tcsh")
DESCRIPTION = """\
Print the completion script of a shell. bash: write it to ~/.local/share/bash-completion/completions/ds-vrgd. zsh: to a
file _ds-vrgd in a folder of $fpath.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("completion", help="print what a shell completes", description=DESCRIPTION)
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    from ds_vrgd.extras import need

    need("completion", "shtab")
    import shtab

    complete_files(options.program)
    print(shtab.complete(options.program, shell=options.shell))
    return 0


def complete_files(parser: argparse.ArgumentParser) -> None:
    """Have every argument that is a path completed as one."""
    import shtab

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                complete_files(subparser)
        elif action.type is Path:
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab looks for
