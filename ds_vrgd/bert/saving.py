"""What a finished run leaves for ``from_pretrained``, and what its checkpoints say of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import BertTokenizerFast

from ds_vrgd.bert.runfile import RunFile
from ds_vrgd.training.output import whole_state


def save_model(engine: Any, tokenizer: BertTokenizerFast, output: Path) -> None:
    """Save network and tokenizer for ``from_pretrained`` into ``output/model``, in the training dtype. Collective."""
    network = engine.module.network
    state = whole_state(engine, network)
    if engine.global_rank == 0:
        network.save_pretrained(str(output / "model"), state_dict=state)
        tokenizer.save_pretrained(str(output / "model"))


def describe(
    run: RunFile, vocabulary_sha256: str, data_sha256: str, ranks: int, deepspeed_config: dict[str, Any]
) -> dict[str, Any]:
    """What a checkpoint and the run that resumes from it must agree on, see ``ds_vrgd.training.checkpoint.check``."""
    return {
        "model": run.model.model_dump(),
        "vocabulary_sha256": vocabulary_sha256,
        "data_sha256": data_sha256,
        "seed": run.seed,
        "phases": [phase.model_dump() for phase in run.phases],
        "ranks": ranks,
        "zero_stage": deepspeed_config.get("zero_optimization", {}).get("stage", 0),
        "optimizer": deepspeed_config["optimizer"]["type"],
    }
