"""Train under the user's configuration, follow with the dense reference, and compare."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping
from typing import Any, TypeVar

import deepspeed
import torch
from torch import Tensor, nn

from ds_vrgd.doctor.chunks import SeenGradients, chunk_gradients, difference, loss_of, norm_of
from ds_vrgd.doctor.model import load_model, on_device
from ds_vrgd.doctor.reference import DEFAULTS, DenseOptimizer
from ds_vrgd.doctor.report import EXACT, NOT_EXACT, REFUSED, ROUNDING, VISIBLE, Findings, Outcome, rows_of
from ds_vrgd.doctor.settings import Settings
from ds_vrgd.doctor.weights import HandedMean, master_weights, whole_weights
from ds_vrgd.engines.deepspeed.observer import observer_of
from ds_vrgd.engines.deepspeed.refusals import rounds_mean
from ds_vrgd.engines.deepspeed.wrappers import wrapper_name
from ds_vrgd.optim import OPTIMIZERS

T = TypeVar("T")

# A dynamic loss scale begins at 2^16 and is halved at each overflow.
MOST_SKIPPED = 40
# Steps whose learning rate is ten times the last one's, and the rate to begin from where it is lower (a warm-up).
MOST_RAISED, LEAST_RATE = 7, 1e-4


def examine(settings: Settings, named: str | None, steps: int) -> Outcome:
    """Train and compare. A collective of all ranks: the status is the same on each, and the rows are rank 0's.

    For ``named`` see :func:`load_model`.
    """
    try:
        trial = Trial(settings, named)
    except ValueError as error:
        return Outcome([("refused", str(reason)) for reason in error.args], REFUSED)
    found = trial.run(steps)
    return Outcome(rows_of(found), from_first_rank(NOT_EXACT if found.faults else EXACT), found.numbers)


def from_first_rank(value: T) -> T:
    """Return rank 0's ``value`` on every rank, as the others have no reference; a collective."""
    values = [value]
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


