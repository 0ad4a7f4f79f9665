"""The Hugging Face Trainer: on every way to train, the weights follow the dense float64 reference."""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ds_vrgd
from ds_vrgd.hf import VRTrainerMixin
from tests.integrations.cases import AGAIN, MORE, RESUMED, RESUMED_MORE, TRAINED
from tests.support.hf import (
    DECAY,
    LR,
    STEPS,
    VOCABULARY,
    Case,
    Corpus,
    Result,
    follow_noise,
    fresh,
    make_model,
    make_trainer,
    recording,
    run_case,
    scheduled,
    training_arguments,
    weights_of,
)  # fmt: skip
from tests.support.trajectory import relative_error

# As for an engine without the Trainer: tests/engines/deepspeed/test_exactness.py.
OF_WEIGHTS = 8e-7

Outcome = Callable[..., Any]
slow = pytest.mark.slow

pytestmark = pytest.mark.filterwarnings("ignore:.* estimates the GSNR from only k")


def both(fast: dict[str, Case], more: dict[str, Case]) -> list[Any]:
    return [(name, False) for name in fast] + [pytest.param(name, True, marks=slow) for name in more]


@pytest.mark.parametrize(("name", "is_slow"), both(TRAINED, MORE))
def test_training_follows_the_reference(outcome: Outcome, name: str, is_slow: bool) -> None:
    case = (MORE if is_slow else TRAINED)[name]
    result = outcome("trained", name, is_slow)
    assert isinstance(result, Result), result
    assert result.moved > 5e-3, "the steps are too small to tell anything"
    assert result.error <= OF_WEIGHTS
    assert result.k == 2 * (4 if "short" in name else case.accumulation)  # 24 batches a rank, in windows of 5
    assert len(set(result.tokens)) > 1, "equal chunks would not tell how they are weighted"
    first, second = result.groups
    assert (first["weight_decay"], second["weight_decay"]) == (DECAY, 0.0)
    if case.optimizer == "VRLAMB":
        assert (first["adapt"], second["adapt"]) == (True, not case.mixin)
    named = case.mixin or case.stage is not None
    assert result.names == {n if named else f"param_{i}" for i, n in enumerate(layers())}


def layers() -> list[str]:
    names = [name for name, _ in make_model().named_parameters()]
    return sorted(names, key=lambda name: "norm" in name or name.endswith("bias"))


@pytest.mark.parametrize(("name", "is_slow"), both(RESUMED, RESUMED_MORE))
def test_resume_from_checkpoint_is_bitwise(outcome: Outcome, name: str, is_slow: bool) -> None:
    result = outcome("resumed", name, is_slow)
    assert not isinstance(result, str), result
    differences, states = result
    assert differences == []
    assert states >= 8, "step, two moments and the ratio's mean, of two groups at least"


@pytest.mark.parametrize("name", AGAIN)
def test_a_second_trainer_over_a_model_trains_as_over_a_fresh_one(outcome: Outcome, name: str) -> None:
    result = outcome("again", name)
    assert not isinstance(result, str), result
    assert result == ([], 2 * AGAIN[name].accumulation)


@pytest.mark.parametrize("name", AGAIN)
def test_a_smaller_batch_is_tried_after_running_out_of_memory(outcome: Outcome, name: str) -> None:
    result = outcome("retried", name)
    assert not isinstance(result, str), result
    assert result == (STEPS, 1)


def test_importing_the_package_does_not_import_transformers(outcome: Outcome) -> None:
    assert outcome("imported", "transformers") is False


def test_log_has_gsnr_beside_every_loss(outcome: Outcome) -> None:
    log = outcome("trained", "ddp").log
    losses = [record for record in log if "loss" in record]
    found = [record for record in log if "gsnr_k" in record]
    assert [record["step"] for record in losses] == [record["step"] for record in found] == [*range(1, STEPS + 1)]
    for record in found:
        assert record["gsnr_k"] == 6
        assert 0.0 < record["gsnr_clamped_low"] < 1.0
        assert 0.0 < record["gsnr_clamped_high"] < 1.0
        noise = (record["gsnr_noise_low"], record["gsnr_noise_high"])
        assert noise == pytest.approx(ds_vrgd.clamped_by_noise(6, 0.1))
        assert record["gsnr_mean_ratio"] > 0.0
        assert record.get("noise_scale_low", 0.0) <= record.get("noise_scale_mean", math.inf)
    rates = [record["learning_rate"] for record in losses]
    assert rates == pytest.approx([scheduled(step) for step in range(STEPS)])
    # Of the same chunks, whoever reduces them.
    for other in ("ZeRO-0", "ZeRO-2", "ZeRO-3, JSON"):
        twin = next(record for record in outcome("trained", other).log if "gsnr_k" in record)
        assert {name: found[0][name] for name in found[0]} == pytest.approx(twin, rel=1e-4)


