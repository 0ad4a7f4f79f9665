"""The trainings with the Trainer on two ranks, run once per session."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.noise import find_optimizer
from tests.engines.deepspeed import expert_cases
from tests.support import hf_accelerate
from tests.support.hf import (
    Case,
    Corpus,
    attempt,
    follow_noise,
    fresh,
    make_model,
    make_trainer,
    run_case,
    training_arguments,
    weights_of,
)
from tests.support.hf_resume import resume

OFFLOADED: dict[str, Any] = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}

#: By name. These run always, MORE of them with the slow tests.
TRAINED: dict[str, Case] = {
    "ddp": Case(None),
    "ddp, mean of means": Case(None, counts=False),
    "ddp, bf16 autocast": Case(None, dtype="bf16"),
    "ddp, plain Trainer": Case(None, mixin=False),
    "ZeRO-0": Case(0),
    "ZeRO-0, tokens of a rank": Case(0, "json", clip=1.0, arguments={"average_tokens_across_devices": False}),
    "ZeRO-1, JSON": Case(1, "json"),
    "ZeRO-2": Case(2),
    "ZeRO-2, short last window": Case(2, accumulation=5),
    "ZeRO-2, JSON, clipped": Case(2, "json", clip=0.3),
    "ZeRO-2, bf16": Case(2, dtype="bf16"),
    "ZeRO-2, fp16": Case(2, dtype="fp16", config={"fp16": {"enabled": "auto", "initial_scale_power": 8}}),
    "ZeRO-3, JSON": Case(3, "json"),
}
MORE: dict[str, Case] = {
    "ddp, clipped": Case(None, clip=0.3),
    "ZeRO-2, plain Trainer": Case(2, mixin=False),
    "ddp, short last window": Case(None, accumulation=5),
    "ddp, VRAdamW from a factory": Case(None, "factory", "VRAdamW"),
    "ddp, tokens of a rank": Case(None, arguments={"average_tokens_across_devices": False}),
    "ZeRO-2, tokens of a rank": Case(2, clip=0.3, arguments={"average_tokens_across_devices": False}),
    "ddp, one micro-batch": Case(None, accumulation=1),
    "ZeRO-0, bf16": Case(0, dtype="bf16"),
    "ZeRO-1": Case(1),
    "ZeRO-2, mean of means": Case(2, counts=False),
    "ZeRO-2, VRAdamW from a factory": Case(2, "factory", "VRAdamW"),
    "ZeRO-2, beside DeepSpeed's reduction": Case(2, "json", config=OFFLOADED),
    "ZeRO-3": Case(3),
    "ZeRO-3, JSON, bf16, clipped": Case(3, "json", dtype="bf16", clip=0.3),
}  # fmt: skip

RESUMED: dict[str, Case] = {"ddp": Case(None), "ZeRO-2, JSON, bf16": Case(2, "json", dtype="bf16"), "ZeRO-3": Case(3)}
RESUMED_MORE: dict[str, Case] = {
    "ddp, bf16 autocast": Case(None, dtype="bf16"),
    "ZeRO-0": Case(0),
    "ZeRO-1": Case(1),
    "ZeRO-2, fp16": Case(2, dtype="fp16", config={"fp16": {"enabled": "auto", "initial_scale_power": 8}}),
}

#: Trained twice over one model, as in a loop of Trainers, which destroy no engine.
AGAIN: dict[str, Case] = {"ZeRO-0": Case(0), "ZeRO-2": Case(2), "ZeRO-2, offloaded": Case(2, "json", config=OFFLOADED)}

#: With Accelerate alone: ZeRO stage, how the optimizer gets there.
ACCELERATED: dict[str, tuple[int | None, str]] = {
    "ddp": (None, "instance"),
    "ZeRO-1, JSON": (1, "json"),
    "ZeRO-2": (2, "instance"),
}


def again(case: Case, folder: Path) -> tuple[list[str], int]:
    """Return the weights in which a second Trainer over a model differs from one over a fresh model; the last k."""
    model = make_model()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    ends = []
    for turn, of_turn in enumerate((make_model(), model, model)):
        with fresh(), torch.no_grad():
            for name, weight in of_turn.state_dict().items():
                weight.copy_(start[name])
            with torch.enable_grad():
                trainer = make_trainer(case, folder / str(turn), model=of_turn)
                trainer.train()
            ends.append(weights_of(trainer))
            k = ds_vrgd.gsnr_stats(find_optimizer(trainer.optimizer)).k
    alone, _, second = ends
    return [name for name in alone if not torch.equal(alone[name], second[name])], k


def retried(case: Case, folder: Path) -> tuple[int, int]:
    """Return steps and batch size of a Trainer that ran out of memory in its second micro-batch."""
    from transformers import Trainer

    class Small(Trainer):  # type: ignore[misc]
        calls = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            Small.calls += 1
            if Small.calls == 2:
                raise RuntimeError("CUDA out of memory.")
            return super().training_step(*args, **kwargs)

    with fresh():
        trainer = make_trainer(case, folder, base=Small, auto_find_batch_size=True)
        trainer.train()
        return trainer.state.global_step, trainer._train_batch_size


def dropped(folder: Path) -> None:
    """A plain Trainer under DeepSpeed that is handed an instance."""
    from transformers import Trainer

    with fresh():
        model, arguments = make_model(), training_arguments(Case(2), folder)
        optimizer = ds_vrgd.VRLAMB(model.parameters(), lr=1e-3)
        Trainer(model=model, args=arguments, train_dataset=Corpus(), optimizers=(optimizer, None)).train()


def named_twice(folder: Path, mixin: bool) -> None:
    """An optimizer in the JSON, and another one for the Trainer."""
    with fresh():
        trainer = make_trainer(Case(2, "json", "VRAdamW", mixin=mixin), folder)
        trainer.optimizer_cls_and_kwargs = (ds_vrgd.VRLAMB, {})
        trainer.train()


class Experts(nn.Module):
    """A layer, four experts, another layer, over the two ranks; a loss of the Trainer's kind."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = expert_cases.make(2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.inner(x)}


