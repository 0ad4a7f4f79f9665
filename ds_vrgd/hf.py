"""The Hugging Face Trainer: param groups as it makes them, and GSNR in its logs.

``Trainer(..., optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {...}))`` works without this module. docs/TRAINER.md explains
what a chunk is under the Trainer, and its silent choices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ds_vrgd.extras import need

need("hf", "transformers", "accelerate")

from transformers import TrainerCallback  # noqa: E402

from ds_vrgd.engines import attach  # noqa: E402
from ds_vrgd.moments import is_dtensor  # noqa: E402
from ds_vrgd.noise import NoiseScaleMeter, NoiseScaleUnknown, gsnr_stats  # noqa: E402
from ds_vrgd.optim import VROptimizer, find_optimizer, world  # noqa: E402

Trainer = Any

# The key of the meter in the Trainer's state, which every checkpoint holds. (An ExportableState is made without the
# Trainer.)
_METER = "GSNRCallback.meter"


class _Saved:
    """The meter in the Trainer's state: whenever that is written, after whatever event, it is copied as a dict."""

    def __init__(self, meter: NoiseScaleMeter) -> None:
        self._meter = meter

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        return self._meter.state_dict()


class VRTrainerMixin:
    """A Trainer that also leaves its undecayed parameters (biases, norms) out of LAMB's and LARS's trust ratio.

    ::

        class VRTrainer(VRTrainerMixin, Trainer): ...

        VRTrainer(..., optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {"gamma": 0.1}))

    The two param groups are the Trainer's own (``get_decay_parameter_names``). An optimizer named in a DeepSpeed JSON
    gets both as well; the Trainer alone would give it one group, with decay everywhere. ``optimizer_cls_and_kwargs``
    may name an optimizer of ds_vrgd or a ``functools.partial`` of one; ``lr`` and ``weight_decay`` come from the
    ``TrainingArguments`` unless it has them.

    The first step warns if the Trainer takes the loss for divided by ``num_items_in_batch`` and nobody has divided it.
    """

    accelerator: Any
    args: Any
    is_deepspeed_enabled: bool
    model: nn.Module
    optimizer: Any
    _attached: Any = None
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    _loss_is_checked = False

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer as the Trainer does, with two param groups.

        Raises:
            ValueError: ``weight_decay`` has two values, or every step would see one chunk.
            RuntimeError: a DeepSpeed JSON names another optimizer.
        """
        given = arguments_of(self.optimizer_cls_and_kwargs)
        if self.optimizer is None and given is not None:
            _refuse_two_decays(self.args.weight_decay, given)
            factory, kwargs = self.optimizer_cls_and_kwargs  # type: ignore[misc]
            decay = given.get("weight_decay", self.args.weight_decay)
            kwargs = {"lr": given.get("lr", self.args.learning_rate)} | kwargs | {"weight_decay": decay}
            self.optimizer = factory(self._groups(model, named=not self.is_deepspeed_enabled), **kwargs)
        elif self.is_deepspeed_enabled and self.optimizer is not None:
            from accelerate.utils import DummyOptim

            if isinstance(self.optimizer, DummyOptim):  # stands for the JSON's, which DeepSpeed makes
                require_json_agrees(self)
                self.optimizer.params = self._groups(model, named=False)
        made = super().create_optimizer(*([] if model is None else [model]))  # type: ignore[misc]
        require_two_chunks(self.args, made)
        return made

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Any:
        """Train on a micro-batch as the Trainer does; the first time, watch whether the loss is divided."""
        # Accelerate has sharded the model by FSDP2 just now.
        if self._attached is not self.optimizer and getattr(self.accelerator, "is_fsdp2", False):
            if isinstance(getattr(self.optimizer, "optimizer", self.optimizer), VROptimizer):
                attach(model, self.optimizer)
            self._attached = self.optimizer
        step = super().training_step  # type: ignore[misc]
        compiled = self.args.torch_compile or any(module._compiled_call_impl for module in self.model.modules())
        settled = getattr(self, "loss_is_scaled_for_ga", None) is not None  # by the user
        if self._loss_is_checked or num_items_in_batch is None or compiled or settled or self.args.n_gpu > 1:
            return step(model, inputs, num_items_in_batch)
        self._loss_is_checked, _Watched.used = True, False
        loss = step(model, inputs, torch.as_tensor(num_items_in_batch).as_subclass(_Watched))
        factor = self.args.gradient_accumulation_steps
        factor *= self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        if not _Watched.used and factor > 1 and world.is_first():
            world.warn(
                f"{type(self.model).__name__} takes num_items_in_batch and does not divide its loss by it, so the "
                f"Trainer divides by nothing: loss and gradient are {factor} times too large (micro-batches x "
                "processes), and max_grad_norm clips that gradient. Set model.accepts_loss_kwargs = False before you "
                "make the Trainer, which then divides."
            )
        return loss

    def _groups(self, model: nn.Module | None, *, named: bool) -> list[dict[str, Any]]:
        """Return both groups. DeepSpeed's engine has the names itself, and replaces the parameters by flat tensors."""
        model = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(model))  # type: ignore[attr-defined]
        groups: list[dict[str, Any]] = [{"params": []}, {"params": [], "weight_decay": 0.0, "adapt": False}]
        for name, param in model.named_parameters():
            if param.requires_grad:
                groups[name not in decayed]["params"].append((name, param) if named else param)
        return groups


