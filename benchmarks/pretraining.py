"""Pre-training on real text, on one GPU: sequences per second of plain transformers and of ``ds_vrgd_recipes.bert``.

    python -m benchmarks.pretraining --run configs/bert-large/64k-32k.yaml --micro-batches 256 64

Model, data and sequence lengths are the run file's. Each way trains whole steps in a DeepSpeed engine with VRLAMB at
stage 2, on batches that the run's own loader makes while it trains.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForPreTraining

import ds_vrgd  # noqa: F401  (makes VRLAMB known to DeepSpeed)
from benchmarks.command import command_line
from benchmarks.pretraining_table import WAYS
from benchmarks.ranks import device_type
from benchmarks.record import Record, environment, file_name
from benchmarks.timing import Clock, Spread, repeat
from benchmarks.training import free, highest_allocated, release, storages
from ds_vrgd.engines.deepspeed import leave_out_shared_memory_op
from ds_vrgd_recipes.bert.examples import Batch, ExampleBuilder, SpecialIds
from ds_vrgd_recipes.bert.model import PretrainingModel, bert_config
from ds_vrgd_recipes.bert.packing import pack
from ds_vrgd_recipes.bert.prepared import PreparedData, open_prepared
from ds_vrgd_recipes.bert.runfile import Phase, RunFile, load_run_file
from ds_vrgd_recipes.bert.stream import MicroBatches, RankOrder, training_batches
from ds_vrgd_recipes.run.groups import parameter_groups

PLAIN, PACKED, COMPILED = WAYS
WARMUP_STEPS, TIMED_STEPS = 2, 6
PROFILED_STEPS, KERNELS = 1, 30
STEPS = WARMUP_STEPS + TIMED_STEPS + PROFILED_STEPS


class PaddedMicroBatches(MicroBatches):
    """Micro-batches in the form that transformers takes."""

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        return self.examples(place)


class PlainModel(torch.nn.Module):
    """The model of transformers with its own loss: logits at all positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.network = AutoModelForPreTraining.from_config(config, attn_implementation="sdpa")

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.network(**batch).loss
        return loss


class PackedModel(PretrainingModel):
    """One loss, as an engine wants it."""

    def forward(self, **batch: Any) -> Tensor:
        return sum(super().forward(**batch))


def build(way: str, run: RunFile, pieces: int) -> torch.nn.Module:
    """Return the model of a way to train, with the same random weights for all."""
    torch.manual_seed(0)
    model = PlainModel(bert_config(run.model, pieces)) if way == PLAIN else PackedModel(bert_config(run.model, pieces))
    if way == COMPILED:
        model.compile_layers()
    return model


def engine_config(micro_batch: int, accumulation: int) -> dict[str, Any]:
    """Return the JSON: bf16, stage 2, VRLAMB as in the paper's run."""
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "VRLAMB", "params": {"lr": 1e-4, "gamma": 0.1, "gsnr_dtype": "bfloat16"}},
        "steps_per_print": 10**9,
    }


def fp32_loss(way: str, model: torch.nn.Module, batch: Batch, longest: int, device: torch.device) -> float:
    """Return the loss of one padded batch, without dropout, from logits in fp32, as the packed model computes it."""
    model.eval()
    with torch.no_grad():
        taken = {name: tensor.to(device) for name, tensor in (batch if way == PLAIN else pack(batch)).items()}
        if way == PLAIN:
            out = model.network(**taken)
            loss = functional.cross_entropy(out.prediction_logits.float().flatten(0, 1), taken["labels"].flatten())
            loss += functional.cross_entropy(out.seq_relationship_logits.float(), taken["next_sentence_label"])
        else:
            loss = model(**taken, longest=longest)
    model.train()
    return float(loss)


