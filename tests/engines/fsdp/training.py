"""Training of the small model under FSDP2, next to the dense reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import ds_vrgd
from ds_vrgd.doctor.chunks import chunk_gradients, norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.optim import OPTIMIZERS, VROptimizer
from tests.support.model import batches, make_model, param_groups
from tests.support.ranks import DEVICE
from tests.support.trajectory import ADAPTIVE, ARGUMENTS, DTYPES, noise_error


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        optimizer: name of its class.
        dtype: of computation and reduction: fp32, bf16.
        ranks: shards of every parameter.
        accumulation: micro-batches in a step.
        replicas: copies of every shard (HSDP).
        blocks: the submodules that are sharded by themselves.
        reshard, offload, compiled: ``reshard_after_forward``, ``CPUOffloadPolicy``, ``torch.compile`` of the blocks.
        reduce_dtype: of the reduction; None for ``dtype``.
        checkpointing: activation checkpointing of the model.
        clip: of ``clip_grad_norm_``.
        merged: micro-batches in a chunk (``set_requires_gradient_sync``).
        divisor: of ``set_gradient_divide_factor``; None for FSDP2's own. The loss is divided by what is left.
        attached: whether the optimizer is attached.
        arguments: of the optimizer, over those of :data:`tests.support.trajectory.ARGUMENTS`.
        of_vectors: of the group of biases and normalisation.
    """

    optimizer: str
    dtype: str
    ranks: int
    accumulation: int
    replicas: int = 1
    blocks: tuple[str, ...] = ("positions", "up", "down")
    reshard: bool = True
    offload: bool = False
    compiled: bool = False
    reduce_dtype: str | None = None
    checkpointing: str | None = None
    clip: float = 0.0
    merged: int = 1
    divisor: float | None = None
    attached: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)
    of_vectors: Mapping[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.ranks * self.replicas

    @property
    def loss_divisor(self) -> float:
        return self.accumulation * self.world / (self.divisor or self.world)

    @property
    def k(self) -> int:
        return self.world * self.accumulation // self.merged

    def hyper(self) -> dict[str, Any]:
        return {**ARGUMENTS[self.optimizer], **self.arguments}

    def without_decay(self) -> dict[str, Any]:
        return ({"adapt": False} if self.optimizer in ADAPTIVE else {}) | self.of_vectors

    def mesh(self) -> DeviceMesh:
        """Return the mesh; with fewer ranks than the world's, that of the first of them."""
        shape, names = ((self.ranks,), ("shard",)) if self.replicas == 1 else (
            (self.replicas, self.ranks), ("replicate", "shard"))  # fmt: skip
        return init_device_mesh(DEVICE, shape, mesh_dim_names=names)


@dataclass
class Result:
    """Errors of a run.

    Attributes:
        of_weights: |theta - theta_ref| / |theta_ref|.
        moved: |theta_ref - theta_0| / |theta_ref|.
        k: chunks of the last step; None without GSNR.
        of_noise: that of tr(Sigma) and |G|^2 at the first step; None without GSNR, or where it was not looked at.
    """

    of_weights: float
    moved: float
    k: int | None
    of_noise: float | None


def sharded(case: Case, model: nn.Module | None = None) -> nn.Module:
    """Return a model that is sharded as the case says."""
    model = make_model(case.checkpointing).to(DEVICE) if model is None else model
    dtype = DTYPES[case.dtype]
    reduced = DTYPES[case.reduce_dtype] if case.reduce_dtype else dtype
    options: dict[str, Any] = {
        "mesh": case.mesh(),
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduced, cast_forward_inputs=False),
        "reshard_after_forward": case.reshard,
    }
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE != "cpu")
    for name in case.blocks:
        block = model.get_submodule(name)
        if case.compiled:
            block.compile(backend="aot_eager")
        fully_shard(block, **options)
    fully_shard(model, **options)
    if case.divisor is not None:
        for module in (model, *map(model.get_submodule, case.blocks)):
            module.set_gradient_divide_factor(case.divisor)  # type: ignore[operator]
    return model


def build(case: Case) -> tuple[nn.Module, VROptimizer]:
    """Return the sharded model and its optimizer."""
    model = sharded(case)
    optimizer = OPTIMIZERS[case.optimizer](param_groups(model, **case.without_decay()), **case.hyper())
    if case.attached:
        ds_vrgd.attach(model, optimizer)
    return model, optimizer


def window(case: Case, model: Any, step: int) -> None:
    """Run the backward passes of a step on this rank."""
    tokens = batches(step, case.accumulation * case.world)
    for index, batch in enumerate(tokens[dist.get_rank() :: case.world]):
        model.set_requires_gradient_sync((index + 1) % case.merged == 0)
        (model(batch.to(DEVICE)) / case.loss_divisor).backward()


def chunks_of(case: Case, plain: nn.Module, step: int) -> list[dict[str, Tensor]]:
    """Return the chunk gradients of a step, from a plain copy of the model."""
    tokens = [batch.to(DEVICE) for batch in batches(step, case.accumulation * case.world)]
    found = chunk_gradients(plain, tokens, 1.0 / case.loss_divisor)
    together = []
    for start in range(0, len(found), case.world * case.merged):
        for rank in range(case.world):
            parts = [found[start + index * case.world + rank] for index in range(case.merged)]
            together.append({name: sum(part[name] for part in parts) / case.merged for name in parts[0]})  # type: ignore[misc]
    return together


def full(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole parameters, by name, on the CPU; a collective."""
    found = {}
    for name, param in model.named_parameters():
        whole: Any = param.detach()
        if param.device.type != DEVICE:
            whole = whole.to(DEVICE)
        found[name] = whole.full_tensor().cpu().clone()
    return found


def reference_of(case: Case, model: nn.Module) -> DenseOptimizer:
    """Return the dense optimizer at the model's weights; a collective."""
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    start = {name: weight.double() for name, weight in full(model).items() if name in trained}
    matrices = [name for name, weight in start.items() if weight.dim() > 1]
    vectors = [name for name in start if name not in matrices]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, **case.without_decay()}]
    return DenseOptimizer(case.optimizer, start, groups, **case.hyper())


def error_of(model: nn.Module, reference: DenseOptimizer) -> float:
    """Return |theta - theta_ref| / |theta_ref|; a collective."""
    weights = full(model)
    error = [weights[name].double() - weight for name, weight in reference.params.items()]
    return norm_of(error) / norm_of(list(reference.params.values()))


def run_case(case: Case, steps: int = 5) -> Result:
    """Train, and return the errors."""
    model, optimizer = build(case)
    plain = make_model().to(DEVICE, DTYPES[case.dtype])
    reference = reference_of(case, model)
    start = copy.deepcopy(reference.params)
    of_noise = None
    for step in range(steps):
        plain.load_state_dict(full(model), strict=False)
        chunks = chunks_of(case, plain, step)
        reference.step(chunks, clip=case.clip)
        window(case, model, step)
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0 and optimizer.layer_statistics and not case.of_vectors and case.merged == 1:
            of_noise = noise_error(ds_vrgd.noise.gradient_noise(optimizer, 4), chunks, 4)
    moved = norm_of([reference.params[name] - start[name] for name in start])
    k = optimizer.layer_statistics[0].k if optimizer.layer_statistics else None
    return Result(error_of(model, reference), moved / norm_of(list(reference.params.values())), k, of_noise)


def run_cases(rank: int, cases: Mapping[str, Case]) -> dict[str, Result | str]:
    """Run every case in one process; an error becomes its text."""
    found: dict[str, Result | str] = {}
    for name, case in cases.items():
        try:
            found[name] = run_case(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