class _Watched(Tensor):
    """A number that records whether anybody has calculated with it."""

    used: ClassVar[bool] = False
    #: Calls that calculate nothing: those that return the number again, and those that only look at it.
    _RETURNS: ClassVar[frozenset[str]] = frozenset({"to", "cpu", "cuda", "clone", "detach", "contiguous"})
    _LOOKS: ClassVar[frozenset[str]] = frozenset({"__get__", "is_floating_point", "is_complex", "dim", "size", "numel"})

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if name in cls._RETURNS:
            return result.as_subclass(cls)
        _Watched.used = _Watched.used or name not in cls._LOOKS
        return result


class _Callback(TrainerCallback):  # type: ignore[misc]
    """Logs a record of its own whenever the Trainer logs its loss."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Log a record, if there is one, after the record of the loss."""
        if logs is not None and "loss" in logs and (record := self._record()):
            self._trainer.log(record)

    def _record(self) -> dict[str, Any]:
        raise NotImplementedError


class GSNRCallback(_Callback):
    """Logs GSNR, k and the gradient noise scale whenever the Trainer logs its loss, to whatever ``report_to`` names.

    ``trainer.add_callback(GSNRCallback(trainer))``: the Trainer does not pass itself to a callback, which calls its
    ``log``. With experts spread over ranks (an expert-parallel size above 1) no rank knows the noise scale: it is left
    out, with a warning, and the layers are those of the rank that logs.

    ``gsnr_mean_ratio``, ``gsnr_clamped_low``, ``gsnr_clamped_high``, ``gsnr_noise_low`` and ``gsnr_noise_high`` are
    means over the layers (:class:`~ds_vrgd.LayerGSNR`), and ``gsnr_k`` is the number of chunks; all are of the last
    step. A skipped step, one of a single chunk, and ``gamma=1`` log none of them, and up to k = 3 there is no
    ``gsnr_noise``. ``noise_scale_mean``, ``noise_scale_low`` and ``noise_scale_high``, in samples, are those of
    :attr:`meter`, over all steps; infinite values are left out.

    Attributes:
        meter: the :class:`~ds_vrgd.NoiseScaleMeter`, which also has the layers' noise scales. The Trainer's checkpoints
            keep it.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._knows_noise = True
        self.meter = NoiseScaleMeter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the Trainer trains with the optimizer that was asked for, and start or restore the meter.

        Raises:
            RuntimeError: the optimizer is not one of ds_vrgd.
            ValueError: ``weight_decay`` was given to the optimizer, and the Trainer has overruled it; or every step
                would see one chunk.
        """
        require_json_agrees(self._trainer)
        optimizer = _optimizer_of(self._trainer, self)
        require_two_chunks(args, optimizer)
        given = arguments_of(self._trainer.optimizer_cls_and_kwargs) or {}
        if "weight_decay" in given and all(
            group["weight_decay"] != given["weight_decay"] for group in optimizer.param_groups
        ):
            _refuse_two_decays(args.weight_decay, given, settled=False)
        self.meter = NoiseScaleMeter()
        if _METER in state.stateful_callbacks:
            self.meter.load_state_dict(state.stateful_callbacks[_METER])
        state.stateful_callbacks[_METER] = _Saved(self.meter)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        if self._knows_noise and not _was_skipped(self._trainer):
            try:
                self.meter.update(self._trainer.optimizer, self._chunk_size())
            except NoiseScaleUnknown as error:
                self._knows_noise = False
                if state.is_world_process_zero:
                    world.warn(f"GSNRCallback logs no noise_scale: {error}.")

    def _chunk_size(self) -> int:
        """Return the samples of a chunk of the last step."""
        # state.train_batch_size is that of the run that wrote the checkpoint.
        accelerator, size = self._trainer.accelerator, int(self._trainer._train_batch_size)
        if accelerator.split_batches:
            size //= accelerator.num_processes
        groups = find_optimizer(self._trainer.optimizer).param_groups
        if not accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False) and any(
            is_dtensor(param) for group in groups for param in group["params"]
        ):
            size *= self._trainer.current_gradient_accumulation_steps  # which FSDP2 merges into one chunk
        return size

    def _record(self) -> dict[str, Any]:
        optimizer = find_optimizer(self._trainer.optimizer)
        if not optimizer.layer_statistics or _was_skipped(self._trainer):
            return {}
        stats = gsnr_stats(optimizer)
        means = {name: mean for name, mean in vars(stats.means()).items() if mean is not None}
        record = {"gsnr_k": stats.k} | {f"gsnr_{name}": mean for name, mean in means.items()}
        if self._knows_noise:
            found = self.meter.estimate()
            averaged = {"mean": found.value, "low": found.low, "high": found.high}
            record |= {f"noise_scale_{name}": value for name, value in averaged.items() if math.isfinite(value)}
        return record


