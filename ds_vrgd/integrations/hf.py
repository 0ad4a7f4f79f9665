"""The Hugging Face Trainer: param groups as it makes them, and GSNR in its logs.

``Trainer(..., optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {...}))`` needs none of this. docs/TRAINER.md tells what a
chunk is under the Trainer, and what its silent choices are.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from ds_vrgd.extras import need

need("hf", "transformers", "accelerate")

from transformers import TrainerCallback  # noqa: E402

from ds_vrgd.meter import NoiseScaleMeter  # noqa: E402
from ds_vrgd.optim import VROptimizer  # noqa: E402
from ds_vrgd.statistics import NoiseScaleUnknown, find_optimizer, gsnr_stats, noise_scale  # noqa: E402

Trainer = Any

# Where the Trainer's state, which every checkpoint holds, keeps the meter. (A class that exports its state would have
# to be made without its Trainer.)
_METER = "GSNRCallback.meter"


class VRTrainerMixin:
    """A Trainer whose undecayed parameters (biases, norms) are left out of LAMB's and LARS's trust ratio, too.

    ::

        class VRTrainer(VRTrainerMixin, Trainer): ...

        VRTrainer(..., optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {"gamma": 0.1}))

    The two param groups are the Trainer's own (``get_decay_parameter_names``). An optimizer named in a DeepSpeed JSON
    gets them as well, to which the Trainer gives one group with decay everywhere. ``optimizer_cls_and_kwargs`` may name
    an optimizer of ds_vrgd or a ``functools.partial`` of one. ``lr`` and ``weight_decay`` are those of the
    ``TrainingArguments`` unless they are given there.
    """

    args: Any
    is_deepspeed_enabled: bool
    model: nn.Module
    optimizer: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """As the Trainer's.

        Raises:
            ValueError: ``weight_decay`` has two values.
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

            if isinstance(self.optimizer, DummyOptim):  # stands for the JSON's, which DeepSpeed will make
                require_json_agrees(self)
                self.optimizer.params = self._groups(model, named=False)
        return super().create_optimizer(*([] if model is None else [model]))  # type: ignore[misc]

    def _groups(self, model: nn.Module | None, *, named: bool) -> list[dict[str, Any]]:
        """Two groups. Under DeepSpeed the engine has the names, and flat tensors take the parameters' places."""
        model = self.model if model is None else model
        decayed = set(self.get_decay_parameter_names(model))  # type: ignore[attr-defined]
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [pair for pair in trained if pair[0] in decayed]},
            {"params": [pair for pair in trained if pair[0] not in decayed], "weight_decay": 0.0, "adapt": False},
        ]
        return groups if named else [group | {"params": [param for _, param in group["params"]]} for group in groups]


