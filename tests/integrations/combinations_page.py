"""Write docs/COMBINATIONS.md from the outcomes, and read it again."""

from __future__ import annotations

import platform
import string
from collections.abc import Mapping
from pathlib import Path

import accelerate
import deepspeed
import torch
import transformers

from tests.integrations.combinations import OFFLOADS, OPTIMIZERS, SCHEDULES, STAGES, Pair

COMMAND = "make test-full PYTEST_ARGS='tests/integrations/test_combinations.py --write-combinations'"

PREFACE = """\
# Where optimizer and schedule may come from

Every pair, at every ZeRO stage, with the optimizer's state on the device, on the CPU and on NVMe: tried with `VRLAMB`,
in fp32, on one CPU rank with two micro-batches. "yes": the engine's optimizer is ours with k = 2, the learning rate of
every step is the schedule's, and after 4 steps the weights are those of all other pairs with that schedule (norm-wise
to 8e-7). A letter stands for an error, which is quoted in full below the table. There is no third possibility.

- **optimizer**: *JSON*: the DeepSpeed config's "optimizer". *instance*: `optimizer=VRLAMB(groups)`. *class*:
  `optimizer=VRLAMB`, or the Trainer's `optimizer_cls_and_kwargs=(VRLAMB, {})`. *factory*: the same with
  `functools.partial(VRLAMB, ...)`.
- **schedule**: *JSON*: the DeepSpeed config's "scheduler" (`WarmupDecayLR`; DeepSpeed's own schedules are a step late:
  the first rate holds for two steps). *ours*: `lr_scheduler=` a `LambdaLR` of `ds_vrgd.schedules.warmup_polynomial_lr`.
  *none*: a constant rate. These three call `deepspeed.initialize`. *Trainer*: the Hugging Face Trainer, with
  `VRTrainerMixin` ([TRAINER.md](TRAINER.md)) and its "linear" schedule; an *instance* is then its
  `optimizers=(instance, None)`.
- **offload**: `offload_optimizer.device`; *cpu, unforced* has `"zero_force_ds_cpu_optimizer": false` besides.

The test does not compile DeepSpeed's CPU Adam, which Accelerate puts in our place, but has a stand-in of the same name.
"""


def write(path: Path, verdicts: Mapping[Pair, str]) -> None:
    """The page, for verdicts on all pairs."""
    errors = dict.fromkeys(verdict for verdict in verdicts.values() if verdict != "works")
    letters = dict(zip(errors, string.ascii_uppercase, strict=False))
    versions = f"torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, transformers {transformers.__version__}"
    versions = f"Python {platform.python_version()}, {versions}, Accelerate {accelerate.__version__}, CPU, gloo"
    lines = [PREFACE, f"Measured with {versions}:\n\n    {COMMAND}\n"]
    for schedule in SCHEDULES:
        lines.append(f"## Schedule: {schedule}\n")
        lines.append("| offload | optimizer | " + " | ".join(f"stage {stage}" for stage in STAGES) + " |")
        lines.append("| --- | --- |" + " --- |" * len(STAGES))
        for offload in OFFLOADS:
            for optimizer in OPTIMIZERS:
                found = [verdicts[Pair(optimizer, schedule, offload, stage)] for stage in STAGES]
                cells = ["yes" if verdict == "works" else letters[verdict] for verdict in found]
                lines.append(f"| {offload} | {optimizer} | " + " | ".join(cells) + " |")
        lines.append("")
    lines.append("## Errors\n")
    for error, letter in letters.items():
        indented = "\n".join(f"    {line}".rstrip() for line in error.splitlines())
        lines.append(f"**{letter}**\n\n{indented}\n")
    path.write_text("\n".join(lines), encoding="utf-8")


def read(path: Path) -> dict[Pair, str]:
    """Return the page's outcome of each pair."""
    table, _, below = path.read_text(encoding="utf-8").partition("## Errors\n")
    errors = {"yes": "works"}
    for part in below.split("\n**")[1:]:
        letter, _, text = part.partition("**\n\n")
        errors[letter] = "\n".join(line[4:] for line in text.rstrip().splitlines())
    found: dict[Pair, str] = {}
    for section in table.split("## Schedule: ")[1:]:
        schedule, *lines = section.splitlines()
        for line in lines:
            offload, optimizer, *cells = (
                [cell.strip() for cell in line.strip("|").split("|")] if "|" in line else [""] * 2
            )
            if optimizer in OPTIMIZERS:
                for stage, cell in zip(STAGES, cells, strict=True):
                    found[Pair(optimizer, schedule, offload, stage)] = errors[cell]
    return found
