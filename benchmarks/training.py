"""A model with its optimizer in an engine, or alone: what a step consists of, and how it is taken down."""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import Any, Protocol

import deepspeed
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ds_vrgd
from benchmarks.bert import NETWORKS
from benchmarks.contenders import CONTENDERS, torch_adamw
from benchmarks.plan import Configuration
from benchmarks.ranks import Rank
from ds_vrgd.optim import VROptimizer
from ds_vrgd_recipes.run.groups import parameter_groups

CLIPPING = 1.0
# Bytes of a tensor that is worth being taken down by force.
LARGE = 2**20


class Training(Protocol):
    """The timed unit: the three parts of a micro-batch; ``step()`` does its work in the last one of a step."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss of a micro-batch."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a micro-batch."""

    def step(self) -> None:
        """End a micro-batch."""

    def close(self) -> None:
        """Release everything."""


class EngineTraining:
    """A training inside a DeepSpeed engine."""

    def __init__(self, configuration: Configuration, rank: Rank) -> None:
        contender = CONTENDERS[configuration.contender]
        model = NETWORKS[configuration.model].build(rank.device)
        groups = parameter_groups(model)
        self._engine: Any
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=None if contender.optimizer else torch_adamw(groups),
            model_parameters=groups if contender.optimizer else None,
            config=engine_config(configuration),
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._engine(**batch).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def close(self) -> None:
        self._engine.destroy()
        self._engine = None


class BareTraining:
    """The same model in bf16 without DeepSpeed and without an optimizer: what the card needs for the gradients."""

    def __init__(self, configuration: Configuration, rank: Rank) -> None:
        self._model: Any = NETWORKS[configuration.model].build(rank.device).to(torch.bfloat16)
        self._accumulation = configuration.accumulation
        self._micro_batches = 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._model(**batch).loss
        return loss

    def backward(self, loss: Tensor) -> None:
        (loss / self._accumulation).backward()
        self._micro_batches += 1

    def step(self) -> None:
        if self._micro_batches % self._accumulation == 0:
            self._model.zero_grad(set_to_none=True)

    def close(self) -> None:
        self._model = None


class TorchTraining(BareTraining):
    """The same model under PyTorch's own DDP (fp32 weights and autocast to bf16) or FSDP2 (bf16 computes and travels).

    Every micro-batch is reduced, as DeepSpeed does; under DDP the last one alone. Each optimizer's gradients are
    clipped by what it has for that: torch's by ``torch.nn.utils.clip_grad_norm_``, ours by its own method.
    """

    def __init__(self, configuration: Configuration, rank: Rank) -> None:
        contender = CONTENDERS[configuration.contender]
        assert contender.make is not None
        model: Any = NETWORKS[configuration.model].build(rank.device)
        self._accumulation, self._micro_batches = configuration.accumulation, 0
        self._autocast = contender.engine == "ddp"
        if self._autocast:
            self._optimizer = contender.make(parameter_groups(model))
            self._model: Any = DistributedDataParallel(
                model, None if rank.device.type == "cpu" else [rank.device.index], gradient_as_bucket_view=True
            )
            if contender.compressed:
                self._model.register_comm_hook(None, bf16_compress_hook)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            mesh = init_device_mesh(rank.device.type, (rank.count,))
            for block in [*model.bert.encoder.layer, model]:
                fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=contender.reshard)
            self._model = model
            self._optimizer = contender.make(parameter_groups(model))
            if contender.make is not torch_adamw:
                ds_vrgd.attach(model, self._optimizer)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self._autocast:
            self._model.require_backward_grad_sync = (self._micro_batches + 1) % self._accumulation == 0
        with torch.autocast(batch["input_ids"].device.type, torch.bfloat16, enabled=self._autocast):
            loss: Tensor = self._model(**batch).loss
        return loss

    def step(self) -> None:
        if self._micro_batches % self._accumulation == 0:
            if isinstance(self._optimizer, VROptimizer):
                self._optimizer.clip_grad_norm_(CLIPPING)
            else:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIPPING)
            self._optimizer.step()
            self._optimizer.zero_grad()

    def close(self) -> None:
        self._model = self._optimizer = None  # type: ignore[assignment]


def build(configuration: Configuration, rank: Rank) -> Training:
    """Return the training of a configuration."""
    engine = CONTENDERS[configuration.contender].engine
    if engine is None:
        return BareTraining(configuration, rank)
    return (EngineTraining if engine == "deepspeed" else TorchTraining)(configuration, rank)


def engine_config(configuration: Configuration) -> dict[str, Any]:
    """Return the DeepSpeed JSON: its defaults, apart from what the configuration names, bf16 and clipping."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": configuration.accumulation,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": configuration.stage, **CONTENDERS[configuration.contender].zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    optimizer = CONTENDERS[configuration.contender].optimizer
    return config | ({"optimizer": optimizer} if optimizer else {})


def free(device: torch.device) -> None:
    """Free memory that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def storages() -> dict[int, torch.UntypedStorage]:
    """Return the memory of all tensors that Python knows, by address."""
    # Subclasses may have no memory of their own, as torch.compile's fake tensors.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]
    real = [tensor for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta]
    return {storage.data_ptr(): storage for storage in (tensor.untyped_storage() for tensor in real)}


def release(keep: Collection[int]) -> None:
    """Free the memory of every large tensor that is not at an address to ``keep``.

    After ``engine.destroy()`` and a garbage collection DeepSpeed 0.19 still refers to a whole ZeRO-3 model, and the
    next configurations would find less and less memory.
    """
    for address, storage in storages().items():
        if address not in keep and storage.nbytes() >= LARGE:
            storage.resize_(0)


def allocated(device: torch.device) -> int:
    """Return the bytes of tensors on the device; 0 on the CPU, which does not count them."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def highest_allocated(device: torch.device) -> int:
    """Return the most of :func:`allocated` since the last call; 0 on the CPU."""
    if device.type != "cuda":
        return 0
    highest = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return highest
