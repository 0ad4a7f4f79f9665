"""The model card of a pre-training: the README.md of ``output/model``, from the run file, the engine and the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import ds_vrgd
from ds_vrgd_recipes.bert.prepared import read_manifest
from ds_vrgd_recipes.bert.runfile import RunFile
from ds_vrgd_recipes.run.log import read_history

CARD = """---
{data}
---

# {name}

BERT, pre-trained on masked words and next sentences with [ds_vrgd] {version}. The text below is written by the run.

| | |
| --- | --- |
| network | {layers} layers, hidden size {hidden}, {heads} heads, {pieces:,} word pieces |
| optimizer | {optimizer}, `{arguments}` |
| gradient clipping | {clipping} |
| ranks, ZeRO stage | {ranks}, {stage} |
| data | {corpus} |
| text | {documents:,} documents, {tokens:,} tokens to train on; one document in {held_out_every} held out |
| held-out masked-LM loss | {loss:.4f} nats (of word frequencies alone: {entropy:.4f}), after {updates:,} updates |

| phase | sequence length | batch | micro-batches (k) | updates | peak rate | warm-up |
| --- | --- | --- | --- | --- | --- | --- |
{phases}

A batch is in sequences. An optimizer with variance reduction compares the gradients of an update's k micro-batches.
The learning rate decays polynomially to zero within a phase.

## Not known

Nobody has examined what the text says about people, nor measured the model on another task.

[ds_vrgd]: https://arxiv.org/abs/2309.13681
"""


def write_card(run: RunFile, engine: Any, data: Path, output: Path) -> None:
    """Write the card of a finished run; on one rank.

    Args:
        data: folder of the prepared data.
        output: of the run, with its ``model`` and at least one update in its log.
    """
    history, manifest = read_history(output), read_manifest(data)
    last = history.evaluations[-1]
    loss, optimizer = last["held_out_masked_lm_loss"], engine.optimizer_name()
    arguments = {name: value for name, value in engine.optimizer_params().items() if name != "lr"}  # the run file's
    rows = (
        f"| {n} | {phase.sequence_length} | {phase.global_batch:,} | {phase.global_batch // phase.micro_batch:,} "
        f"| {phase.steps:,} | {phase.lr:g} | {_warmup(phase)} |"
        for n, phase in enumerate(run.phases, start=1)
    )
    result = EvalResult(
        task_type="fill-mask", dataset_type="held-out documents", dataset_name="held-out documents of the corpus",
        metric_type="masked_lm_loss", metric_value=round(loss, 4),
    )  # fmt: skip
    about = ModelCardData(
        library_name="transformers", pipeline_tag="fill-mask", tags=["bert", "ds_vrgd", optimizer],
        model_name=output.resolve().name, eval_results=[result],
    )  # fmt: skip
    settings, model = manifest["settings"], run.model
    card = CARD.format(
        data=about.to_yaml(), name=about.model_name, version=ds_vrgd.__version__,
        layers=model.num_hidden_layers, hidden=model.hidden_size, heads=model.num_attention_heads,
        pieces=manifest["vocabulary"]["pieces"], optimizer=optimizer, arguments=json.dumps(arguments),
        clipping=engine.gradient_clipping() or "none", ranks=engine.world_size, stage=engine.zero_optimization_stage(),
        corpus="; ".join(_corpus(each) for each in settings["corpus"]), documents=manifest["train"]["documents"],
        tokens=manifest["train"]["tokens"], held_out_every=settings["held_out_every"],
        loss=loss, entropy=last["unigram_entropy"], updates=last["step"], phases="\n".join(rows),
    )  # fmt: skip
    ModelCard(card).save(output / "model" / "README.md")


def _warmup(phase: Any) -> str:
    return f"{phase.warmup_ratio:.0%}" if phase.warmup_steps is None else f"{phase.warmup_steps:,} updates"


def _corpus(corpus: dict[str, Any]) -> str:
    if corpus["source"] == "packages":
        return f"packages {', '.join(corpus['names'])}"
    if corpus["source"] == "folder":
        return f"files of `{Path(corpus['path']).name}`"
    return " ".join(f"`{part}`" for part in (corpus["name"], corpus["subset"], corpus["split"]) if part)
