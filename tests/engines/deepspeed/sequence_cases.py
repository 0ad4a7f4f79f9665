"""Drive engines whose sequences are cut over ranks (Ulysses) beside the dense float64 reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.runtime.sequence_parallel.parallel_state_sp as mpu
import torch
from deepspeed.utils import groups
from torch import Tensor

import ds_vrgd
from ds_vrgd.doctor.chunks import SeenGradients, chunk_gradients, difference, norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from ds_vrgd.engines.deepspeed import to_universal
from ds_vrgd.noise import gradient_noise
from tests.support.resuming import differences, whole_state
from tests.support.sequence import make_sequence_model, sequence_batches
from tests.support.trajectory import ARGUMENTS, DTYPES, noise_error, relative_error

WORLD, STEPS = 4, 5


@dataclass(frozen=True)
class SequenceCase:
    """One engine.

    Attributes:
        stage, dtype, accum_dtype: as in :class:`tests.support.trajectory.Case`.
        size: ranks that share a sequence.
        optimizer, arguments, reduction, ranks_per_node: of the optimizer.
        accumulation: micro-batches a step.
        clip: DeepSpeed's ``gradient_clipping``.
    """

    stage: int
    dtype: str
    size: int
    accum_dtype: str | None = None
    optimizer: str = "VRLAMB"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    reduction: str = "auto"
    ranks_per_node: int | None = None
    accumulation: int = 3
    clip: float = 0.0

    def name(self) -> str:
        accum = f"+{self.accum_dtype}" if self.accum_dtype else ""
        nodes = f"-nodes_of_{self.ranks_per_node}" if self.ranks_per_node else ""
        clip = "-clipped" if self.clip else ""
        options = "".join(f"-{key}={value}" for key, value in self.arguments.items())
        shape = f"{self.size}x{WORLD // self.size}"
        return f"{self.optimizer}-z{self.stage}-{self.dtype}{accum}-{shape}-{self.reduction}{nodes}{clip}{options}"

    def hyper(self) -> dict[str, Any]:
        return {**ARGUMENTS[self.optimizer], **self.arguments}

    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 300, "allgather_bucket_size": 300}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 400}
        told = {"reduction": self.reduction, "ranks_per_node": self.ranks_per_node}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
            "optimizer": {"type": self.optimizer, "params": self.hyper() | told},
            "steps_per_print": 10**9,
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.accum_dtype:
            config["data_types"] = {"grad_accum_dtype": self.accum_dtype}
        return config


def few() -> list[SequenceCase]:
    """Return a case of every kind."""
    return [
        SequenceCase(0, "fp32", 2),
        SequenceCase(0, "bf16", 4),
        SequenceCase(1, "bf16", 2),
        SequenceCase(2, "fp32", 4),
        SequenceCase(2, "bf16", 2, reduction="observe", ranks_per_node=2),
        SequenceCase(2, "fp32", 2, optimizer="VRSGD", arguments={"gamma": 1.0}),
        SequenceCase(3, "fp32", 2, optimizer="VRSGD", clip=0.5),
        SequenceCase(3, "bf16", 4, reduction="observe"),
        SequenceCase(3, "fp32", 2, optimizer="VRSGD", arguments={"gamma": 1.0}),
    ]


def all_others() -> list[SequenceCase]:
    """Return cases of stages, dtypes and reductions, on four ranks cut 2 x 2 and 4 x 1."""
    engines = [(0, "fp32", None), (0, "bf16", None), (1, "fp32", None), (1, "bf16", None)]
    engines += [(2, "fp32", None), (2, "bf16", None), (2, "bf16", "fp32"), (3, "fp32", None), (3, "bf16", None)]
    found = [SequenceCase(stage, dtype, 2, accum) for stage, dtype, accum in engines]
    observed = [replace(case, reduction="observe") for case in found if case.stage and case.accum_dtype is None]
    found += observed
    found += [SequenceCase(stage, "fp32", 4) for stage in range(4)]
    # Not the ratio alone but the gradient, too, has DeepSpeed's scale; with gamma=1 it is DeepSpeed's own.
    for stage in range(4):
        found += [SequenceCase(stage, dtype, 2, optimizer="VRSGD", clip=0.5) for dtype in ("fp32", "bf16")]
        found += [SequenceCase(stage, "fp32", 2, optimizer="VRSGD", arguments={"gamma": 1.0})]
    found += [SequenceCase(stage, "fp32", 2, ranks_per_node=2) for stage in (2, 3)]
    found += [SequenceCase(stage, "bf16", 2, ranks_per_node=2, reduction="observe") for stage in (1, 3)]
    return [case for case in found if case not in few()]


def cut(size: int) -> Any:
    """Return the mpu for sequences over ``size`` ranks."""
    mpu._release_sequence_parallel_groups()
    mpu.initialize_sequence_parallel(size)
    return mpu


def build(case: SequenceCase, config: dict[str, Any] | None = None) -> Any:
    parallel = cut(case.size)
    model = make_sequence_model(parallel.get_sequence_parallel_group())
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups_of(model), config=config or case.config(), mpu=parallel
    )
    return engine


def groups_of(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


@dataclass
class Seen:
    """What rank 0 found.

    Attributes:
        of_weights: |theta - theta_ref| / |theta_ref|.
        of_distance: |theta - theta_ref| / |theta_ref - theta_0|.
        of_chunks: how far the sums over a sequence group's ranks are from the gradients of whole sequences.
        k, chunks: what the optimizer counted, and what there were.
        of_noise: that of tr(Sigma) and |G|^2 at the first step (``noise_error``); None without GSNR.
    """

    of_weights: float
    of_distance: float
    of_chunks: float
    k: int | None
    chunks: int
    of_noise: float | None


def train(engine: Any, case: SequenceCase, step: int) -> None:
    """Take one optimizer step; the ranks that share a sequence get the same samples."""
    replicas = WORLD // case.size
    micro_batches = sequence_batches(step, case.accumulation * replicas)
    replica = torch.distributed.get_rank() // case.size
    for index in range(case.accumulation):
        engine.backward(engine(micro_batches[index * replicas + replica].to(engine.device)))
        engine.step()


def run_case(case: SequenceCase, rank: int) -> Seen | None:
    engine = build(case)
    seen = SeenGradients(engine.module)
    original, accumulated = engine._backward_epilogue, case.accumulation
    engine._backward_epilogue = lambda: (original(), seen.end_chunk(1.0 / accumulated))
    plain = make_sequence_model().to(engine.device, DTYPES[case.dtype])
    start = {name: weight.detach().cpu().double() for name, weight in plain.named_parameters()}
    names = list(start)
    matrices = [name for name in names if start[name].dim() > 1]
    vectors = [name for name in names if start[name].dim() == 1]
    reference = DenseOptimizer(
        case.optimizer, start, [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **case.hyper()
    )
    of_chunks = 0.0
    k = of_noise = None
    for step in range(STEPS):
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        replicas = WORLD // case.size
        whole = chunk_gradients(plain, sequence_batches(step, case.accumulation * replicas), 1.0) if rank == 0 else []
        train(engine, case, step)
        parts = seen.collect()
        if step == 0 and case.hyper().get("gamma", 0.1) < 1:
            k = ds_vrgd.gsnr_stats(engine).k
        if rank:
            continue
        joined = join(parts, case)
        of_chunks = max(of_chunks, difference(joined, whole))
        # The reference is given the very parts: half precision rounds each. Stage 3 alone divides by all ranks.
        share = case.size if case.stage == 3 else 1
        chunks = [{n: grad / share for n, grad in chunk.items()} for chunk in joined]
        if step == 0 and k is not None:
            of_noise = noise_error(gradient_noise(engine), chunks, engine.train_micro_batch_size_per_gpu())
        reference.step(chunks, clip=case.clip)
    assert (engine.global_steps, engine.skipped_steps) == (STEPS, 0)
    masters = master_weights(engine)
    engine.destroy()
    if rank:
        return None
    error = relative_error(masters, reference)
    moved = norm_of([reference.params[name] - start[name] for name in start])
    moved /= norm_of(list(reference.params.values()))
    return Seen(error, error / moved, of_chunks, k, case.accumulation * WORLD // case.size, of_noise)


def join(parts: list[dict[str, Tensor]], case: SequenceCase) -> list[dict[str, Tensor]]:
    """Join chunks from the ranks' parts, which come by micro-batch and rank; a rank may lack a layer."""
    chunks = []
    for first in range(0, len(parts), case.size):
        together = parts[first : first + case.size]
        names = {name: None for part in together for name in part}
        chunks.append({name: sum(part[name] for part in together if name in part) for name in names})
    return chunks


