"""What a run will do and need on a number of GPUs, before anybody pays for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_vrgd.bert.examples import MASKED_FRACTION
from ds_vrgd.bert.model import bert_config
from ds_vrgd.bert.runfile import ModelSection, Phase, RunFile
from ds_vrgd.training.errors import InputError
from ds_vrgd.training.launch import reduces_variance

BERT_PIECES = 30522
GB = 1e9
#: Exchange buffers of fused mode, at most: five of 2**25 elements in two bytes.
EXCHANGE_BYTES = 5 * 2**25 * 2
#: What CUDA, NCCL and the allocator's gaps take beside the tensors. Ours, rounded up.
RESERVED_BYTES = 4 * GB


@dataclass(frozen=True)
class PhasePlan:
    """One phase on a number of GPUs.

    Attributes:
        micro_batch: sequences of one backward pass on one GPU.
        accumulation: micro-batches of an update on one GPU.
        chunks: k, all GPUs' micro-batches of an update.
        bytes_at_peak: of tensors on one GPU, estimated.
        hours: of the whole phase; None where nobody has said how fast a GPU is.
    """

    phase: Phase
    micro_batch: int
    accumulation: int
    chunks: int
    bytes_at_peak: float
    hours: float | None


def parameters(model: ModelSection, pieces: int) -> int:
    """Of ``transformers.BertForPreTraining``, whose output layer has the input embedding's weights."""
    rows, hidden, inner = int(bert_config(model, pieces).vocab_size), model.hidden_size, model.intermediate_size
    embeddings = (rows + model.max_position_embeddings + 2) * hidden + 2 * hidden
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden
    heads = 2 * (hidden + 1) * hidden + 2 * hidden + rows + 2 * (hidden + 1)
    return embeddings + model.num_hidden_layers * layer + heads


def state_bytes(config: dict[str, Any], numel: int, gpus: int) -> float:
    """Weights, optimizer state and moments on one GPU, in bf16 with fp32 masters.

    Two bytes a weight; for each weight of the shard 12 for the master and Adam's moments, and with GSNR 4 for its
    average (2 with ``gsnr_dtype="bfloat16"``) and 8 for the chunks' moments, during a window.
    """
    stage = int(config.get("zero_optimization", {}).get("stage", 0))
    held = 12.0
    if reduces_variance(config):
        held += 8 + (2 if config["optimizer"].get("params", {}).get("gsnr_dtype") == "bfloat16" else 4)
    else:
        held += 2  # the reduced gradient
    shard = numel / gpus if stage else numel
    return 2.0 * (shard if stage == 3 else numel) + held * shard + (EXCHANGE_BYTES if stage else 0)


def activation_bytes(run: RunFile, sequence_length: int, micro_batch: int) -> float:
    """Of one micro-batch in bf16 without padding, with dropout: 34 bytes a token and hidden unit of each layer.

    Equation 2 of Korthikanti et al. 2022 without its term for the attention weights, which are never stored; and the
    logits of the masked tokens, in bf16, and in fp32 with their gradient. With activation checkpointing a layer keeps
    its input, 2 bytes, and one layer at a time the rest.
    """
    model, pieces, tokens = run.model, _pieces(run), sequence_length * micro_batch
    kept = 2.0 * model.num_hidden_layers + 34.0 if run.activation_checkpointing else 34.0 * model.num_hidden_layers
    layers = kept * tokens * model.hidden_size
    return float(layers + 10.0 * MASKED_FRACTION * tokens * int(bert_config(model, pieces).vocab_size))


def needed_bytes(run: RunFile, config: dict[str, Any], gpus: int, sequence_length: int, micro_batch: int) -> float:
    """On one GPU at the peak, with what is no tensor."""
    state = state_bytes(config, parameters(run.model, _pieces(run)), gpus)
    return state + RESERVED_BYTES + activation_bytes(run, sequence_length, micro_batch)


def largest_micro_batch(run: RunFile, phase: Phase, config: dict[str, Any], gpus: int, memory: float) -> int:
    """The largest power of two that fits, and by which every GPU gets the same.

    Raises:
        InputError: not even one sequence fits, or the global batch cannot be shared out evenly.
    """
    if phase.global_batch % gpus:
        raise InputError(
            f"global_batch={phase.global_batch} is not a multiple of --gpus {gpus}; take a number of GPUs that "
            "divides it, such as a power of two"
        )

    def needed(size: int) -> float:
        return needed_bytes(run, config, gpus, phase.sequence_length, size)

    size = 1
    if needed(size) > memory:
        raise InputError(
            f"one sequence of {phase.sequence_length} needs about {needed(size) / GB:.1f} GB on each of {gpus} GPUs, "
            f"more than --gpu-memory {memory / GB:g}; use more GPUs, activation_checkpointing, or ZeRO stage 3"
        )
    while phase.global_batch % (2 * size * gpus) == 0 and needed(2 * size) <= memory:
        size *= 2
    return size


def plan(
    run: RunFile, config: dict[str, Any], gpus: int, memory: float | None, speeds: list[float] | None
) -> list[PhasePlan]:
    """The phases of ``run`` on ``gpus`` GPUs.

    Args:
        config: the DeepSpeed JSON.
        memory: bytes of a GPU; None to keep the run file's micro-batches.
        speeds: sequences a second of one GPU, one a phase; None if nobody knows.

    Raises:
        InputError: what is asked for cannot be.
    """
    if speeds is not None and len(speeds) != len(run.phases):
        raise InputError(f"{len(speeds)} speeds for {len(run.phases)} phases; give one a phase")
    plans = []
    for index, phase in enumerate(run.phases):
        size = phase.micro_batch if memory is None else largest_micro_batch(run, phase, config, gpus, memory)
        accumulation = phase.model_copy(update={"micro_batch": size}).accumulation_steps(gpus)
        peak = needed_bytes(run, config, gpus, phase.sequence_length, size)
        hours = None if speeds is None else phase.steps * phase.global_batch / (speeds[index] * gpus) / 3600
        plans.append(PhasePlan(phase, size, accumulation, accumulation * gpus, peak, hours))
    return plans


def _pieces(run: RunFile) -> int:
    """Of the vocabulary, as far as the run file says; BERT's otherwise."""
    size = None if run.vocabulary is None else run.vocabulary.size
    return BERT_PIECES if size is None else size