def measure(way: str, device: torch.device, run: RunFile, phase: Phase, data: PreparedData) -> dict[str, Any]:
    """One row: whole steps of one way at one length."""
    keep = set(storages())
    accumulation = phase.accumulation_steps(ranks=1)
    builder = ExampleBuilder(
        data.train, data.chunks["train", phase.sequence_length], phase.sequence_length, SpecialIds.of(data.tokenizer)
    )
    source = (PaddedMicroBatches if way == PLAIN else MicroBatches)(builder, run.seed, 0, phase)
    order = RankOrder(phase, 0, 0, 1)
    batches = training_batches(source, order, run.loader_workers, pinned=device.type == "cuda")
    model = build(way, run, len(data.tokenizer))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=parameter_groups(model), config=engine_config(phase.micro_batch, accumulation)
    )
    example = builder.batch(list(range(16)), [(index,) for index in range(16)])
    loss = fp32_loss(way, engine.module, example, phase.sequence_length, device)
    waited: list[float] = []
    step = stepper(way, engine, batches, phase.sequence_length, accumulation, waited)
    clock = Clock(device)
    started = time.perf_counter()
    step()
    clock.synchronize()
    first = time.perf_counter() - started
    highest_allocated(device)
    seconds = repeat(step, clock, TIMED_STEPS, WARMUP_STEPS - 1)
    peak = highest_allocated(device)
    of_steps = waited[-TIMED_STEPS:]
    kernels = longest_kernels(step) if device.type == "cuda" else []
    engine.destroy()
    del engine, model, step
    release(keep)
    free(device)
    return {
        "way": way,
        "sequence_length": phase.sequence_length,
        "micro_batch": phase.micro_batch,
        "accumulation": accumulation,
        "sequences_per_second": Spread.of([phase.global_batch / one for one in seconds]).to_json(),
        "waited_for_data": Spread.of(of_steps).to_json(),
        "first_step_seconds": first,
        "peak_bytes": peak,
        "real_tokens": float(example["attention_mask"].float().mean()),
        "loss": loss,
        "kernels": kernels,
    }


def longest_kernels(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Return, for one step, milliseconds, share of all kernels' time and calls of the kernels that take longest."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    events = sorted(profile.key_averages(), key=lambda event: event.self_device_time_total, reverse=True)
    total = sum(event.self_device_time_total for event in events)
    return [
        {
            "name": e.key[:90],
            "ms": e.self_device_time_total / 1e3,
            "share": e.self_device_time_total / total,
            "calls": e.count,
        }
        for e in events[:KERNELS]
    ]


def stepper(
    way: str, engine: Any, batches: Iterator[Batch], longest: int, accumulation: int, waited: list[float]
) -> Callable[[], None]:
    """One optimizer step; adds the seconds that the host waited for batches to ``waited``."""

    def step() -> None:
        waited.append(0.0)
        for _ in range(accumulation):
            begin = time.perf_counter()
            batch = next(batches)
            waited[-1] += time.perf_counter() - begin
            on_device = {name: tensor.to(engine.device, non_blocking=True) for name, tensor in batch.items()}
            engine.backward(engine(**on_device) if way == PLAIN else engine(**on_device, longest=longest))
            engine.step()

    return step


def measure_all(chosen: argparse.Namespace, run: RunFile, data: PreparedData, command: str, path: Path) -> None:
    """Measure every way at every length; the file is complete after every row."""
    device = torch.device("cuda:0" if device_type() == "cuda" else "cpu")
    record = Record(path, environment(command, 1, device))
    for phase, micro_batch in zip(run.phases, chosen.micro_batches, strict=True):
        sized = {"micro_batch": micro_batch, "global_batch": micro_batch * chosen.accumulation, "steps": STEPS}
        for way in chosen.ways:
            row = measure(way, device, run, phase.model_copy(update=sized), data)
            record.add("pretraining", row)
            print(json.dumps({key: value for key, value in row.items() if key != "kernels"}), flush=True)


def main(arguments: list[str]) -> int:
    """Measure and say where the results are."""
    parser = argparse.ArgumentParser("python -m benchmarks.pretraining", description=__doc__.split("\n")[0])
    parser.add_argument("--run", type=Path, required=True, help="run file; its prepared_data must be there")
    parser.add_argument("--micro-batches", type=int, nargs="+", required=True, help="one a phase")
    parser.add_argument("--accumulation", type=int, default=8)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--output", type=Path, default=Path("out/benchmarks"), help="folder (out/benchmarks)")
    chosen = parser.parse_args(arguments)
    run = load_run_file(chosen.run)
    if run.prepared_data is None or len(chosen.micro_batches) != len(run.phases):
        parser.error(f"{chosen.run} must name prepared_data, and --micro-batches give one for each of its phases")
    path = chosen.output / file_name()
    # In this process: ranks of benchmarks.ranks may have no children, and the loader has some.
    os.environ |= {"DS_ACCELERATOR": device_type(), "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}
    leave_out_shared_memory_op()
    deepspeed.utils.logger.setLevel("WARNING")
    with tempfile.TemporaryDirectory() as folder:
        backend = {"cuda": "nccl", "cpu": "gloo"}[device_type()]
        store = f"file://{folder}/store"
        deepspeed.init_distributed(
            backend, init_method=store, rank=0, world_size=1, auto_mpi_discovery=False, verbose=False
        )
        measure_all(
            chosen, run, open_prepared(run, run.prepared_data), command_line(arguments, "benchmarks.pretraining"), path
        )
        torch.distributed.destroy_process_group()
    print(f"results in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
