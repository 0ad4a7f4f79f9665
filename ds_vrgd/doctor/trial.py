"""Train under the user's configuration, beside the reference."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ds_vrgd.doctor.chunks import SeenGradients, chunk_gradients, difference, loss_of, norm_of
from ds_vrgd.doctor.findings import ROUNDING, VISIBLE, Findings
from ds_vrgd.doctor.model import load_model, on_device
from ds_vrgd.doctor.reference import DEFAULTS, DenseOptimizer
from ds_vrgd.doctor.settings import Settings
from ds_vrgd.doctor.weights import HandedMean, master_weights, whole_weights
from ds_vrgd.zero.observer import observer_of
from ds_vrgd.zero.wrappers import wrapper_name

Engine = Any

# A dynamic loss scale begins at 2^16 and is halved at each overflow.
MOST_SKIPPED = 40
# Steps whose learning rate is ten times the last one's, and the rate to begin from where it is lower (a warm-up).
MOST_RAISED, LEAST_RATE = 7, 1e-4


class Refused(Exception):
    """The engine was not built: what DeepSpeed or ds_vrgd said, one reason each."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(reasons)  # the arguments, so that it can be pickled
        self.reasons = reasons


class Trial:
    """An engine, and on rank 0 the reference beside it.

    Args:
        settings: for the ranks that there are.
        named: the user's model, or None.

    Raises:
        Refused: no engine can be built so.
        ValueError: the model cannot be had.
    """

    def __init__(self, settings: Settings, named: str | None) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.settings = settings
        config = settings.config
        self.accumulation: int = config["gradient_accumulation_steps"]
        self.autocast = _autocast_dtype(config)
        stage = int(config.get("zero_optimization", {}).get("stage", 0))
        model, self.batches = load_model(named, config["train_micro_batch_size_per_gpu"])
        if any(hasattr(param, "ds_id") for param in model.parameters()):
            raise ValueError(f"--model {named}: build it without zero.Init; the doctor needs a plain copy beside it")
        self.plain = copy.deepcopy(model)
        self.engine = _build(model, settings)
        # Not the JSON's: left out, it is 0 or 1, as the release has it.
        self.clip = float(self.engine.gradient_clipping())
        self.observer = observer_of(self.engine)
        self.dtype = next(iter(self.engine.module.parameters())).dtype
        self.plain.to(self.engine.device, self.dtype)
        self.start = {n: w.detach().cpu().double() for n, w in self.plain.named_parameters() if w.requires_grad}
        self.reference = self._reference()
        self.seen = SeenGradients(self.engine.module)
        half = self.dtype != torch.float32
        self.handed = HandedMean(self.engine.basic_optimizer) if half and self.observer.mode == "off" else None
        self.findings = self._describe(stage)

    def run(self, steps: int) -> Findings:
        """Train ``steps`` steps, and some more if the weights have not moved visibly; a collective.

        Raises:
            RuntimeError: every step was skipped.
        """
        found, rates = self.findings, [group["lr"] for group in self.engine.basic_optimizer.param_groups]
        while found.steps < steps or (found.raised < MOST_RAISED and not self._has_moved()):
            found.raised += found.steps >= steps
            skipped = self._step(rates)
            found.skipped += skipped
            found.steps += not skipped
            if found.skipped > MOST_SKIPPED:
                raise RuntimeError(
                    f"{found.skipped} steps were skipped, for a gradient was not finite: lower "
                    "fp16.initial_scale_power, or see whether the loss is NaN"
                )
        self._compare()
        self.engine.destroy()
        return found

    def _reference(self) -> DenseOptimizer:
        known = {name: value for name, value in self.settings.arguments.items() if name in DEFAULTS or name == "lr"}
        groups = param_groups(self.start, self.settings.optimizer)
        return DenseOptimizer(self.settings.optimizer, self.start, groups, **{"lr": 1e-3} | known)

    def _describe(self, stage: int) -> Findings:
        groups = self.reference.groups
        return Findings(
            stage=stage,
            dtype=str(self.dtype).removeprefix("torch."),
            wrapper=wrapper_name(self.engine),
            mode=self.observer.mode,
            why=self.observer.why,
            ranks=self.world,
            micro_batches=self.accumulation,
            layers=len(
                {layer.name for tensor in self.observer.tensors for layer in self.observer.layout(tensor).layers}
            ),
            reduced=0,
            trusted=sum(len(group["params"]) for group in groups if group["adapt"])
            if is_adaptive(self.settings.optimizer)
            else None,
            clip=self.clip,
            coarse=self._coarse(),
            rounding=ROUNDING[str(self.autocast or self.dtype).removeprefix("torch.")],
        )

    def _coarse(self) -> str | None:
        """Why the trajectory can only be near the reference's, if so."""
        arguments = self.settings.arguments
        if str(arguments.get("gsnr_dtype")).endswith("bfloat16") and self.observer.mode != "off":
            return 'gsnr_dtype="bfloat16" rounds the average'
        by_norm = self.clip > 0 or arguments.get("prenormalize", False)
        if by_norm and self.observer.mode == "observe" and self.dtype != torch.float32:
            return "the norm is that of DeepSpeed's own mean, rounded to the model's dtype"
        return None

    def _step(self, rates: list[float]) -> bool:
        """One optimizer step of engine and reference; returns whether DeepSpeed skipped it."""
        engine, number = self.engine, self.findings.steps + self.findings.skipped
        seed = 7919 * number
        k = self.accumulation * self.world
        micro_batches = [on_device(self.batches(number, index), engine.device) for index in range(k)]
        with whole_weights(engine) as weights:
            self.plain.load_state_dict(weights, strict=False)
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0)) if self.dtype == torch.float16 else 1.0
        plain = self._plain_chunks(micro_batches, scale / self.accumulation, seed) if self.rank == 0 else []
        before = engine.skipped_steps
        for index in range(self.accumulation):
            chunk = index * self.world + self.rank
            torch.manual_seed(seed + chunk)
            engine.backward(loss_of(engine, micro_batches[chunk]))
            self.seen.end_chunk(scale / self.accumulation)
            if index == self.accumulation - 1:
                self._follow_rates(rates)
                self._measure(0)
            engine.step()
        chunks = self.seen.collect()
        skipped = bool(engine.skipped_steps > before)
        mean = None if self.handed is None else self.handed.collect()
        if not skipped:
            self._measure(1)
            self.findings.apart = max(self.findings.apart, difference(chunks, plain))
            self._step_reference(chunks, mean)
        return skipped

    def _plain_chunks(self, micro_batches: list[Any], scale: float, seed: int) -> list[dict[str, Tensor]]:
        device = self.engine.device.type
        with torch.autocast(device, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            chunks = chunk_gradients(self.plain, micro_batches, scale, seed)
            again = chunk_gradients(self.plain, micro_batches[:1], scale, seed)[0]
        self.findings.repeats = all(torch.equal(again[name], grad) for name, grad in chunks[0].items())
        return chunks

    def _follow_rates(self, rates: list[float]) -> None:
        """Bring the learning rate of this step, perhaps raised, into engine and reference."""
        raised = 10.0**self.findings.raised
        for index, group in enumerate(self.engine.basic_optimizer.param_groups):
            if "scheduler" in self.settings.config:
                rates[index] = group["lr"]
                for key in ("betas", "momentum"):
                    self.reference.groups[index][key] = group.get(key, self.reference.groups[index][key])
            if raised > 1.0:
                group["lr"] = max(rates[index], LEAST_RATE) * raised
            self.reference.groups[index]["lr"] = float(group["lr"])

    def _step_reference(self, chunks: list[dict[str, Tensor]], mean: Mapping[str, Tensor] | None) -> None:
        if self.rank:
            return
        if mean is None:
            self.reference.step(chunks, clip=self.clip)
        else:  # DeepSpeed's, clipped already
            self.reference.step(chunks, mean={name: mean[name].view_as(weight) for name, weight in self.start.items()})

    def _measure(self, after: int) -> None:
        """Note the memory held before a step, or after it."""
        found, observer = self.findings, self.observer
        elements = max(1, sum(tensor.numel() for tensor in observer.tensors))
        moments, buffers = observer.held_bytes()
        held = moments / elements
        found.moments = (found.moments[0], held) if after else (held, found.moments[1])
        found.buffers, found.sent = max(found.buffers, buffers), observer.sent_bytes()
        optimizer = self.engine.basic_optimizer
        found.reduced = sum(len(part.table.names) for part in optimizer.layer_statistics)
        sizes: dict[str, int] = {}
        for tensor in observer.tensors:
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.numel() == tensor.numel() > 1:
                    sizes[key] = sizes.get(key, 0) + value.nbytes
        found.state = {key: size / elements for key, size in sizes.items()}

    def _has_moved(self) -> bool:
        """Whether the weights' way is visible: rank 0's answer on all ranks; a collective."""
        answer = [self._way() >= VISIBLE if self.rank == 0 else None]
        torch.distributed.broadcast_object_list(answer, src=0)
        return bool(answer[0])

    def _way(self) -> float:
        """The reference's, of the norm of its weights."""
        weights = self.reference.params
        return norm_of([weights[name] - self.start[name] for name in weights]) / norm_of(list(weights.values()))

    def _compare(self) -> None:
        """The engine's masters with the reference; a collective."""
        found, masters = self.findings, master_weights(self.engine)
        with whole_weights(self.engine) as weights:
            found.follows = all(
                torch.equal(master.view_as(weights[name]).to(weights[name].dtype), weights[name].cpu())
                for name, master in masters.items()
            )
        if self.rank:
            return
        theta = self.reference.params
        if set(masters) != set(theta):
            raise RuntimeError(f"the optimizer holds other layers than the model: {sorted(set(masters) ^ set(theta))}")
        size = norm_of(list(theta.values()))
        parts = {name: norm_of([masters[name].double() - weight.flatten()]) / size for name, weight in theta.items()}
        worst = max(parts, key=lambda name: parts[name] if parts[name] == parts[name] else float("inf"))
        found.worst = worst, parts[worst]
        found.error = sum(part**2 for part in parts.values()) ** 0.5
        found.moved = self._way()


def is_adaptive(optimizer: str) -> bool:
    """Whether it has a trust ratio."""
    return optimizer.endswith(("LARS", "LAMB"))


def param_groups(weights: Mapping[str, Tensor], optimizer: str) -> list[dict[str, Any]]:
    """As programs make them: matrices; biases and norms without decay and trust ratio. By name, none empty."""
    without = {"weight_decay": 0.0} | ({"adapt": False} if is_adaptive(optimizer) else {})
    matrices = [name for name, weight in weights.items() if weight.dim() > 1]
    vectors = [name for name in weights if name not in matrices]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, **without}]
    return [group for group in groups if group["params"]]


def _autocast_dtype(config: dict[str, Any]) -> torch.dtype | None:
    section = config.get("torch_autocast", {})
    if not section.get("enabled", False):
        return None
    dtype: torch.dtype = getattr(torch, str(section.get("dtype", "bfloat16")).removeprefix("torch."))
    return dtype


def _build(model: nn.Module, settings: Settings) -> Engine:
    """The engine around the model.

    Raises:
        Refused: with each reason.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups = param_groups(params, settings.optimizer)
    for group in groups:
        group["params"] = [params[name] for name in group["params"]]
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=copy.deepcopy(settings.config))
    except Exception as error:
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        reasons = [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]
        raise Refused(reasons or [text]) from error
    return engine
