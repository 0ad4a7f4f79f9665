"""Command line of the data preparation."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ds_vrgd_recipes.bert.packages.catalogue import GROUPS, PACKAGES
from ds_vrgd_recipes.bert.prepare import prepare
from ds_vrgd_recipes.bert.runfile import describe_error, load_run_file
from ds_vrgd_recipes.bert.sources import DEFAULT_DEDUPLICATE_FROM, DEFAULT_HELD_OUT_EVERY, DataSettings
from ds_vrgd_recipes.bert.textfiles import KINDS
from ds_vrgd_recipes.installed import config_path
from ds_vrgd_recipes.run.errors import InputError, PreparationFailed


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare data for pre-training; return the exit status (2: input that cannot be used)."""
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    if options.overrides and not options.run:
        parser.error(f"{options.overrides[0]}: KEY=VALUE replaces a value of a run file; give --run")
    if options.processes < 0:
        parser.error(f"--processes {options.processes}: at least 0")
    if options.run and (given := [name for name in _OF_A_RUN_FILE if _is_given(options, parser, name)]):
        parser.error(f"--run takes {', '.join(given)} from the run file: leave out one or the other")
    begin = time.monotonic()

    def report(text: str) -> None:
        print(f"data: {text}", file=sys.stderr, flush=True)

    try:
        settings, lengths, folder = _from_run_file(options) if options.run else _from_options(options, parser)
        prepare(settings, lengths, folder, report, options.processes)
    except (InputError, PreparationFailed) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, InputError) else 1
    print(f"{folder} is ready, after {time.monotonic() - begin:.0f} s", flush=True)
    return 0


# What --run reads from the run file.
_OF_A_RUN_FILE = (
    *("--packages", "--text", "--dataset", "--text-column", "--rows-per-document", "--vocabulary", "--lengths"),
    *("--held-out-every", "--deduplicate-from"),
)


def _is_given(options: argparse.Namespace, parser: argparse.ArgumentParser, name: str) -> bool:
    key = name.removeprefix("--").replace("-", "_")
    return bool(getattr(options, key) != parser.get_default(key))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Prepare text for BERT pre-training: read, leave out repeated paragraphs, train a vocabulary, "
        "split into sentences, tokenise once for all lengths. After a kill the same command resumes where it stopped."
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="the result: prepared_data of a run file")
    parser.add_argument(
        "--run",
        type=config_path,
        metavar="YAML",
        help="take corpus, vocabulary, lengths, what is held out and deduplicated from this run file",
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replaces a value of the run file")
    corpus = parser.add_argument_group("corpus", "one or more, read in this order")
    corpus.add_argument("--packages", nargs="+", default=[], choices=[*PACKAGES, *GROUPS], metavar="NAME",
                        help=f"text that installs by package name: {', '.join(PACKAGES)}; for several: "
                        f"{', '.join(GROUPS)}")  # fmt: skip
    corpus.add_argument("--text", nargs="+", default=[], metavar="PATH",
                        help=f"files or folders, or URLs such as s3://bucket/folder: {KINDS}")  # fmt: skip
    corpus.add_argument("--dataset", nargs="+", default=[], metavar="NAME[:SUBSET[:SPLIT]]",
                        help="names for datasets.load_dataset, streamed")  # fmt: skip
    corpus.add_argument("--text-column", default="text", metavar="NAME", help="of files and data sets made of rows")
    corpus.add_argument("--rows-per-document", type=int, default=1, metavar="N",
                        help="of --dataset, where a row is a sentence")  # fmt: skip
    parser.add_argument("--vocabulary", metavar="SIZE|FOLDER|NAME",
                        help="pieces to train, a folder with vocab.txt, or a model on the hub")  # fmt: skip
    parser.add_argument("--lengths", nargs="+", type=int, default=[128, 512], metavar="TOKENS", help="of sequences")
    parser.add_argument("--held-out-every", type=int, default=DEFAULT_HELD_OUT_EVERY, metavar="N",
                        help="hold out every n-th document")  # fmt: skip
    parser.add_argument("--deduplicate-from", type=int, default=DEFAULT_DEDUPLICATE_FROM, metavar="CHARACTERS",
                        help="paragraphs of at least this length are kept once")  # fmt: skip
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
                        help="besides the main one; the result does not depend on it (0: none)")  # fmt: skip
    return parser


def _from_run_file(options: argparse.Namespace) -> tuple[DataSettings | None, list[int], Path]:
    run = load_run_file(options.run, options.overrides)
    folder = options.output or run.prepared_data
    if folder is None:
        raise InputError(f"--run {options.run} names no prepared_data; add it to the run file, or give --output")
    return run.data_settings, run.sequence_lengths, folder


def _from_options(
    options: argparse.Namespace, parser: argparse.ArgumentParser
) -> tuple[DataSettings | None, list[int], Path]:
    if options.output is None:
        parser.error("--output or --run is needed")
    if any(length < 8 for length in options.lengths):
        parser.error(f"--lengths {' '.join(map(str, options.lengths))}: a sequence has at least 8 tokens")
    corpora: list[dict[str, Any]] = []
    if options.packages:
        corpora.append({"source": "packages", "names": options.packages})
    corpora.extend({"source": "folder", "path": path, "text_column": options.text_column} for path in options.text)
    for dataset in options.dataset:
        parts = dataset.split(":")
        if len(parts) > 3:
            parser.error(f"--dataset {dataset}: NAME:SUBSET:SPLIT has three parts")
        name, subset, split = [*parts, "", ""][:3]
        corpora.append(
            {
                "source": "datasets",
                "name": name,
                "subset": subset or None,
                "split": split or "train",
                "text_column": options.text_column,
                "rows_per_document": options.rows_per_document,
            }
        )
    if not corpora:
        if options.vocabulary is not None or not options.output.exists():
            parser.error("--text, --dataset or --packages is needed")
        return None, options.lengths, options.output  # add lengths to data that are ready
    if options.vocabulary is None:
        parser.error("--vocabulary is needed")
    key = "size" if options.vocabulary.isdecimal() else "folder" if Path(options.vocabulary).exists() else "name"
    try:
        settings = DataSettings.model_validate(
            {
                "corpus": corpora,
                "vocabulary": {key: options.vocabulary},
                "held_out_every": options.held_out_every,
                "deduplicate_from": options.deduplicate_from,
            }
        )
    except ValidationError as error:
        raise InputError("\n".join(map(describe_error, error.errors())).strip()) from error
    return settings, options.lengths, options.output


if __name__ == "__main__":
    sys.exit(main())
