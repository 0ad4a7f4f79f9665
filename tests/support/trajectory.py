"""Drive a DeepSpeed engine for some steps, and follow with the dense float64 reference.

The reference gets its chunk gradients from a plain copy of the model (no engine, no hook) that holds the engine's
weights, one backward pass per chunk; it knows nothing of ranks, shards or buckets. Without GSNR nothing of ours sees
the chunks, so in half precision the reference is then given the mean that DeepSpeed hands over, gathered from all
ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from torch import Tensor

import ds_vrgd
from ds_vrgd.doctor.chunks import chunk_gradients, norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import HandedMean, master_weights, whole_weights
from ds_vrgd.noise import GradientNoise, gradient_noise
from ds_vrgd.optim import OPTIMIZERS
from tests.support.model import TinyLM, batches, make_model, param_groups

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Rates at which five steps move the weights by a visible amount, and options away from their defaults.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "VRSGD": {"lr": 0.5, "weight_decay": 0.01},
    "VRMomentum": {"lr": 0.2, "weight_decay": 0.01, "nesterov": True},
    "VRAdam": {"lr": 5e-3, "weight_decay": 0.01},
    "VRAdamW": {"lr": 5e-3, "weight_decay": 0.1},
    "VRLARS": {"lr": 1.0, "weight_decay": 0.01, "trust_coefficient": 0.02},
    "VRLAMB": {"lr": 5e-3, "weight_decay": 0.1},
    "LARS": {"lr": 1.0, "weight_decay": 0.01, "trust_coefficient": 0.02},
    "LAMB": {"lr": 5e-3, "weight_decay": 0.1},
}
ADAPTIVE = ("VRLARS", "VRLAMB", "LARS", "LAMB")


@dataclass(frozen=True)
class Case:
    """One configuration of an engine.

    Attributes:
        optimizer: name, as in the JSON.
        stage: ZeRO stage.
        dtype: of the model: fp32, bf16, fp16.
        accumulation: micro-batches per step.
        accum_dtype: DeepSpeed's ``data_types.grad_accum_dtype``, or None for the model's.
        steps: optimizer steps.
        clip: DeepSpeed's ``gradient_clipping``.
        loss_scale_power: fp16's initial loss scale is 2 to this.
        zero: further keys of ``zero_optimization``.
        arguments: optimizer arguments over :data:`ARGUMENTS`.
        of_vectors: further arguments of the param group of biases and normalisation.
        checkpointing: activation checkpointing of the model.
        zero_init: build the model under ``deepspeed.zero.Init``.
        entry: how the optimizer reaches the engine: json, instance, factory.
        autocast: DeepSpeed's ``torch_autocast`` in bf16, with fp32 weights.
        compiled: ``engine.compile()``, without code generation.
        unmanaged: the accumulation boundary is where the program steps, not where DeepSpeed counts it.
        reduction: the optimizer's argument: auto, fused, observe.
        ranks_per_node: the optimizer's argument, or None for one node.
        nonfinite: the optimizer's argument: skip, error.
    """

    optimizer: str
    stage: int
    dtype: str
    accumulation: int
    accum_dtype: str | None = None
    steps: int = 5
    clip: float = 0.0
    loss_scale_power: int = 8
    zero: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    of_vectors: Mapping[str, Any] = field(default_factory=dict)
    checkpointing: str | None = None
    zero_init: bool = False
    entry: str = "json"
    autocast: bool = False
    compiled: bool = False
    unmanaged: bool = False
    reduction: str = "auto"
    ranks_per_node: int | None = None
    nonfinite: str = "skip"

    def hyper(self) -> dict[str, Any]:
        return {**ARGUMENTS[self.optimizer], **self.arguments}

    def given(self) -> dict[str, Any]:
        """Return all arguments of the optimizer."""
        told = {"reduction": self.reduction, "ranks_per_node": self.ranks_per_node, "nonfinite": self.nonfinite}
        defaults = {"reduction": "auto", "ranks_per_node": None, "nonfinite": "skip"}
        return self.hyper() | {name: value for name, value in told.items() if value != defaults[name]}

    def is_fused(self) -> bool:
        """Return whether our exchange replaces DeepSpeed's reduction."""
        observes = self.stage == 0 or self.reduction == "observe" or "offload_optimizer" in self.zero
        return not (observes or (self.stage == 1 and (self.dtype, self.accum_dtype) == ("bf16", "fp32")))

    def without_decay(self) -> dict[str, Any]:
        """Return the arguments of the param group of biases and normalisation."""
        return ({"adapt": False} if self.optimizer in ADAPTIVE else {}) | self.of_vectors

    def config(self, world: int) -> dict[str, Any]:
        """Return the DeepSpeed JSON."""
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": 300, "allgather_bucket_size": 300}
        if self.stage == 3:
            zero |= {"stage3_param_persistence_threshold": 0, "sub_group_size": 400}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": self.accumulation,
            "train_batch_size": 4 * self.accumulation * world,
            "gradient_clipping": self.clip,
            "zero_optimization": zero | dict(self.zero),
            "optimizer": {"type": self.optimizer, "params": self.given()},
            "steps_per_print": 10**9,
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        if self.dtype == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": self.loss_scale_power, "loss_scale_window": 1000}
        if self.accum_dtype:
            config["data_types"] = {"grad_accum_dtype": self.accum_dtype}
        if self.autocast:
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        if self.unmanaged:
            config |= {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 1}
            config["train_batch_size"] = 4 * world
        if self.entry != "json":
            del config["optimizer"]
        return config