class Trial:
    """An engine, and on rank 0 the reference that follows it.

    Raises:
        ValueError: the model cannot be loaded, or no engine can be built. Its arguments are the reasons.
    """

    def __init__(self, settings: Settings, named: str | None) -> None:
        self.rank, self.world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.settings = settings
        self.accumulation: int = settings.config["gradient_accumulation_steps"]
        model, self.batches = load_model(named, settings.config["train_micro_batch_size_per_gpu"])
        if any(hasattr(param, "ds_id") for param in model.parameters()):
            raise ValueError(f"--model {named}: build it without zero.Init; the doctor also needs a plain copy of it")
        self.plain = copy.deepcopy(model)
        self.engine = _build(model, settings)
        self.autocast = self.engine.torch_autocast_dtype() if self.engine.torch_autocast_enabled() else None
        # Not the JSON's: left out, it is 0 or 1, as the release has it.
        self.clip = float(self.engine.gradient_clipping())
        self.observer = observer_of(self.engine)
        self.dtype = next(iter(self.engine.module.parameters())).dtype
        self.plain.to(self.engine.device, self.dtype)
        self.start = {n: w.detach().cpu().double() for n, w in self.plain.named_parameters() if w.requires_grad}
        known = {name: value for name, value in settings.arguments.items() if name in DEFAULTS or name == "lr"}
        groups = param_groups(self.start, settings.optimizer)
        self.reference = DenseOptimizer(settings.optimizer, self.start, groups, **{"lr": 1e-3} | known)
        self.seen = SeenGradients(self.engine.module)
        half = self.dtype != torch.float32
        self.handed = HandedMean(self.engine.basic_optimizer) if half and self.observer.mode == "off" else None
        layouts = map(self.observer.layout, self.observer.tensors)
        adapted = [len(group["params"]) for group in self.reference.groups if group["adapt"]]
        self.findings = Findings(
            int(self.engine.zero_optimization_stage()), str(self.dtype).removeprefix("torch."),
            wrapper_name(self.engine), self.observer.mode, self.observer.why, self.world, self.accumulation, self.clip,
            layers=len({layer.name for layout in layouts for layer in layout.layers}), reduced=None,
            trusted=sum(adapted) if OPTIMIZERS[settings.optimizer].sums_layers else None, coarse=self._coarse(),
            rounding=ROUNDING[str(self.autocast or self.dtype).removeprefix("torch.")],
        )  # fmt: skip

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
                    f"{found.skipped} steps were skipped, because a gradient was not finite: lower "
                    "fp16.initial_scale_power, or check whether the loss is NaN"
                )
        self._compare()
        self.engine.destroy()
        return found

    def _coarse(self) -> str | None:
        """Return why the trajectory can only be near the reference's; None if it must be exact."""
        arguments = self.settings.arguments
        if str(arguments.get("gsnr_dtype")).endswith("bfloat16") and self.observer.mode != "off":
            return 'gsnr_dtype="bfloat16" rounds the average'
        by_norm = self.observer.mode == "observe" and (self.clip > 0 or arguments.get("prenormalize", False))
        rounded = self.dtype != torch.float32 or rounds_mean(self.engine)
        return "the norm is that of DeepSpeed's own mean, rounded to 16 bits" if by_norm and rounded else None

    def _step(self, rates: list[float]) -> bool:
        """Take one optimizer step of engine and reference; return whether DeepSpeed skipped it."""
        engine, number = self.engine, self.findings.steps + self.findings.skipped
        seed, k = 7919 * number, self.accumulation * self.world
        micro_batches = [on_device(self.batches(number, index), engine.device) for index in range(k)]
        with whole_weights(engine) as weights:
            self.plain.load_state_dict(weights, strict=False)
        scale = float(getattr(engine.optimizer, "loss_scale", 1.0)) if self.dtype == torch.float16 else 1.0
        plain: list[dict[str, Tensor]] = []
        if self.rank == 0:
            with torch.autocast(engine.device.type, self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                plain = chunk_gradients(self.plain, micro_batches, scale / self.accumulation, seed)
                (again,) = chunk_gradients(self.plain, micro_batches[:1], scale / self.accumulation, seed)
            self.findings.repeats = all(torch.equal(again[name], grad) for name, grad in plain[0].items())
        before = engine.skipped_steps
        for index in range(self.accumulation):
            chunk = index * self.world + self.rank
            torch.manual_seed(seed + chunk)
            engine.backward(loss_of(engine, micro_batches[chunk]))
            self.seen.end_chunk(scale / self.accumulation)
            if index == self.accumulation - 1:
                self._follow_rates(rates)
                held = self.observer.held_bytes()
            engine.step()
        chunks = self.seen.collect()
        mean = None if self.handed is None else self.handed.collect()
        if engine.skipped_steps > before:
            return True
        self._measure(held)
        self.findings.apart = max(self.findings.apart, difference(chunks, plain))
        if self.rank == 0:
            if mean is not None:  # DeepSpeed's, clipped already
                mean = {name: mean[name].view_as(weight) for name, weight in self.start.items()}
            self.reference.step(chunks, clip=0.0 if mean is not None else self.clip, mean=mean)
        return False

    def _follow_rates(self, rates: list[float]) -> None:
        """Give this step's learning rate, perhaps raised, to engine and reference."""
        raised = 10.0**self.findings.raised
        for index, group in enumerate(self.engine.basic_optimizer.param_groups):
            if "scheduler" in self.settings.config:
                rates[index] = group["lr"]
                for key in ("betas", "momentum"):
                    self.reference.groups[index][key] = group.get(key, self.reference.groups[index][key])
            if raised > 1.0:
                group["lr"] = max(rates[index], LEAST_RATE) * raised
            self.reference.groups[index]["lr"] = float(group["lr"])

    def _measure(self, held: tuple[int, int]) -> None:
        """Record the memory held before the step (moments, buffers) and after it, what is sent, and what has GSNR."""
        found, optimizer = self.findings, self.engine.basic_optimizer
        elements = max(1, sum(tensor.numel() for tensor in self.observer.tensors))
        moments, buffers = zip(held, self.observer.held_bytes(), strict=True)
        found.buffers, found.sent = max(found.buffers, *buffers), self.observer.sent_bytes()
        found.moments = moments[0] / elements, moments[1] / elements
        if any(group["gamma"] < 1.0 for group in optimizer.param_groups):
            found.reduced = sum(len(part.table.names) for part in optimizer.layer_statistics)
        sizes: dict[str, int] = {}
        for tensor in self.observer.tensors:
            for key, value in optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor) and value.numel() == tensor.numel() > 1:
                    sizes[key] = sizes.get(key, 0) + value.nbytes
        found.state = {key: size / elements for key, size in sizes.items()}

    def _has_moved(self) -> bool:
        """Return on all ranks whether rank 0's reference has moved visibly; a collective."""
        return bool(from_first_rank(self.rank == 0 and self._distance() >= VISIBLE))

    def _distance(self) -> float:
        """Return how far the reference's weights have moved, relative to their norm."""
        weights = self.reference.params
        return norm_of([weights[name] - self.start[name] for name in weights]) / norm_of(list(weights.values()))

    def _compare(self) -> None:
        """Compare the engine's masters with the reference; a collective."""
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
        found.moved = self._distance()


def param_groups(weights: Mapping[str, Tensor], optimizer: str) -> list[dict[str, Any]]:
    """Return groups of names: matrices; and biases and norms, without decay and trust ratio. No group is empty."""
    without = {"weight_decay": 0.0} | ({"adapt": False} if OPTIMIZERS[optimizer].sums_layers else {})
    matrices = [name for name, weight in weights.items() if weight.dim() > 1]
    vectors = [name for name in weights if name not in matrices]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, **without}]
    return [group for group in groups if group["params"]]


def _build(model: nn.Module, settings: Settings) -> Any:
    """Build the engine around the model.

    Raises:
        ValueError: DeepSpeed or ds_vrgd refuses. Its arguments are the reasons.
    """
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    groups = param_groups(params, settings.optimizer)
    for group in groups:
        group["params"] = [params[name] for name in group["params"]]
    try:
        engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=copy.deepcopy(settings.config))
    except Exception as error:
        # DeepSpeed refuses settings by all three; any other error may be a fault of its own or of ours.
        if not isinstance(error, (ValueError, AssertionError, NotImplementedError)):
            traceback.print_exc()
        text = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        reasons = [line.removeprefix("  - ") for line in text.splitlines() if line.startswith("  - ")]
        raise ValueError(*(reasons or [text])) from error
    return engine
