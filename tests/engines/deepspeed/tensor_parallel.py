"""Drive engines under tensor parallelism beside the dense float64 reference, which knows nothing of it.

The model is cut as Megatron cuts one: a column-parallel and a row-parallel linear layer, marked; everything else is on
all tensor-parallel ranks. The reference's chunk gradients come from a plain copy of the model (no engine, no hook) that
is cut in the same way, put together to those of the logical tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.doctor.chunks import chunk_gradients, norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import HandedMean, master_weights, whole_weights
from ds_vrgd.noise import gradient_noise
from ds_vrgd.optim import OPTIMIZERS
from tests.support.model import LENGTH, POSITIONS, VOCABULARY, WIDTH, batches, param_groups
from tests.support.trajectory import DTYPES, Case, Result, error_of_mean, noise_error, reference_groups, relative_error

WORLD, HIDDEN = 4, 12

#: Of the split weights: along which dimension.
SPLIT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class Mpu:
    """Megatron's model parallel unit, as far as DeepSpeed asks: tensor-parallel ranks are neighbours."""

    def __init__(self, tp: int) -> None:
        self.tp, self.dp = tp, WORLD // tp
        rank = torch.distributed.get_rank()
        self.tp_rank, self.dp_rank = rank % tp, rank // tp
        tensor = [torch.distributed.new_group(list(range(row * tp, (row + 1) * tp))) for row in range(self.dp)]
        data = [torch.distributed.new_group(list(range(column, WORLD, tp))) for column in range(tp)]
        self.tensor, self.data = tensor[self.dp_rank], data[self.tp_rank]

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return self.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self.tp

    def get_data_parallel_group(self) -> Any:
        return self.data

    def get_data_parallel_rank(self) -> int:
        return self.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self.dp

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size


class _Copy(torch.autograd.Function):
    """Enters the parallel region: the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _Add(torch.autograd.Function):
    """Leaves the parallel region: the ranks' outputs are added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.contiguous().clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class ParallelLM(nn.Module):
    """A ``TinyLM`` whose hidden layer is cut over the tensor-parallel ranks."""

    def __init__(self, mpu: Mpu, *, marked: bool = True) -> None:
        super().__init__()
        self.group = mpu.tensor
        own = HIDDEN // mpu.tp
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, own)
        self.down = nn.Linear(own, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.tokens.weight
        start = logical_weights()
        with torch.no_grad():
            for name, param in self.named_parameters():
                if name in SPLIT:
                    param.copy_(start[name].chunk(mpu.tp, SPLIT[name])[mpu.tp_rank])
                    if marked:
                        param.tensor_model_parallel = True  # type: ignore[attr-defined]
                else:
                    param.copy_(start[name])

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean next-token loss of ``(batch, LENGTH + 1)`` token numbers."""
        x = self.tokens(tokens[:, :-1]) + self.positions(torch.arange(LENGTH, device=tokens.device))
        hidden = torch.tanh(self.up(_Copy.apply(self.norm(x), self.group)))
        x = x + _Add.apply(hidden @ self.down.weight.T, self.group) + self.down.bias
        logits = self.head(x).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def logical_weights() -> dict[str, Tensor]:
    """Return the weights of the undivided model."""
    shapes = {
        "tokens.weight": (VOCABULARY, WIDTH), "positions.weight": (POSITIONS, WIDTH), "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,), "up.weight": (HIDDEN, WIDTH), "up.bias": (HIDDEN,), "down.weight": (WIDTH, HIDDEN),
        "down.bias": (WIDTH,), "head.bias": (VOCABULARY,),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(77)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def logical(mine: Mapping[str, Tensor], mpu: Mpu, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Return weights or gradients put together from the tensor-parallel ranks. A collective of these ranks.

    Asserts that what is not split is the same on all of them, bit for bit.

    Args:
        mine: this rank's, of any shape.
        shapes: of this rank's parts.
    """
    everyone: list[Any] = [None] * mpu.tp
    torch.distributed.all_gather_object(everyone, {n: t.detach().cpu() for n, t in mine.items()}, group=mpu.tensor)
    whole = {}
    for name in mine:
        parts = [part[name].view(shapes[name]) for part in everyone]
        if name not in SPLIT:
            assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between tensor-parallel ranks"
        whole[name] = torch.cat(parts, SPLIT[name]) if name in SPLIT else parts[0]
    return whole


def build(
    case: Case, mpu: Mpu, model: nn.Module | None = None, second_group: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    model = model or ParallelLM(mpu)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=param_groups(model, **case.without_decay(), **(second_group or {})),
        config=case.config(mpu.dp) | more,
        mpu=mpu,
    )
    return engine


def close(engine: Any) -> None:
    engine.destroy()
    groups.mpu = None  # DeepSpeed keeps the last one for engines without


def train(engine: Any, case: Case, mpu: Mpu, step: int) -> list[Tensor]:
    """Take one step; return all of its micro-batches, over ranks and accumulation."""
    micro_batches = [tokens.to(engine.device) for tokens in batches(step, case.accumulation * mpu.dp)]
    for index in range(case.accumulation):
        engine.backward(engine(micro_batches[index * mpu.dp + mpu.dp_rank]))
        engine.step()
    return micro_batches


def run_case(case: Case, mpu: Mpu) -> Result:
    """Train, and return the errors, which are the same on all ranks, for each has a reference."""
    engine = build(case, mpu)
    plain = ParallelLM(mpu).to(engine.device, DTYPES[case.dtype])
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    start = {name: weight.to(DTYPES[case.dtype]).double() for name, weight in logical_weights().items()}
    reference = DenseOptimizer(case.optimizer, start, reference_groups(start, case), **case.hyper())
    reduces = OPTIMIZERS[case.optimizer].reduces_variance
    theirs = case.dtype != "fp32" and engine.basic_optimizer.observer.mode == "off"
    given = HandedMean(engine.basic_optimizer) if theirs else None
    stats, of_noise, of_mean = None, None, []
    for step in range(case.steps):
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        scale = getattr(engine.optimizer, "loss_scale", 1.0) if case.dtype == "fp16" else 1.0
        micro_batches = train(engine, case, mpu, step)
        mine = chunk_gradients(plain, micro_batches, scale / case.accumulation)
        chunks = [logical(chunk, mpu, shapes) for chunk in mine]
        if step == 0 and reduces:
            stats = ds_vrgd.gsnr_stats(engine)
            of_noise = noise_error(gradient_noise(engine), chunks, engine.train_micro_batch_size_per_gpu())
        if given is None:
            reference.step(chunks, clip=case.clip)
        else:
            mean = logical(given.collect(), mpu, shapes)
            of_mean.append(error_of_mean({name: grad.flatten() for name, grad in mean.items()}, chunks))
            reference.step(chunks, mean=mean)
    assert (engine.global_steps, engine.skipped_steps) == (case.steps, 0)
    masters = logical(master_weights(engine), mpu, shapes)
    with whole_weights(engine) as weights:
        for name, weight in logical(weights, mpu, shapes).items():
            assert torch.equal(masters[name].to(DTYPES[case.dtype]), weight), f"master of {name}"
    wrapper = type(engine.optimizer).__name__
    close(engine)
    error = relative_error({name: weight.flatten() for name, weight in masters.items()}, reference)
    moved = norm_of([reference.params[name] - start[name] for name in start])
    moved /= norm_of(list(reference.params.values()))
    return Result(error, error / moved, moved, stats, wrapper, max(of_mean, default=None), of_noise)
