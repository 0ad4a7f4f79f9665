"""The configurations of FSDP2 that are held against the dense reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ds_vrgd.optim import OPTIMIZERS
from tests.engines.fsdp.training import Case

#: (ranks that share the shards, copies of them).
WORLDS = ((1, 1), (2, 1), (3, 1), (4, 1), (2, 2))
ACCUMULATIONS = (1, 4)
DTYPES = ("fp32", "bf16")

BASE = Case("VRLAMB", "bf16", 2, 4)
#: Settings around VRLAMB, by what they are called.
SETTINGS: dict[str, Case] = {
    "no resharding": replace(BASE, reshard=False),
    "the model alone": replace(BASE, blocks=()),
    "fp32 reduction": replace(BASE, reduce_dtype="fp32"),
    "CPU offload": replace(BASE, offload=True),
    "compiled blocks": replace(BASE, compiled=True),
    "checkpointing": replace(BASE, checkpointing="non-reentrant"),
    "reentrant checkpointing": replace(BASE, checkpointing="reentrant"),
    "clipping": replace(BASE, clip=0.05),
    "two micro-batches a chunk": replace(BASE, merged=2, reduce_dtype="fp32"),
    "sums, not means": replace(BASE, divisor=1.0, arguments={"prenormalize": True}),
    "no bias correction": replace(BASE, arguments={"bias_correction": False, "trust_clip": (0.1, 5.0)}),
    "prenormalized": replace(BASE, arguments={"prenormalize": True}),
    "a group with gamma 1": replace(BASE, of_vectors={"gamma": 1.0}),
    "gamma 1": replace(BASE, arguments={"gamma": 1.0}),
    "bf16 average of the ratio": replace(BASE, dtype="fp32", arguments={"gsnr_dtype": "bfloat16"}),
    "three ranks, no resharding": replace(BASE, ranks=3, reshard=False),
    "2 x 2, clipping": replace(BASE, replicas=2, clip=0.05),
    "2 x 2, two micro-batches a chunk": replace(BASE, replicas=2, merged=2, reduce_dtype="fp32"),
    "2 x 2, CPU offload": replace(BASE, replicas=2, offload=True),
}
#: Without ``attach``: the mean is FSDP2's own, exact in fp32.
UNATTACHED: dict[str, Case] = {
    f"{name}, {ranks} x {replicas}{note}": Case(
        name, "fp32", ranks, 2, replicas, attached=False, arguments=arguments, clip=clip
    )
    for name in ("LAMB", "LARS")
    for ranks, replicas in ((1, 1), (2, 1), (3, 1), (2, 2))
    for note, arguments, clip in (("", {}, 0.0), (", clipped", {}, 0.05))
} | {
    "LAMB, prenormalized": Case("LAMB", "fp32", 3, 2, attached=False, arguments={"prenormalize": True}),
    "VRLAMB with gamma 1": Case("VRLAMB", "fp32", 2, 2, attached=False, arguments={"gamma": 1.0}),
    "VRAdamW with gamma 1": Case("VRAdamW", "fp32", 2, 2, attached=False, arguments={"gamma": 1.0}),
}


def identify(case: Case) -> str:
    return f"{case.optimizer}-{case.dtype}-{case.ranks}x{case.replicas}-gas{case.accumulation}"


def matrix() -> Iterator[Case]:
    for optimizer in OPTIMIZERS:
        for dtype in DTYPES:
            for ranks, replicas in WORLDS:
                for accumulation in ACCUMULATIONS:
                    yield Case(optimizer, dtype, ranks, accumulation, replicas)


def is_slow(case: Case) -> bool:
    """Return whether ``make test`` leaves out a case of the matrix: it has every optimizer, and copies of shards."""
    mesh = case.ranks, case.replicas, case.accumulation
    hsdp = case.optimizer in ("LAMB", "VRLAMB") and mesh == (2, 2, 4)
    return case.dtype != "bf16" or not (hsdp or mesh == (3, 1, 4))