class Points(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(expert_cases.WIDTH, generator=torch.Generator().manual_seed(index))}


def log_noise(folder: Path) -> bool:
    """Return whether the noise scale counts the samples that a process gets of a batch that Accelerate splits."""
    with fresh():
        trainer = make_trainer(Case(None), folder, accelerator_config={"split_batches": True})
        callback, expected = follow_noise(trainer)
        trainer.train()
        return bool(callback.meter.state_dict() == expected.state_dict())


def log_experts(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The Trainer's log, and the callback's warnings."""
    from transformers import Trainer

    from ds_vrgd.hf import GSNRCallback

    with fresh():
        trained = Case(1, "json", "VRSGD", accumulation=2)
        arguments = training_arguments(trained, folder, max_steps=3, per_device_train_batch_size=8)
        trainer = Trainer(model=Experts(), args=arguments, train_dataset=Points())
        trainer.add_callback(GSNRCallback(trainer))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        trainer.model_wrapped.destroy()
    messages = [str(one.message) for one in caught]
    return trainer.state.log_history, [message for message in messages if "GSNRCallback" in message]


def train_all(rank: int, folder: str, slow: bool) -> dict[tuple[str, str], Any]:
    """Return outcomes by kind and name."""
    found: dict[tuple[str, str], Any] = {("imported", "transformers"): "transformers" in sys.modules}
    for name, case in (MORE if slow else TRAINED).items():
        found["trained", name] = attempt(run_case, case, Path(folder, name))
    for name, case in (RESUMED_MORE if slow else RESUMED).items():
        found["resumed", name] = attempt(resume, case, Path(folder, f"resumed {name}"))
    if slow:
        return found
    for name, case in AGAIN.items():
        found["again", name] = attempt(again, case, Path(folder, f"again {name}"))
        found["retried", name] = attempt(retried, case, Path(folder, f"retried {name}"))
    for name, (stage, entry) in ACCELERATED.items():
        found["accelerated", name] = attempt(hf_accelerate.train, stage, entry)
    unforced = hf_accelerate.offloaded(zero_force_ds_cpu_optimizer=False)
    found["accelerated", "ZeRO-2, offloaded"] = attempt(hf_accelerate.train, 2, "instance", unforced)
    found["refused", "replaced by Accelerate"] = attempt(hf_accelerate.train_swapped)
    found["refused", "dropped by the Trainer"] = attempt(dropped, Path(folder, "dropped"))
    for mixin in (True, False):
        found["refused", f"named twice, {mixin=}"] = attempt(named_twice, Path(folder, "twice"), mixin)
    found["logged", "split batches"] = attempt(log_noise, Path(folder, "split"))
    # Last, for the process groups of experts stay.
    found["logged", "experts"] = attempt(log_experts, Path(folder, "experts"))
    return found