class GSNRCallback(TrainerCallback):  # type: ignore[misc]
    """Logs GSNR, k and the gradient noise scale wherever the Trainer logs its loss, whatever ``report_to`` names.

    With experts spread over ranks (an expert-parallel size above 1) no rank knows the noise scale: it is left out, with
    a warning, and the layers are those of the rank that logs.

    ::

        trainer.add_callback(GSNRCallback(trainer))

    ``gsnr_mean_ratio``, ``gsnr_clamped_low`` and ``gsnr_clamped_high`` are means over the layers
    (:class:`~ds_vrgd.LayerGSNR`), ``gsnr_k`` the chunks, ``noise_scale`` is in samples; all of the last step before the
    line. A step that was skipped logs none, and neither does ``gamma=1``. ``noise_scale_mean``, ``noise_scale_low`` and
    ``noise_scale_high`` are those of :attr:`meter`, over all steps; what is infinite is left out. The Trainer's
    checkpoints keep the meter.

    Args:
        trainer: whose ``log`` is called; a callback is not given it otherwise.

    Attributes:
        meter: the :class:`~ds_vrgd.NoiseScaleMeter`, which also has the layers' noise scales.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._knows_noise = True
        self.meter = NoiseScaleMeter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See to it that what was asked for is what trains.

        Raises:
            RuntimeError: the optimizer is none of ds_vrgd.
            ValueError: ``weight_decay`` was given to the optimizer, and the Trainer has overruled it.
        """
        require_json_agrees(self._trainer)
        try:
            optimizer = find_optimizer(self._trainer.optimizer)
        except TypeError as error:
            raise RuntimeError(
                f"GSNRCallback: {error}. Pass optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {{...}}), or name one in the "
                'DeepSpeed JSON\'s "optimizer" section.'
            ) from error
        given = arguments_of(self._trainer.optimizer_cls_and_kwargs) or {}
        if "weight_decay" in given and all(
            group["weight_decay"] != given["weight_decay"] for group in optimizer.param_groups
        ):
            _refuse_two_decays(args.weight_decay, given, settled=False)
        self.meter = NoiseScaleMeter(chunk_size=state.train_batch_size)
        if _METER in state.stateful_callbacks:
            self.meter.load_state_dict(state.stateful_callbacks[_METER])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        if self._knows_noise:
            try:
                self.meter.update(self._trainer.optimizer)
            except NoiseScaleUnknown as error:
                self._knows_noise = False
                if state.is_world_process_zero:
                    warnings.warn(f"GSNRCallback logs no noise_scale: {error}.", stacklevel=2)
        self._keep(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint may be due here, too."""
        self._keep(state, control)

    def _keep(self, state: Any, control: Any) -> None:
        if control.should_save:
            state.stateful_callbacks[_METER] = self.meter.state_dict()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Add a record of our own to the one of the loss."""
        if logs is None or "loss" not in logs:
            return
        optimizer = find_optimizer(self._trainer.optimizer)
        skipped = optimizer.overflow or self._trainer.accelerator.optimizer_step_was_skipped
        if optimizer.layer_statistics and not skipped:
            noise = self._noise(optimizer, state.train_batch_size) if self._knows_noise else {}
            self._trainer.log(gsnr_record(optimizer) | noise)

    def _noise(self, optimizer: VROptimizer, chunk_size: int) -> dict[str, float]:
        found = self.meter.estimate()
        averaged = {"mean": found.value, "low": found.low, "high": found.high}
        bounded = {f"noise_scale_{name}": value for name, value in averaged.items() if math.isfinite(value)}
        return {"noise_scale": noise_scale(optimizer, chunk_size)} | bounded


def gsnr_record(optimizer: VROptimizer) -> dict[str, float]:
    """GSNR as :class:`GSNRCallback` logs it, of an optimizer that has stepped with gamma below 1."""
    stats = gsnr_stats(optimizer)
    means = stats.means()
    return {
        "gsnr_k": stats.k,
        "gsnr_mean_ratio": means.mean_ratio,
        "gsnr_clamped_low": means.clamped_low,
        "gsnr_clamped_high": means.clamped_high,
    }


def arguments_of(cls_and_kwargs: tuple[Any, dict[str, Any]] | None) -> dict[str, Any] | None:
    """All arguments that the Trainer was given for an optimizer of ours; None where it was given no such."""
    if cls_and_kwargs is None:
        return None
    factory, kwargs = cls_and_kwargs
    bound = factory.keywords if isinstance(factory, functools.partial) else {}
    made = factory.func if isinstance(factory, functools.partial) else factory
    return bound | kwargs if isinstance(made, type) and issubclass(made, VROptimizer) else None


def require_json_agrees(trainer: Trainer) -> None:
    """Refuse a DeepSpeed JSON with an optimizer beside ``optimizer_cls_and_kwargs``, which the Trainer then ignores.

    Raises:
        RuntimeError: there are both.
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
    """``settled``: 0, the default of the ``TrainingArguments``, counts as not given."""
    asked = given.get("weight_decay", of_arguments)
    if asked != of_arguments and (of_arguments != 0.0 or not settled):
        raise ValueError(
            f"TrainingArguments has weight_decay={of_arguments}, which the Trainer uses, and the optimizer was given "
            f"weight_decay={asked}. Give it to the TrainingArguments alone."
        )