def test_reporters_get_gsnr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logs = str(tmp_path / "runs")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", logs)
    result = run_case(Case(None, accumulation=6, arguments={"report_to": ["tensorboard"]}), tmp_path)
    assert result.k == 6
    assert result.error <= OF_WEIGHTS
    events = EventAccumulator(logs).Reload()
    assert {"train/gsnr_k", "train/gsnr_mean_ratio", "train/noise_scale_low", "train/loss"} <= set(
        events.Tags()["scalars"]
    )
    assert not any("noise_scale" in record for record in result.log)  # of one step, and often negative
    logged = [record["noise_scale_low"] for record in result.log if "noise_scale_low" in record]
    assert logged
    assert [event.value for event in events.Scalars("train/noise_scale_low")] == pytest.approx(logged)


def test_noise_scale_after_a_resume_has_the_new_batch_size(tmp_path: Path) -> None:
    """The checkpoint's state has the batch size of the run that wrote it."""
    with fresh():
        trainer = make_trainer(Case(None), tmp_path, save_strategy="steps", save_steps=2, max_steps=2)
        callback, expected = follow_noise(trainer)
        trainer.train()
        assert callback.meter.state_dict() == expected.state_dict()
    with fresh():
        trainer = make_trainer(Case(None), tmp_path, per_device_train_batch_size=4)
        callback, expected = follow_noise(trainer, since=expected.state_dict())
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert callback.meter.estimate().steps == STEPS
        assert callback.meter.state_dict() == expected.state_dict()