@dataclass
class Result:
    """Errors of a run on rank 0.

    Attributes:
        of_weights: |theta - theta_ref| / |theta_ref|.
        of_distance: |theta - theta_ref| / |theta_ref - theta_0|.
        moved: |theta_ref - theta_0| / |theta_ref|.
        stats: GSNR of the first step, at which every configuration has the same weights; None without GSNR.
        wrapper: class of the engine's optimizer.
        of_mean: |mean - mean_ref| / |mean_ref| of the mean that DeepSpeed hands over, at worst; None where it was not
            looked at, or was clipped.
        of_noise: that of tr(Sigma) and |G|^2 at the first step (``noise_error``); None without GSNR.
    """

    of_weights: float
    of_distance: float
    moved: float
    stats: ds_vrgd.GSNRStatistics | None
    wrapper: str
    of_mean: float | None
    of_noise: float | None


def build(case: Case, world: int, config: dict[str, Any] | None = None) -> Any:
    """Return the engine of a case, perhaps with another JSON than the case's own."""
    config = config or case.config(world)
    if case.zero_init:
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = TinyLM(case.checkpointing)
        _set_weights(model)
    else:
        model = make_model(case.checkpointing)
    groups = param_groups(model, **case.without_decay())
    arguments: dict[str, Any] = {}
    if case.entry == "instance":
        arguments["optimizer"] = OPTIMIZERS[case.optimizer](groups, **case.given())
    elif case.entry == "factory":
        arguments["optimizer"] = lambda params: OPTIMIZERS[case.optimizer](params, **case.given())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config, **arguments)
    if case.compiled:
        engine.compile(backend="aot_eager")
    return engine


def _set_weights(model: TinyLM) -> None:
    source = dict(make_model().named_parameters())
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters(param, modifier_rank=0):
            param.data.copy_(source[name].data)


