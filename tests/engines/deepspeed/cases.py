"""Every engine configuration that is held against the dense reference, by the number of ranks that run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from ds_vrgd.optim import OPTIMIZERS
from tests.support.ranks import DEVICE, MOST_RANKS
from tests.support.trajectory import Case

#: Ranks that there are devices for.
AT_MOST = min(4, MOST_RANKS)
WORLDS = tuple(range(1, min(3, AT_MOST) + 1))
ACCUMULATIONS = (1, 4)

#: (stage, dtype, accumulation dtype): every wrapper that DeepSpeed has for a client optimizer.
ENGINES: tuple[tuple[int, str, str | None], ...] = (
    (0, "fp32", None),
    (0, "bf16", None),
    (1, "fp32", None),
    (1, "bf16", "bf16"),
    (1, "bf16", "fp32"),
    (1, "fp16", None),
    (2, "fp32", None),
    (2, "bf16", None),
    (2, "fp16", None),
    (3, "fp32", None),
    (3, "bf16", None),
    (3, "fp16", None),
)

#: Engines that are left out, and why.
LEFT_OUT = {
    "stage 0, fp16": "DeepSpeed never scales the loss there but divides the gradient by the loss scale: refused.",
    "stage 0, bf16, accumulation in fp32": "DeepSpeed has no wrapper for it (NotImplementedError).",
}


def matrix() -> Iterator[tuple[int, str, Case]]:
    """Optimizers x engines x accumulations x worlds."""
    for optimizer, engine, accumulation, world in product(OPTIMIZERS, ENGINES, ACCUMULATIONS, WORLDS):
        stage, dtype, accum_dtype = engine
        case = Case(optimizer, stage, dtype, accumulation, accum_dtype)
        yield world, identify(case), case


def identify(case: Case, note: str = "") -> str:
    """A readable test id."""
    accum = f"+{case.accum_dtype}" if case.accum_dtype else ""
    note = "-".join(part for part in (note, "" if case.reduction == "auto" else case.reduction) if part)
    return f"{case.optimizer}-z{case.stage}-{case.dtype}{accum}-gas{case.accumulation}{'-' + note if note else ''}"


#: Optimizers that reduce variance.
REDUCING = tuple(name for name, cls in OPTIMIZERS.items() if cls.reduces_variance)

BASE = Case("VRLAMB", 2, "fp32", 4)

#: Settings that must change nothing: neither the ratio nor the trajectory.
NEUTRAL: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("overlap_comm", (1, 2, 3), {"overlap_comm": True}),
    ("no_overlap_comm", (1, 2, 3), {"overlap_comm": False}),
    ("round_robin", (1, 2), {"round_robin_gradients": True}),
    ("one_large_bucket", (1, 2, 3), {"reduce_bucket_size": 1_000_000}),
    ("bucket_of_one_layer", (1, 2, 3), {"reduce_bucket_size": 1}),
    ("no_reduce_scatter", (1, 2, 3), {"reduce_scatter": False}),
    ("reduce_to_owner", (1, 2), {"use_multi_rank_bucket_allreduce": False}),
    ("not_contiguous", (1, 2, 3), {"contiguous_gradients": False}),
    ("aligned", (1, 2), {"parameter_alignment": True}),
    ("cpu_offload", (1, 2, 3), {"offload_optimizer": {"device": "cpu"}}),
    ("one_sub_group", (3,), {"sub_group_size": 1_000_000}),
    ("parameter_offload", (3,), {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
    ("persistent_parameters", (3,), {"stage3_param_persistence_threshold": 10_000}),
)


def variants() -> Iterator[tuple[int, str, Case]]:
    """Settings around one optimizer, and the ways in which gradients travel."""
    for note, stages, zero in NEUTRAL:
        for stage, reduction in product(stages, ("auto", "observe")):
            case = replace(BASE, stage=stage, zero=zero, reduction=reduction)
            yield 2, identify(case, note), case
    for optimizer, engine, accumulation in product(REDUCING, ENGINES, ACCUMULATIONS):
        stage, dtype, accum_dtype = engine
        if stage > 0:
            case = Case(optimizer, stage, dtype, accumulation, accum_dtype, reduction="observe")
            yield 2, identify(case), case
    for optimizer, engine, reduction in product(("VRLAMB", "VRSGD"), ENGINES, ("auto", "observe")):
        stage, dtype, accum_dtype = engine
        if stage > 0:
            case = Case(optimizer, stage, dtype, 2, accum_dtype, reduction=reduction, ranks_per_node=2)
            yield 4, identify(case, "two_nodes"), case
    for optimizer, stage in product(("LAMB", "LARS"), (2, 3)):  # the mean alone, and DeepSpeed's
        case = Case(optimizer, stage, "bf16", 2, ranks_per_node=2)
        yield 4, identify(case, "two_nodes"), case
        case = Case(optimizer, stage, "bf16", 2, reduction="observe")
        yield 2, identify(case), case
    for stage, checkpointing in product((0, 1, 2, 3), ("reentrant", "non-reentrant")):
        case = replace(BASE, stage=stage, checkpointing=checkpointing)
        yield 2, identify(case, checkpointing), case
    for dtype in ("fp32", "bf16", "fp16"):
        case = replace(BASE, stage=3, dtype=dtype, zero_init=True)
        yield 3, identify(case, "zero_init"), case
    for stage, entry in product((0, 1, 2, 3), ("instance", "factory")):
        case = replace(BASE, stage=stage, entry=entry)
        yield 2, identify(case, entry), case
    # Several accelerators refuse a compiled model: see ds_vrgd/engines/deepspeed/refusals.py.
    ways = ("autocast", "compiled", "unmanaged") if DEVICE == "cpu" else ("autocast", "unmanaged")
    for stage, way in product((0, 1, 2, 3), ways):
        case = replace(BASE, stage=stage, **{way: True})
        # Stage 3 gathers the weights of an autocast module in bf16, also where the module is tied to one that is not
        # autocast: then the plain model's chunks are not the engine's. One rank gathers nothing.
        yield 1 if (stage, way) == (3, "autocast") else 2, identify(case, way), case
    for stage, dtype, accum_dtype in ENGINES:
        case = replace(BASE, stage=stage, dtype=dtype, accum_dtype=accum_dtype, clip=0.05)
        yield 2, identify(case, "clipped"), case
    for stage in (1, 2, 3):
        case = replace(BASE, stage=stage, dtype="fp16", loss_scale_power=12)
        yield 2, identify(case, "scale16x"), case
    for stage in (0, 1, 2, 3):  # six chunks a step in every split
        for world, accumulation in ((1, 6), (2, 3), (3, 2)):
            case = replace(BASE, stage=stage, accumulation=accumulation)
            yield world, identify(case, "six_chunks"), case
    for stage, arguments in product((0, 1, 2, 3), OPTIONS):
        case = replace(BASE, stage=stage, clip=0.5, arguments=arguments)
        yield 2, identify(case, "_".join(arguments)), case


#: Options of LAMB that the matrix leaves at their defaults.
OPTIONS: tuple[dict[str, Any], ...] = (
    {"bias_correction": False},
    {"trust_clip": (0.5, 2.0)},
    {"prenormalize": True},
    {"gamma": 0.5, "beta3": 0.5, "gsnr_eps": 1e-3},
)


def all_cases() -> list[tuple[int, str, Case]]:
    """Everything that there are devices for; ids are unique within a world."""
    return [(world, name, case) for world, name, case in (*matrix(), *variants()) if world <= AT_MOST]


def is_slow(case: Case, world: int) -> bool:
    """Return whether `make test` leaves a case out: on two ranks it runs each wrapper, each optimizer in two."""
    plain = Case(case.optimizer, case.stage, case.dtype, 4, case.accum_dtype, reduction=case.reduction)
    if world != 2 or case != plain:
        return True
    engine = ENGINES.index((case.stage, case.dtype, case.accum_dtype))
    return case.optimizer != "VRLAMB" and (engine + list(OPTIMIZERS).index(case.optimizer)) % 6 > 0
