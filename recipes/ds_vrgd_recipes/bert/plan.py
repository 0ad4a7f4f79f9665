"""The steps, memory and time of a run on a number of GPUs, before anybody pays for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_vrgd_recipes.bert.examples import MASKED_FRACTION
from ds_vrgd_recipes.bert.model import bert_config
from ds_vrgd_recipes.bert.runfile import ModelSection, Phase, RunFile
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.launch import reduces_variance

BERT_PIECES = 30522
GB = 1e9
#: The largest exchange buffers of fused mode: five of 2**25 elements of two bytes.
EXCHANGE_BYTES = 5 * 2**25 * 2
#: Memory of CUDA, NCCL and the allocator's gaps, besides tensors: measured here, rounded up.
RESERVED_BYTES = 4 * GB


@dataclass(frozen=True)
class PhasePlan:
    """One phase on a number of GPUs.

    Attributes:
        micro_batch: sequences of one backward pass on one GPU.
        accumulation: micro-batches of an update on one GPU.
        chunks: k, the micro-batches of an update on all GPUs.
        bytes_at_peak: of tensors on one GPU, estimated.
        hours: of the whole phase; None where the speed of a GPU is not known.
    """

    phase: Phase
    micro_batch: int
    accumulation: int
    chunks: int
    bytes_at_peak: float
    hours: float | None


def parameters(model: ModelSection, pieces: int) -> int:
    """Count the weights of ``transformers.BertForPreTraining``, whose output layer shares the input embedding's."""
    rows, hidden, inner = int(bert_config(model, pieces).vocab_size), model.hidden_size, model.intermediate_size
    embeddings = (rows + model.max_position_embeddings + 2) * hidden + 2 * hidden
    layer = 4 * (hidden + 1) * hidden + (hidden + 1) * inner + (inner + 1) * hidden + 4 * hidden
    heads = 2 * (hidden + 1) * hidden + 2 * hidden + rows + 2 * (hidden + 1)
    return embeddings + model.num_hidden_layers * layer + heads


def state_bytes(config: dict[str, Any], numel: int, gpus: int) -> float:
    """Return the bytes of weights, optimizer state and moments on one GPU, in bf16 with fp32 masters.

    Two bytes per weight; for each weight of the shard 12 for the master and Adam's moments, and with GSNR 4 for its
    average (2 with ``gsnr_dtype="bfloat16"``) and 8 for the chunks' moments during a window.
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
    """Return the bytes of one micro-batch in bf16 without padding, with dropout: 34 per token, hidden unit and layer.

    Equation 2 of Korthikanti et al. 2022 without its term for the attention weights, which are never stored; and the
    logits of the masked tokens, in bf16, and in fp32 with their gradient. With activation checkpointing a layer keeps
    its input, 2 bytes, and one layer at a time the rest.
    """
    model, pieces, tokens = run.model, _pieces(run), sequence_length * micro_batch
    kept = 2.0 * model.num_hidden_layers + 34.0 if run.activation_checkpointing else 34.0 * model.num_hidden_layers
    layers = kept * tokens * model.hidden_size
    return float(layers + 10.0 * MASKED_FRACTION * tokens * int(bert_config(model, pieces).vocab_size))


def needed_bytes(run: RunFile, config: dict[str, Any], gpus: int, sequence_length: int, micro_batch: int) -> float:
    """Return the bytes on one GPU at the peak, including what is not a tensor."""
    state = state_bytes(config, parameters(run.model, _pieces(run)), gpus)
    return state + RESERVED_BYTES + activation_bytes(run, sequence_length, micro_batch)


def largest_micro_batch(run: RunFile, phase: Phase, config: dict[str, Any], gpus: int, memory: float) -> int:
    """Return the largest micro-batch that fits: a power of two that gives every GPU the same number.

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
    """Plan the phases of ``run`` on ``gpus`` GPUs.

    Args:
        config: the DeepSpeed JSON.
        memory: bytes of a GPU; None to keep the run file's micro-batches.
        speeds: sequences per second of one GPU, one speed per phase; None if unknown.

    Raises:
        InputError: the run does not fit, or its batch cannot be shared out.
    """
    if speeds is not None and len(speeds) != len(run.phases):
        raise InputError(f"{len(speeds)} speeds for {len(run.phases)} phases; give one per phase")
    plans = []
    for index, phase in enumerate(run.phases):
        size = phase.micro_batch if memory is None else largest_micro_batch(run, phase, config, gpus, memory)
        accumulation = phase.model_copy(update={"micro_batch": size}).accumulation_steps(gpus)
        peak = needed_bytes(run, config, gpus, phase.sequence_length, size)
        hours = None if speeds is None else phase.steps * phase.global_batch / (speeds[index] * gpus) / 3600
        plans.append(PhasePlan(phase, size, accumulation, accumulation * gpus, peak, hours))
    return plans


def _pieces(run: RunFile) -> int:
    """Return the size of the vocabulary in the run file; BERT's if it names none."""
    size = None if run.vocabulary is None else run.vocabulary.size
    return BERT_PIECES if size is None else size
