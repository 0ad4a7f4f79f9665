"""Fine-tuning on a task of GLUE (Wang et al. 2018) by the Hugging Face Trainer, and its measures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_vrgd.engines.deepspeed.register import NAMES
from ds_vrgd.extras import need
from ds_vrgd_recipes.run.files import write_text

#: Task -> the columns with text, and the splits that are evaluated.
TASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cola": (("sentence",), ("validation",)),
    "sst2": (("sentence",), ("validation",)),
    "mrpc": (("sentence1", "sentence2"), ("validation",)),
    "stsb": (("sentence1", "sentence2"), ("validation",)),
    "qqp": (("question1", "question2"), ("validation",)),
    "mnli": (("premise", "hypothesis"), ("validation_matched", "validation_mismatched")),
    "qnli": (("question", "sentence"), ("validation",)),
    "rte": (("sentence1", "sentence2"), ("validation",)),
    "wnli": (("sentence1", "sentence2"), ("validation",)),
}


def measures(task: str, predicted: npt.NDArray[Any], labels: npt.NDArray[Any]) -> dict[str, float]:
    """Return the measures of GLUE for a task.

    Matthews' correlation of two classes is Pearson's; Spearman's is that of the ranks. One of constants is 0.

    Args:
        predicted, labels: classes, or for stsb scores, [examples].
    """

    def correlation(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> float:
        return float(np.corrcoef(one, other)[0, 1]) if np.ptp(one) and np.ptp(other) else 0.0

    if task == "stsb":
        ranks = [np.unique(each, return_inverse=True, return_counts=True)[1:] for each in (predicted, labels)]
        means = [(np.cumsum(counts) - (counts - 1) / 2)[inverse] for inverse, counts in ranks]  # equal values share
        return {"pearson": correlation(predicted, labels), "spearman": correlation(*means)}
    found = {"accuracy": float((predicted == labels).mean())}
    if task == "cola":
        return {"matthews_correlation": correlation(predicted, labels)}
    if task in ("mrpc", "qqp"):
        right = float(((predicted == 1) & (labels == 1)).sum())
        found["f1"] = 2 * right / max(1.0, float((predicted == 1).sum() + (labels == 1).sum()))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Fine-tune and evaluate once for each seed; return the exit status (2: input that cannot be used)."""
    parser = argparse.ArgumentParser(
        description="Fine-tune BERT on a task of GLUE, once for each seed, in one process or under torchrun; print the "
        "measures on the validation set. The defaults are those of BERT's authors for the smaller tasks."
    )
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="saved by a run: out/X/model")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--data", default="nyu-mll/glue", metavar="NAME|FOLDER", help="for datasets.load_dataset")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--batch", type=int, default=32, help="examples of an update")
    parser.add_argument("--micro-batch", type=int, metavar="N", help="examples of a chunk (default: the batch)")
    parser.add_argument(
        "--optimizer", choices=["AdamW", *NAMES], default="AdamW", metavar="NAME",
        help="AdamW of torch, or an optimizer of ds_vrgd; k = ranks x batch / micro-batch",
    )  # fmt: skip
    parser.add_argument("--max-length", type=int, default=128, metavar="TOKENS")
    options = parser.parse_args(arguments)
    need("hf", "accelerate")
    if options.batch % (options.micro_batch or options.batch):
        parser.error(f"--batch {options.batch} is not a multiple of --micro-batch {options.micro_batch}")
    if options.output.exists() and any(options.output.iterdir()):
        print(f"error: --output {options.output} is not empty; give another folder", file=sys.stderr)
        return 2
    try:
        results = [_finetune(options, seed) for seed in options.seeds]
    except (ValueError, OSError) as error:  # of the libraries: no such model or data, a file that is damaged
        print(f"error: --model {options.model}, --data {options.data}: {error}", file=sys.stderr)
        return 2
    medians = {name: float(np.median([result[name] for result in results])) for name in results[0]}
    settings = {name: str(value) for name, value in vars(options).items()}
    write_text(options.output / "result.json", json.dumps({**medians, "results": results, **settings}, indent=1) + "\n")
    print(f"{options.task}: " + ", ".join(f"{name} {value:.4f}" for name, value in medians.items()))
    return 0


def _finetune(options: argparse.Namespace, seed: int) -> dict[str, float]:
    """Fine-tune with one seed; return the measures, by their names and, where there are several, by split."""
    import datasets
    from torch.optim import AdamW
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

    from ds_vrgd.hf import VRTrainerMixin

    class VRTrainer(VRTrainerMixin, Trainer):  # type: ignore[misc]
        """The Trainer, with the param groups of BERT."""

    columns, splits = TASKS[options.task]
    data = datasets.load_dataset(options.data, options.task)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    data = data.map(
        lambda rows: tokenizer(*(rows[name] for name in columns), truncation=True, max_length=options.max_length),
        batched=True,
    )
    set_seed(seed)
    classes = 1 if options.task == "stsb" else len(set(data["train"]["label"]))
    model = AutoModelForSequenceClassification.from_pretrained(options.model, num_labels=classes)
    micro_batch = options.micro_batch or options.batch
    trainer = VRTrainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(options.output / f"seed-{seed}"),
            seed=seed,
            num_train_epochs=options.epochs,
            learning_rate=options.lr,
            warmup_steps=0.1,
            weight_decay=0.01,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=options.batch // micro_batch,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=data["train"],
        processing_class=tokenizer,
        optimizer_cls_and_kwargs=(AdamW if options.optimizer == "AdamW" else NAMES[options.optimizer], {}),
        compute_metrics=lambda found: measures(
            options.task,
            found.predictions[:, 0] if classes == 1 else found.predictions.argmax(axis=-1),
            found.label_ids,
        ),
    )
    trainer.train()
    results: dict[str, float] = {}
    for split in splits:
        suffix = split.removeprefix("validation")
        found = trainer.evaluate(data[split])
        names = ("accuracy", "f1", "matthews_correlation", "pearson", "spearman")
        results |= {f"{name}{suffix}": found[f"eval_{name}"] for name in names if f"eval_{name}" in found}
    return results
