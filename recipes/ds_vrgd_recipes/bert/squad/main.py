"""Command line of the fine-tuning."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm
from transformers.utils import logging

from ds_vrgd_recipes.bert.squad.finetune import finetune
from ds_vrgd_recipes.bert.squad.settings import OPTIMIZERS, Settings, check_settings
from ds_vrgd_recipes.run.errors import InputError, TrainingFailed


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune and answer; return the exit status (2: input that cannot be used)."""
    options = {name: value for name, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    # Bars over the files of a model, and a table of weights that only pre-training needs.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        summary = finetune(check_settings(options), tqdm.write)
    except (InputError, TrainingFailed) as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, InputError) else 1
    print(summary, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Fine-tune BERT on questions in the format of SQuAD v1.1, answer others, and score the answers."
    )
    default = {name: field.default for name, field in Settings.model_fields.items()}

    def add(option: str, text: str, **how: object) -> None:
        known = default[option.removeprefix("--").replace("-", "_")]
        # No default here: Settings has it, and an option that was not given is left out.
        shown = f" (default {known})" if isinstance(known, (int, float, str)) and known is not False else ""
        parser.add_argument(option, help=text + shown, **how)  # type: ignore[arg-type]

    add("--model", "a saved BERT, the --output of a pre-training run, or one step-... folder of it", type=Path,
        required=True, metavar="FOLDER")  # fmt: skip
    add("--train-file", "SQuAD v1.1 JSON to train on; without it the model only answers", type=Path, metavar="JSON")
    add("--predict-file", "SQuAD v1.1 JSON to answer and score", type=Path, required=True, metavar="JSON")
    add("--output", "where everything is written", type=Path, required=True, metavar="FOLDER")
    add("--from-scratch", "random weights in the shape of --model", action="store_true")
    add("--tokenizer", "where it is not in the folder of the model", type=Path, metavar="FOLDER")
    add("--seeds", "train once with each, and print the median (default 1)", type=int, nargs="+", metavar="N")
    add("--epochs", "times through --train-file", type=int)
    add("--batch-size", "windows per update", type=int)
    add("--micro-batch", "windows of one backward pass, a chunk of a VR optimizer (default: all)", type=int)
    add("--optimizer", "torch's AdamW, or one of ds_vrgd", choices=OPTIMIZERS)
    add("--lr", "largest learning rate", type=float)
    add("--warmup-ratio", "share of the updates in which it rises; then it falls to 0", type=float)
    add("--weight-decay", "of matrices", type=float)
    add("--fp32", "no bf16 autocast on a GPU", action="store_true")
    add("--max-length", "tokens of a window", type=int)
    add("--doc-stride", "tokens from one window of a long text to the next", type=int)
    add("--max-question-length", "tokens; longer questions are cut", type=int)
    add("--max-answer-length", "tokens", type=int)
    add("--n-best", "candidates to keep", type=int)
    return parser


if __name__ == "__main__":
    sys.exit(main())