@pytest.mark.parametrize("saving", ["best", "steps"])
def test_every_checkpoint_has_the_meter_of_its_own_step(tmp_path: Path, saving: str) -> None:
    """An evaluation decides on "best", and a callback on the other, after the step has ended."""
    from transformers import Trainer, TrainerCallback

    class Evaluated(Trainer):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(eval_dataset=Corpus(), **arguments)

    class Saves(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = control.should_save or state.global_step == 3

    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"} if saving == "best" else {}
    with fresh():
        saved = {"save_strategy": saving, "save_steps": 2, "max_steps": 4}
        trainer = make_trainer(Case(None), tmp_path, base=Evaluated, **saved, **best)
        trainer.add_callback(Saves())
        trainer.train()
    written = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/trainer_state.json")}
    assert "checkpoint-3" in written
    assert {name: int(name[-1]) for name in written} == {
        name: state["stateful_callbacks"]["GSNRCallback.meter"]["steps"] for name, state in written.items()
    }


def test_a_step_that_was_left_out_is_not_counted_in_a_second_training(tmp_path: Path) -> None:
    """The optimizer still has the numbers of the last step of the first training."""
    with fresh():
        trainer = one_process(tmp_path, max_steps=2)
        trainer.train()
        callback, expected = follow_noise(trainer)
        step = trainer.training_step

        def spoiled(model: Any, *rest: Any) -> Any:
            loss = step(model, *rest)
            if trainer.state.global_step == 0:
                next(model.parameters()).grad.mul_(float("nan"))
            return loss

        trainer.training_step = spoiled
        trainer.train()
        assert callback.meter.estimate().steps == 1
        assert callback.meter.state_dict() == expected.state_dict()


def one_process(tmp_path: Path, **changed: Any) -> Any:
    """A Trainer on one process, whose arguments may be changed before it trains."""
    case = changed.pop("case", Case(None))
    return make_trainer(case, tmp_path, **changed)


def test_optimizer_keeps_the_trainers_learning_rate_and_groups_that_it_was_given(tmp_path: Path) -> None:
    with fresh():
        trainer = one_process(tmp_path)
        assert {group["lr"] for group in trainer.create_optimizer().param_groups} == {LR}
        mine = ds_vrgd.VRLAMB(trainer.model.parameters(), lr=1.0)
        trainer.optimizer = mine
        assert trainer.create_optimizer() is mine
        assert [group["adapt"] for group in mine.param_groups] == [True]


@pytest.mark.parametrize("bound", [True, False])
def test_two_weight_decays_are_refused(tmp_path: Path, bound: bool) -> None:
    with fresh():
        trainer = one_process(tmp_path)
        made = functools.partial(ds_vrgd.VRLAMB, weight_decay=0.02) if bound else ds_vrgd.VRLAMB
        trainer.optimizer_cls_and_kwargs = (made, {} if bound else {"weight_decay": 0.02})
        with pytest.raises(ValueError, match=r"TrainingArguments has weight_decay=0.1.*weight_decay=0.02.*alone"):
            trainer.create_optimizer()


def test_weight_decay_of_the_optimizer_alone_is_taken(tmp_path: Path) -> None:
    with fresh():
        trainer = one_process(tmp_path, weight_decay=0.0)
        trainer.optimizer_cls_and_kwargs = (ds_vrgd.VRLAMB, {"weight_decay": 0.02})
        assert [group["weight_decay"] for group in trainer.create_optimizer().param_groups] == [0.02, 0.0]


def test_plain_trainer_that_overrules_weight_decay_is_found(tmp_path: Path) -> None:
    with fresh():
        trainer = one_process(tmp_path, case=Case(None, mixin=False), weight_decay=0.0)
        trainer.optimizer_cls_and_kwargs = (ds_vrgd.VRLAMB, {"lr": LR, "weight_decay": 0.02})
        with pytest.raises(ValueError, match=r"weight_decay=0.0, which the Trainer uses.*weight_decay=0.02"):
            trainer.train()


def test_callback_finds_another_optimizer(tmp_path: Path) -> None:
    with fresh():
        trainer = one_process(tmp_path, case=Case(None, mixin=False))
        trainer.optimizer_cls_and_kwargs = None
        with pytest.raises(RuntimeError, match=r"GSNRCallback: .* holds no optimizer of ds_vrgd. Pass optimizer_cls"):
            trainer.train()


def test_gamma_1_logs_no_gsnr(tmp_path: Path) -> None:
    with fresh():
        trainer = one_process(tmp_path, max_steps=1)
        trainer.optimizer_cls_and_kwargs = (ds_vrgd.LAMB, {})
        trainer.train()
        assert [record for record in trainer.state.log_history if "gsnr_k" in record] == []
        assert [record["step"] for record in trainer.state.log_history if "loss" in record] == [1]


def test_step_that_was_left_out_logs_no_gsnr(tmp_path: Path) -> None:
    with fresh():
        trainer = one_process(tmp_path, max_steps=2)
        spoil = trainer.training_step

        def spoiled(model: Any, inputs: Any, *rest: Any) -> Any:
            loss = spoil(model, inputs, *rest)
            if trainer.state.global_step == 1:
                next(model.parameters()).grad.mul_(float("nan"))
            return loss

        trainer.training_step = spoiled
        trainer.train()
        assert [record["step"] for record in trainer.state.log_history if "gsnr_k" in record] == [1]


def test_noise_scale_of_split_batches_is_of_each_processes_part(outcome: Outcome) -> None:
    assert outcome("logged", "split batches") is True


def test_experts_on_two_ranks_are_logged_without_a_noise_scale(outcome: Outcome) -> None:
    found = outcome("logged", "experts")
    assert not isinstance(found, str), found
    log, messages = found
    records = [record for record in log if "gsnr_k" in record]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert {record["gsnr_k"] for record in records} == {4}
    assert not [name for record in records for name in record if name.startswith("noise")]
    assert len(messages) == 1
    assert "GSNRCallback logs no noise_scale: the noise scale of a model with an expert-parallel" in messages[0]


def test_trainer_as_it_is_needs_one_changed_line(tmp_path: Path) -> None:
    from transformers import Trainer

    with fresh():
        trainer = Trainer(
            model=make_model(), args=training_arguments(Case(None), tmp_path, max_steps=1), train_dataset=Corpus(),
            optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {"lr": 4e-3}),
        )  # fmt: skip
        trainer.train()
        assert ds_vrgd.gsnr_stats(trainer.optimizer).k == 3