def resume(case: SequenceCase, folder: Path) -> dict[str, list[str]]:
    """Return the bitwise differences of a resumed run from one that never stopped, and of the state on another cut."""
    engine = build(case)
    for step in range(2):
        train(engine, case, step)
    engine.save_checkpoint(str(folder), tag="saved")
    at_saving = whole_state(engine)
    train(engine, case, 2)
    straight = whole_state(engine)
    engine.destroy()
    again = build(case)
    again.load_checkpoint(str(folder), tag="saved")
    train(again, case, 2)
    stopped = whole_state(again)
    again.destroy()
    if torch.distributed.get_rank() == 0:
        to_universal(folder, folder / "universal", "saved")
    torch.distributed.barrier()
    elsewhere = replace(case, size=2 if case.size == 4 else 4)
    other = build(elsewhere, elsewhere.config() | {"checkpoint": {"load_universal": True}})
    other.load_checkpoint(str(folder / "universal"), tag="saved")
    loaded = whole_state(other)
    other.destroy()
    return {"resumed": differences(straight, stopped), "cut otherwise": differences(at_saving, loaded)}


def spoil(case: SequenceCase, poisoned: int) -> list[str]:
    """Return the error of a window in which one rank's part of one chunk is not finite, and the changed weights."""
    config = case.config()
    config["optimizer"]["params"]["nonfinite"] = "error"
    engine = build(case, config)
    before = whole_state(engine)["fp32"]
    error = ""
    for index in range(case.accumulation):
        loss = engine(sequence_batches(0, 1)[0].to(engine.device))
        bad = index == 1 and torch.distributed.get_rank() == poisoned
        engine.backward(loss * float("nan") if bad else loss)
        try:
            engine.step()
        except FloatingPointError as caught:
            error = str(caught)
    changed = differences(before, whole_state(engine)["fp32"])
    assert engine.skipped_steps == 1
    engine.destroy()
    return [error, *changed]