class RankCallback(_Callback):
    """Logs the ranks side by side whenever the Trainer logs its loss, for an optimizer with ``watch``.

    ``trainer.add_callback(RankCallback(trainer))``. ``rank_norm_3``, ``rank_cosine_3`` and ``rank_deviation_3`` are
    those of rank 3 in the last step (``RankReport.whole``), and ``rank_events`` is the number of events since the last
    record, which is all that a skipped step logs. The ranks are those that are compared with the one that logs: those
    of its node. docs/RANKS.md.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that the ranks are compared.

        Raises:
            RuntimeError: the optimizer is not one of ds_vrgd.
            ValueError: it has no ``watch``.
        """
        if _optimizer_of(self._trainer, self).recorder is None:
            raise ValueError(
                'RankCallback: watch=None, so nobody compares the ranks. Give the optimizer watch="log", "error" or a '
                "function"
            )

    def _record(self) -> dict[str, Any]:
        recorder = find_optimizer(self._trainer.optimizer).recorder
        if recorder is None or recorder.report is None:
            return {}
        record = {"rank_events": float(len(recorder.news()))}
        if not _was_skipped(self._trainer):
            for name, values in zip(("norm", "cosine", "deviation"), recorder.report.whole(), strict=True):
                record |= {f"rank_{name}_{rank}": v for rank, v in zip(recorder.report.ranks, values, strict=True)}
        return record


def _optimizer_of(trainer: Trainer, callback: TrainerCallback) -> VROptimizer:
    """Return the optimizer that a callback looks at.

    Raises:
        RuntimeError: it is not one of ds_vrgd.
    """
    try:
        return find_optimizer(trainer.optimizer)
    except TypeError as error:
        raise RuntimeError(
            f"{type(callback).__name__}: {error}. Pass optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {{...}}), or name one "
            'in the DeepSpeed JSON\'s "optimizer" section.'
        ) from error


def _was_skipped(trainer: Trainer) -> bool:
    """Return whether the last step was skipped: what the optimizer has measured is then of an earlier one."""
    return bool(trainer.accelerator.optimizer_step_was_skipped or find_optimizer(trainer.optimizer).overflow)


def arguments_of(cls_and_kwargs: tuple[Any, dict[str, Any]] | None) -> dict[str, Any] | None:
    """Return all arguments that the Trainer was given for an optimizer of ours; None if it was given none of ours."""
    factory: Any
    factory, kwargs = cls_and_kwargs or (None, {})
    if isinstance(factory, functools.partial):
        factory, kwargs = factory.func, factory.keywords | kwargs
    return kwargs if isinstance(factory, type) and issubclass(factory, VROptimizer) else None


def require_two_chunks(args: Any, optimizer: Any) -> None:
    """Require that the ``TrainingArguments`` make more than one chunk per step for an optimizer of ours with GSNR.

    Raises:
        ValueError: one process has one micro-batch per step.
    """
    reduces = isinstance(optimizer, VROptimizer) and any(group["gamma"] < 1.0 for group in optimizer.param_groups)
    if reduces and args.world_size * args.gradient_accumulation_steps == 1:
        raise ValueError(
            "TrainingArguments has gradient_accumulation_steps=1, and there is 1 process: every step would see k = 1 "
            "chunk, and a variance needs at least 2. Raise gradient_accumulation_steps (and lower "
            "per_device_train_batch_size to keep the batch size), use more processes, or set gamma=1.0"
        )


def require_json_agrees(trainer: Trainer) -> None:
    """Refuse an optimizer in both the DeepSpeed JSON and ``optimizer_cls_and_kwargs``, which the Trainer then ignores.

    Raises:
        RuntimeError: both name one.
    """
    if not trainer.is_deepspeed_enabled or arguments_of(trainer.optimizer_cls_and_kwargs) is None:
        return
    in_json = trainer.accelerator.state.deepspeed_plugin.deepspeed_config.get("optimizer")
    if in_json is not None:
        asked = trainer.optimizer_cls_and_kwargs[0]
        raise RuntimeError(
            f'the DeepSpeed JSON\'s "optimizer" section ({in_json.get("type")}) makes the Trainer ignore '
            f"optimizer_cls_and_kwargs ({getattr(asked, '__name__', asked)}). Leave out one of the two."
        )


def _refuse_two_decays(of_arguments: float, given: Mapping[str, Any], *, settled: bool = True) -> None:
    """Refuse two values. With ``settled``, 0 in the ``TrainingArguments``, their default, counts as not given."""
    asked = given.get("weight_decay", of_arguments)
    if asked != of_arguments and (of_arguments != 0.0 or not settled):
        raise ValueError(
            f"TrainingArguments has weight_decay={of_arguments}, which the Trainer uses, and the optimizer was given "
            f"weight_decay={asked}. Give it to the TrainingArguments alone."
        )
