"""Train with Accelerate as its documentation does, and follow with the dense float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import ds_vrgd
from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from ds_vrgd.noise import find_optimizer
from tests.support.hf import DECAY, LR, Corpus, chunk_gradients, deepspeed_config, fresh, labels_in, make_model
from tests.support.trajectory import relative_error

STEPS, ACCUMULATION = 4, 3


def offloaded(**more: Any) -> dict[str, Any]:
    """Return a DeepSpeed JSON with the optimizer's state on the CPU."""
    return deepspeed_config(2) | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}} | more


def train(stage: int | None, entry: str, config: dict[str, Any] | None = None) -> tuple[float, float, int, str]:
    """Train; return (error of the weights, how far they moved, k, class of the optimizer).

    Args:
        stage: ZeRO stage; None for no DeepSpeed.
        entry: instance, or json: Accelerate's ``DummyOptim`` then stands for the JSON's.
        config: another JSON.
    """
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    with fresh():
        plugin = None
        if stage is not None:
            named = "VRLAMB" if entry == "json" else None
            plugin = DeepSpeedPlugin(hf_ds_config=config or deepspeed_config(stage, named, gradient_clipping=0.0))
        accelerator = Accelerator(cpu=stage is None, deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION)
        model = make_model()
        params = list(model.parameters())
        made = DummyOptim if entry == "json" else ds_vrgd.VRLAMB
        optimizer = made(params, lr=LR, weight_decay=DECAY)
        loader = torch.utils.data.DataLoader(Corpus(), batch_size=2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        plain = make_model()
        start = {name: param.detach().double().clone() for name, param in plain.named_parameters()}
        reference = DenseOptimizer("VRLAMB", start, lr=LR, weight_decay=DECAY)
        window: list[Any] = []
        for index, batch in zip(range(STEPS * ACCUMULATION), loader, strict=False):
            if index % ACCUMULATION == 0:
                plain.load_state_dict(_weights(model), strict=False)
            window.append(batch)
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                everyone: list[Any] = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(everyone, window)
                micro_batches = [inputs for of_rank in everyone for inputs in of_rank]
                reference.step([chunk_gradients(plain, inputs, 1 / labels_in(inputs)) for inputs in micro_batches])
                window = []
        ours = find_optimizer(optimizer)
        masters = master_weights(model) if stage is not None else {n: w.flatten() for n, w in _weights(model).items()}
        moved = norm_of([reference.params[name] - start[name] for name in start])
        k = ds_vrgd.gsnr_stats(optimizer).k
        if stage is not None:
            model.destroy()
        return (
            relative_error(masters, reference), moved / norm_of(list(reference.params.values())), k, type(ours).__name__
        )  # fmt: skip


def _weights(model: Any) -> dict[str, torch.Tensor]:
    if not hasattr(model, "zero_optimization_stage"):
        return {name: param.detach().clone() for name, param in model.module.named_parameters()}
    with whole_weights(model) as weights:
        return {name: weight.detach().clone() for name, weight in weights.items()}


@contextmanager
def cheap_cpu_adam() -> Iterator[None]:
    """DeepSpeed's CPU Adam needs a compiler and a minute; what matters here is that Accelerate puts it in our place."""
    from deepspeed.ops import adam

    class DeepSpeedCPUAdam(torch.optim.Adam):
        def __init__(self, params: Any, lr: float, weight_decay: float, adamw_mode: bool) -> None:
            super().__init__(params, lr=lr, weight_decay=weight_decay)

    original, adam.DeepSpeedCPUAdam = adam.DeepSpeedCPUAdam, DeepSpeedCPUAdam
    try:
        yield
    finally:
        adam.DeepSpeedCPUAdam = original


def train_swapped() -> tuple[float, float, int, str]:
    """Offload as users configure it, with an instance of ours."""
    with cheap_cpu_adam():
        return train(2, "instance", offloaded())
