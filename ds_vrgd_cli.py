"""The command ``ds-vrgd``: its options. The work is done by ``ds_vrgd.cli`` and, if installed, ``ds_vrgd_recipes.cli``.

It is beside the package, because ``import ds_vrgd`` imports torch and DeepSpeed: ``--help`` must not take seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

EPILOG = """\
ds-vrgd COMMAND --help shows the options of a command. Exit status: 0 done; 1 not done, or not exact; 2 the input, or
what is installed, cannot be used. The trainings are commands of ds-vrgd-recipes (pip install ds_vrgd_recipes), which
deepspeed, torchrun, srun or mpirun starts.
"""
#: Subcommands that ds_vrgd_recipes brings, and what --help shows of them where it is not installed.
OF_RECIPES = {
    "plan": "what a pre-training run needs on a number of GPUs",
    "plot": "draw the log of a run",
    "suggest": "a batch size and a learning rate from a short probe run",
}
DOCTOR = """\
Train a small model for some steps under a DeepSpeed configuration, or under FSDP2 in fp32 and bf16, compare its weights
with a dense float64 reference, and print a table for a bug report. The ranks are started here, unless a launcher
(deepspeed, torchrun, srun, mpirun) has done so. With --cluster (pip install ds_vrgd_recipes), compare the nodes of all
ranks that a launcher has started; without a launcher, check this one alone.
"""
DOCTOR_STATUS = """\
Exit status: 0 exact; 1 not exact, or a rank failed or hung; 2 the configuration is refused or cannot be read, or its
optimizer is not one of ds_vrgd. With --cluster: 0 ready; 1 not ready.
"""
TO_UNIVERSAL = """\
Convert a checkpoint of ZeRO stage 1, 2 or 3, with every state of every optimizer of ds_vrgd, so that any number of
ranks can load it: engine.load_checkpoint(OUTPUT), with "checkpoint": {"load_universal": true} in the DeepSpeed JSON.
Needs no GPU. A checkpoint of stage 0 loads as it is. Nothing that the files name is run. A file that differs from the
checkpoint's manifest stops the conversion.
"""
# The completion is written once into a file: one that runs the program would be slow at every TAB.
COMPLETION = """\
Print the completion script of a shell. bash: write it to ~/.local/share/bash-completion/completions/ds-vrgd. zsh: to a
file _ds-vrgd in a folder of $fpath.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. Wrong usage exits with 2, as always in argparse."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command = next((each for each in arguments if not each.startswith("-")), None)
    if command in OF_RECIPES and not has_recipes():  # before its options, which only the recipes know
        return missing_recipes(f"ds-vrgd {command}")
    return parse_and_run(build_parser(), arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every subcommand."""
    parser = argparse.ArgumentParser(
        prog="ds-vrgd", description="Tools for variance-reduced training with DeepSpeed.", epilog=EPILOG
    )
    subparsers = prepare(parser, "ds_vrgd")
    add_doctor(subparsers)
    for name, text in OF_RECIPES.items():
        if has_recipes():
            import_module(f"ds_vrgd_recipes.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=f"{text} (pip install ds_vrgd_recipes)")
    _add_to_universal(subparsers)
    completion = subparsers.add_parser("completion", help="print what a shell completes", description=COMPLETION)
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"), help="the shell")
    completion.set_defaults(run=_complete)
    return parser


def prepare(parser: argparse.ArgumentParser, distribution: str) -> Subparsers:
    """Add what the commands of both distributions share, and return where subcommands are added.

    A subcommand sets ``run``: a function that takes the options and returns the exit status. One with ``--json`` leaves
    its JSON in ``options.result``.
    """
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # DeepSpeed's launcher puts it first
    parser.set_defaults(program=parser, distribution=distribution, json=False)
    return parser.add_subparsers(metavar="COMMAND", dest="command")


def parse_and_run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    """Run the subcommand that the arguments name; without one, print the help or the version."""
    given = next((each for each in arguments if not each.startswith("-")), "")
    commands: Mapping[str, object] = next(
        action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    if given not in commands and (near := difflib.get_close_matches(given, commands, 1)):
        parser.error(f"there is no command {given!r}; did you mean {near[0]!r}?")
    options = parser.parse_args(arguments)
    if options.version:
        print(options.distribution, _version(options.distribution))
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    options.result = None
    try:
        with _stdout_as_stderr() if options.json else contextlib.nullcontext():
            status = int(options.run(options))
    except (ModuleNotFoundError, RuntimeError) as error:
        return unusable(error)
    if options.result is not None:
        print(options.result, flush=True)
    return status


def unusable(error: Exception) -> int:
    """Print what to install, and return the exit status; raise the error again if it is about something else."""
    from ds_vrgd.extras import MissingExtra, UnsupportedRelease

    if not isinstance(error, (MissingExtra, UnsupportedRelease)):
        raise error
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 2


def _version(distribution: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a source tree
        return str(import_module(distribution).__version__)


@contextlib.contextmanager
def _stdout_as_stderr() -> Iterator[None]:
    """Send what this process and its children print to standard error: DeepSpeed logs to standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def has_recipes() -> bool:
    """Return whether ds_vrgd_recipes is installed."""
    return find_spec("ds_vrgd_recipes") is not None


def missing_recipes(command: str) -> int:
    """Print what to install for a command; return its exit status."""
    print(
        f"error: {command} is a part of ds_vrgd_recipes, which is not installed. Install it: "
        "pip install ds_vrgd_recipes",
        file=sys.stderr,
        flush=True,
    )
    return 2


def add_doctor(subparsers: Subparsers) -> None:
    """Add ``doctor``, a command of both distributions."""
    parser = subparsers.add_parser(
        "doctor", help="check that training is exact under a configuration", description=DOCTOR, epilog=DOCTOR_STATUS
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--deepspeed_config", "--config", type=Path, metavar="JSON", help="DeepSpeed's configuration")
    what.add_argument(
        "--fsdp", nargs="?", const="VRLAMB", metavar="OPTIMIZER", help="PyTorch's FSDP2 instead of DeepSpeed (VRLAMB)"
    )
    what.add_argument(
        "--megatron", nargs="?", const="VRLAMB", metavar="OPTIMIZER",
        help="Megatron-Core's distributed optimizer instead (VRLAMB); on GPUs",
    )  # fmt: skip
    what.add_argument("--cluster", action="store_true", help="check the nodes before a run, instead of a configuration")
    parser.add_argument(
        "--world", type=_positive, metavar="N", help="ranks to start (default: the GPUs, else 2 on CPU)"
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help="your own model: a function that returns (model, batches), where batches(step, index) is a tuple or dict "
        "of the model's arguments, and the model returns its loss, or something with .loss (default: a tiny "
        "transformer)",
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps (default: 3)")
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="with --cluster: where the run will write (default: here)"
    )
    parser.add_argument("--free", type=float, metavar="GB", help="with --cluster: what must be free there (default: 1)")
    add_json(parser)
    parser.set_defaults(run=_doctor)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a subcommand."""
    parser.add_argument("--json", action="store_true", help="print JSON alone; everything else goes to standard error")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _doctor(options: argparse.Namespace) -> int:
    for name in ("world", "model", "steps") if options.cluster else ("output", "free"):
        if getattr(options, name) is not None:
            other = "--deepspeed_config" if options.cluster else "--cluster"
            print(f"error: --{name} has no meaning without {other}", file=sys.stderr)
            return 2
    if options.cluster and not has_recipes():
        return missing_recipes("ds-vrgd doctor --cluster")
    where = "ds_vrgd_recipes.preflight.command" if options.cluster else "ds_vrgd.cli.doctor"
    return int(import_module(where).run(options))


def _add_to_universal(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "to-universal", help="convert a ZeRO checkpoint for another number of ranks", description=TO_UNIVERSAL
    )
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT_FOLDER", help="what engine.save_checkpoint was given")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the result is OUTPUT/TAG")
    parser.add_argument("--tag", help="of the checkpoint; the one that the file 'latest' names unless given")
    parser.add_argument(
        "--client-state-of-rank-0",
        action="store_true",
        help="where the client state of the ranks differs (stage 3), take rank 0's for all",
    )
    parser.set_defaults(run=lambda options: import_module("ds_vrgd.cli.to_universal").run(options))


def _complete(options: argparse.Namespace) -> int:
    """Print the script by which a shell completes what follows ``ds-vrgd``, with files for every path."""
    from ds_vrgd.extras import need

    need("completion", "shtab")
    import shtab

    parsers = [options.program]
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.type is Path:
                action.complete = shtab.FILE
    print(shtab.complete(options.program, shell=options.shell))
    return 0


if __name__ == "__main__":
    sys.exit(main())