def refused(config: dict[str, Any], size: int | None) -> str:
    """Return the error of building an engine, with the mpu or without, or "" if it was built."""
    base = replace(SequenceCase(2, "fp32", 2)).config()
    model = make_sequence_model()
    parallel = None if size is None else cut(size)
    groups.mesh_device = groups.mpu = None  # of the engines before
    try:
        deepspeed.initialize(model=model, model_parameters=groups_of(model), config=base | config, mpu=parallel)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        groups.mesh_device = groups.mpu = None
    return ""


#: Refusals: the addition to the JSON, the ranks of a sequence in the mpu, and the parts of the message.
REFUSED: dict[str, tuple[dict[str, Any], int | None, tuple[str, ...]]] = {
    "a mesh": (
        {"data_parallel_size": 2, "sequence_parallel_size": 2},
        None,
        ("data_parallel_size and sequence_parallel_size", "drift apart", "initialize_sequence_parallel(2)"),
    ),
    "no mpu": ({"sequence_parallel_size": 2}, None, ("sequence_parallel_size=2 without an mpu", "as mpu")),
    "stage 3 without reduce-scatter": (
        {"zero_optimization": {"stage": 3, "reduce_scatter": False}},
        2,
        ("reduce_scatter=false", "stage 3", "Set it to true"),
    ),
    "BF16_Optimizer": (
        {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        2,
        ("grad_accum_dtype=fp32", "BF16_Optimizer", "use stage 2"),
    ),
    "nodes that part sequences": (
        {"optimizer": {"type": "VRSGD", "params": {"lr": 0.1, "ranks_per_node": 2}}},
        4,
        ("ranks_per_node", "[0, 1, 2, 3]", "multiple of the sequence-parallel size 4"),
    ),
}


def quick(rank: int, folder: str) -> dict[str, Any]:
    """Run all except the slow cases, in one spawn."""
    found: dict[str, Any] = dict(zip([case.name() for case in few()], run_cases(rank, few()), strict=True))
    for stage in (2, 3):
        found[f"resumed at stage {stage}"] = resume(SequenceCase(stage, "bf16", 2), Path(folder, str(stage)))
    spoiled = (SequenceCase(0, "fp32", 2), SequenceCase(2, "bf16", 2))
    found["spoiled"] = {case.name(): spoil(case, 3) for case in spoiled}
    found["refused"] = {name: refused(config, size) for name, (config, size, _) in REFUSED.items()}
    return found


def run_cases(rank: int, chosen: list[SequenceCase]) -> list[Any]:
    found: list[Any] = []
    for case in chosen:
        try:
            found.append(run_case(case, rank))
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found