@pytest.mark.parametrize("optimizer", ["VRLAMB", "VRMomentum"])
def test_an_epoch_whose_last_window_has_one_chunk_is_trained_to_its_end(tmp_path: Path, optimizer: str) -> None:
    """65 micro-batches of 4 in windows of 4: the last has one."""
    with fresh():
        case = Case(None, optimizer=optimizer, accumulation=4)
        trainer = make_trainer(
            case, tmp_path, base=recording(), max_steps=-1, num_train_epochs=1, per_device_train_batch_size=4
        )
        data = Corpus()
        trainer.train_dataset = [data[index % len(data)] for index in range(260)]
        trainer.begin(case)
        trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            trainer.create_optimizer(), lambda step: scheduled(min(step, STEPS - 1)) / LR
        )
        trainer.follow = functools.partial(followed, trainer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert trainer.state.global_step == 17
        assert trainer.state.epoch == 1.0
        assert len([w for w in caught if "this window has one chunk" in str(w.message)]) == 1
        records = [record["step"] for record in trainer.state.log_history if "gsnr_k" in record]
        assert records == [*range(1, 17)]
        error = relative_error({n: w.flatten() for n, w in weights_of(trainer).items()}, trainer.reference)
        assert error <= OF_WEIGHTS


def followed(trainer: Any) -> None:
    """Take a step of the reference at the rate of the test's own schedule."""
    steps, trainer.steps = trainer.steps, min(trainer.steps, STEPS - 1)
    type(trainer).follow(trainer)
    trainer.steps = steps + 1


@pytest.mark.parametrize("mixin", [True, False])
def test_one_chunk_in_every_step_is_an_error_at_the_start(tmp_path: Path, mixin: bool) -> None:
    with fresh():
        trainer = one_process(tmp_path, case=Case(None, mixin=mixin), gradient_accumulation_steps=1, weight_decay=0.0)
        with pytest.raises(ValueError, match=r"gradient_accumulation_steps=1, and there is 1 process.* k = 1 chunk"):
            trainer.train()
        assert trainer.state.global_step == 0
        trainer.optimizer, trainer.optimizer_cls_and_kwargs = None, (ds_vrgd.LAMB, {"lr": LR})
        trainer.train()


class Sentences(torch.utils.data.Dataset[Any]):
    """Sentences of two classes."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.arange(8), "labels": torch.tensor(index % 2)}


@pytest.mark.parametrize("accepts", [None, False])
def test_a_loss_that_nobody_divides_is_found(tmp_path: Path, accepts: bool | None) -> None:
    """BertForSequenceClassification takes num_items_in_batch and ignores it; the true loss is ln 2."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer

    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    with fresh(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = BertForSequenceClassification(config)
        if accepts is not None:
            model.accepts_loss_kwargs = accepts
        trainer = type("VRTrainer", (VRTrainerMixin, Trainer), {})(
            model=model, args=training_arguments(Case(None, accumulation=4), tmp_path, max_steps=2),
            train_dataset=Sentences(), optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {}),
        )  # fmt: skip
        trainer.train()
        told = [str(w.message) for w in caught if "num_items_in_batch" in str(w.message)]
        losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[0] == pytest.approx((4 if accepts is None else 1) * math.log(2), rel=0.1)
    assert len(told) == (1 if accepts is None else 0)
    if told:
        assert told[0].startswith("BertForSequenceClassification takes num_items_in_batch and does not divide its loss")
        assert "4 times too large" in told[0]


def test_a_loss_that_the_model_divides_is_not_warned_of(tmp_path: Path) -> None:
    with fresh(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run_case(Case(None, accumulation=4), tmp_path)
    assert result.error <= OF_WEIGHTS
    assert not [w for w in caught if "num_items_in_batch" in str(w.message)]


def test_a_loss_that_the_user_has_the_trainer_divide_is_not_warned_of(tmp_path: Path) -> None:
    """`loss_is_scaled_for_ga` is for a compute_loss() of the user; the first loss is near ln 61."""
    from transformers import Trainer

    class Own(Trainer):  # type: ignore[misc]
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return model(**inputs).loss

    with fresh(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(Case(None, accumulation=4), tmp_path, base=Own, max_steps=1)
        trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert not [w for w in caught if "num_items_in_batch" in str(w.message)]


def test_loss_scaler_that_skips_a_step_takes_the_window_with_it(tmp_path: Path) -> None:
    """Without DeepSpeed the Trainer needs a GPU for fp16, but its loss scaler also runs on the CPU, in fp32."""

    class Scaled(recording()):  # type: ignore[misc]
        overflown = False

        def follow(self) -> None:
            if self.overflown:
                super().follow()
            self.overflown = True  # the first window overflows: no step of the reference, and the schedule waits

    with fresh():
        trainer = make_trainer(Case(None), tmp_path, base=Scaled)
        trainer.begin(Case(None))
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-119)
        trainer.train()
        assert trainer.accelerator.scaler.get_scale() == 2.0**8
        assert trainer.steps == STEPS - 1
        error = relative_error({n: w.flatten() for n, w in weights_of(trainer).items()}, trainer.reference)
        assert error <= OF_WEIGHTS
        assert [r["step"] for r in trainer.state.log_history if "gsnr_k" in r] == [*range(2, STEPS + 1)]
        stats = ds_vrgd.gsnr_stats(trainer.optimizer)
        assert stats.k == 3
