"""``ds-vrgd-recipes``: the trainings, and what is needed before and after them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from ds_vrgd_cli import add_doctor, parse_and_run, prepare, unusable
from ds_vrgd_recipes.cli import plan, plot, suggest

#: Programs that parse their own arguments, and what they do.
PROGRAMS = {
    "pretrain-bert": "pre-train BERT in phases",
    "prepare-bert-data": "prepare text for BERT pre-training",
    "finetune-squad": "fine-tune BERT on questions in the format of SQuAD v1.1",
    "finetune-glue": "fine-tune BERT on a task of GLUE",
    "make-cloze-squad": "make questions in that format of Wikipedia passages",
    "train-dlrm": "train DLRM on click logs",
    "train-resnet": "train a residual network",
}
DESCRIPTION = """\
Train with ds_vrgd. A launcher starts a training on every rank: srun or mpirun the command itself, torchrun and
deepspeed the module (torchrun -m -- ds_vrgd_recipes.cli, deepspeed --module ds_vrgd_recipes.cli).
"""
EPILOG = """\
ds-vrgd-recipes COMMAND --help shows the options of a command. --run and --deepspeed_config take a path, or the name of
a file that is installed with the package, such as bert-large/64k-32k.yaml. Exit status: 0 done; 1 not done; 2 the
input, or what is installed, cannot be used.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. Wrong usage exits with 2, as always in argparse."""
    arguments = sys.argv[1:] if arguments is None else arguments
    position = next((i for i, each in enumerate(arguments) if not each.startswith("-")), len(arguments))
    if position < len(arguments) and arguments[position] in PROGRAMS:
        # What stands before it is DeepSpeed's --local_rank, which the programs take as well.
        return _run_program(arguments[position], [*arguments[:position], *arguments[position + 1 :]])
    return parse_and_run(build_parser(), arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser with every subcommand."""
    parser = argparse.ArgumentParser(prog="ds-vrgd-recipes", description=DESCRIPTION, epilog=EPILOG)
    subparsers = prepare(parser, "ds_vrgd_recipes")
    for name, text in PROGRAMS.items():
        subparsers.add_parser(name, help=text)
    for command in (plan, plot, suggest):
        command.add_parser(subparsers)
    add_doctor(subparsers)
    return parser


def _run_program(name: str, arguments: Sequence[str]) -> int:
    """Give a program its arguments. Its own parser shows the command in its help and its errors."""
    sys.argv[0] = f"ds-vrgd-recipes {name}"
    try:
        return _program(name)(arguments)
    except (ModuleNotFoundError, RuntimeError) as error:
        return unusable(error)


def _program(name: str) -> Callable[[Sequence[str]], int]:
    match name:
        case "pretrain-bert":
            from ds_vrgd_recipes.bert.main import main
        case "prepare-bert-data":
            from ds_vrgd_recipes.bert.prepare_main import main
        case "finetune-squad":
            from ds_vrgd_recipes.bert.squad.main import main
        case "finetune-glue":
            from ds_vrgd_recipes.bert.glue import main
        case "make-cloze-squad":
            from ds_vrgd_recipes.bert.squad.cloze import main
        case "train-dlrm":
            from ds_vrgd_recipes.clicks.main import main
        case _:
            from ds_vrgd_recipes.vision.main import main
    return main