def run_case(case: Case, rank: int, world: int) -> Result | None:
    """Train; return the errors on rank 0 and None elsewhere."""
    engine = build(case, world)
    plain = make_model().to(engine.device, DTYPES[case.dtype])
    start = {name: weight.cpu().double() for name, weight in plain.named_parameters() if weight.requires_grad}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    of_mean: list[float] = []
    theirs = case.dtype != "fp32" and engine.basic_optimizer.observer.mode == "off"
    given = HandedMean(engine.basic_optimizer) if theirs else None
    for step in range(case.steps):
        micro_batches = [tokens.to(engine.device) for tokens in batches(step, case.accumulation * world)]
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        scale = getattr(engine.optimizer, "loss_scale", 1.0) if case.dtype == "fp16" else 1.0
        divisor = 1 if case.unmanaged else case.accumulation
        with torch.autocast(engine.device.type, torch.bfloat16, enabled=case.autocast):
            chunks = chunk_gradients(plain, micro_batches, scale / divisor) if rank == 0 else []
        if case.unmanaged:  # nobody divides by the number of micro-batches: the step is their sum
            chunks = [{name: grad * case.accumulation for name, grad in chunk.items()} for chunk in chunks]
        for index in range(case.accumulation):
            engine.backward(engine(micro_batches[index * world + rank]))
            if not case.unmanaged or index == case.accumulation - 1:
                engine.step()
        if step == 0:
            stats = ds_vrgd.gsnr_stats(engine) if _gsnr(engine) else None
            of_noise = None
            if stats is not None and rank == 0:
                of_noise = noise_error(gradient_noise(engine), chunks, engine.train_micro_batch_size_per_gpu())
        mean = None if given is None else given.collect()
        if rank == 0 and mean is None:
            reference.step(chunks, clip=case.clip)
        elif rank == 0:
            if not case.clip:
                of_mean.append(error_of_mean(mean, chunks))
            reference.step(chunks, mean={name: mean[name].view_as(weight) for name, weight in start.items()})
    assert (engine.global_steps, engine.skipped_steps) == (case.steps, 0)
    masters = master_weights(engine)
    with whole_weights(engine) as weights:
        for name, master in masters.items():
            assert torch.equal(master.view_as(weights[name]).to(DTYPES[case.dtype]), weights[name].cpu()), (
                f"master of {name}"
            )
    wrapper = type(engine.optimizer).__name__
    engine.destroy()
    if rank:
        return None
    error = relative_error(masters, reference)
    moved = norm_of([reference.params[name] - start[name] for name in start])
    moved /= norm_of(list(reference.params.values()))
    return Result(error, error / moved, moved, stats, wrapper, max(of_mean, default=None), of_noise)


def noise_error(noise: GradientNoise, chunks: list[dict[str, Tensor]], size: int) -> float:
    """Return the worst error of a layer's tr(Sigma), relative; and of its |G|^2, relative to |mean|^2.

    Args:
        noise: what was measured.
        chunks: gradients of the same step, in float64, without loss scale.
        size: samples in a chunk.
    """
    worst = 0.0
    for name, trace, signal in zip(noise.names, noise.trace.tolist(), noise.signal.tolist(), strict=True):
        of_chunks = torch.stack([chunk[name] for chunk in chunks]).double()
        variance, square = float(of_chunks.var(0).sum()), float(of_chunks.mean(0).square().sum())
        right = square - variance / len(chunks)
        worst = max(worst, abs(trace - size * variance) / (size * variance), abs(signal - right) / square)
    return worst


def error_of_mean(mean: Mapping[str, Tensor], chunks: list[dict[str, Tensor]]) -> float:
    """Return the norm-wise error of a flat mean by name, compared with the mean of the chunks' gradients."""
    right = {name: torch.stack([chunk[name] for chunk in chunks]).mean(0).flatten() for name in chunks[0]}
    return norm_of([mean[name].double() - grad for name, grad in right.items()]) / norm_of(list(right.values()))


def relative_error(masters: Mapping[str, Tensor], reference: DenseOptimizer) -> float:
    """Return |theta - theta_ref| / |theta_ref| over all layers; ``masters`` flat, by name, and complete."""
    assert set(masters) == set(reference.params)
    error = norm_of([masters[name].double() - weight.flatten() for name, weight in reference.params.items()])
    return error / norm_of(list(reference.params.values()))


def _gsnr(engine: Any) -> bool:
    return bool(engine.basic_optimizer.param_groups[0]["gamma"] < 1.0)


def reference_groups(start: Mapping[str, Tensor], case: Case) -> list[dict[str, Any]]:
    matrices = [name for name, weight in start.items() if weight.dim() > 1]
    vectors = [name for name in start if name not in matrices]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, **case.without_decay()}]


def run_cases(rank: int, world: int, cases: list[Case]) -> list[Result | str | None]:
    """Run every case in one process; return an error that all ranks share as its text."""
    results: list[Result | str | None] = []
    for case in cases:
        try:
            results.append(run_case(copy.deepcopy(case), rank, world))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results
