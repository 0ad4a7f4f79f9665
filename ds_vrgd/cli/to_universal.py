"""``ds-vrgd to-universal``: carry a checkpoint over to another number of ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "to-universal",
        help="convert a ZeRO checkpoint for another number of ranks",
        description="Convert a checkpoint of ZeRO stage 1, 2 or 3, with every state of every optimizer of ds_vrgd, so "
        'that any number of ranks can load it: engine.load_checkpoint(OUTPUT), with "checkpoint": {"load_universal": '
        "true} in the DeepSpeed JSON. Needs no GPU. A checkpoint of stage 0 loads as it is.",
    )
    parser.add_argument("folder", type=Path, metavar="CHECKPOINT_FOLDER", help="what engine.save_checkpoint was given")
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="the result is OUTPUT/TAG")
    parser.add_argument("--tag", help="of the checkpoint; the one that the file 'latest' names unless given")
    parser.add_argument(
        "--client-state-of-rank-0",
        action="store_true",
        help="where the client state of the ranks differs (stage 3), take rank 0's for all",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert; 1 if the checkpoint cannot be carried over."""
    from ds_vrgd.zero import CheckpointError, to_universal

    try:
        written = to_universal(
            options.folder, options.output, options.tag, client_state_of_rank_0=options.client_state_of_rank_0
        )
    except (CheckpointError, OSError) as error:
        print(f"ds-vrgd to-universal: {error}", file=sys.stderr)
        return 1
    print(written)
    return 0
