"""The engine driven as Megatron-DeepSpeed drives it, docs/MEGATRON.md: its param groups, its schedule, its attributes.

Megatron itself is not run: apex, its CUDA extensions and its data are not here.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.doctor.chunks import chunk_gradients
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from tests.engines.deepspeed.pipelines import guarded, masters_by_stage
from tests.engines.deepspeed.tensor_parallel import SPLIT, Mpu, ParallelLM, close, logical, logical_weights, train
from tests.support.model import LENGTH, POSITIONS, VOCABULARY, WIDTH
from tests.support.pipeline import Block, loss_of, samples, shares
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import Case, relative_error

pytestmark = pytest.mark.slow

WORLD, STEPS, LR, DECAY = 4, 5, 5e-3, 0.1


def megatron_groups(module: nn.Module) -> list[dict[str, Any]]:
    """As ``megatron.optimizer.get_param_groups`` makes them: multipliers, and no group that would be empty."""
    named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    without = [param for name, param in named if name.endswith(".bias") or param.dim() == 1]
    decayed = [param for _, param in named if not any(param is other for other in without)]
    groups = [
        {"name": "wd_no_scale_lr", "params": decayed, "wd_mult": 1.0, "lr_mult": 1.0},
        {"name": "no_wd_no_scale_lr", "params": without, "wd_mult": 0.0, "lr_mult": 1.0},
    ]
    return [group for group in groups if group["params"]]


class Schedule:
    """As Megatron's ``OptimizerParamScheduler``: counts samples, and writes both lr and weight decay of every group."""

    def __init__(self, optimizer: torch.optim.Optimizer, warmup: int) -> None:
        self.optimizer, self.warmup, self.num_steps = optimizer, warmup, 0
        self.step(0)

    def lr(self) -> float:
        return LR * min(1.0, (1 + self.num_steps) / self.warmup)

    def step(self, increment: int, token_num: int | None = None) -> None:
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr() * group.get("lr_mult", 1.0)
            group["weight_decay"] = DECAY * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}


def reference_of(start: dict[str, Tensor]) -> DenseOptimizer:
    vectors = [name for name, weight in start.items() if weight.dim() == 1 or name.endswith(".bias")]
    groups = [{"params": [name for name in start if name not in vectors]}, {"params": vectors, "weight_decay": 0.0}]
    return DenseOptimizer("VRLAMB", start, groups, lr=LR, weight_decay=DECAY)


def follow(reference: DenseOptimizer, lr: float, chunks: list[dict[str, Tensor]]) -> None:
    for group in reference.groups:
        group["lr"] = lr
    reference.step(chunks)


# -- tensor and data parallel, --no-pipeline-parallel ------------------------------------------------------------------


def mark(model: ParallelLM) -> None:
    """Every parameter bears Megatron's attributes, also where they say no."""
    for name, param in model.named_parameters():
        param.tensor_model_parallel = name in SPLIT  # type: ignore[attr-defined]
        param.partition_dim, param.partition_stride = SPLIT.get(name, -1), 1  # type: ignore[attr-defined]
        param.sequence_parallel = False  # type: ignore[attr-defined]
    model.tokens.weight.shared = True  # type: ignore[assignment]


def tensor_parallel(stage: int, dtype: str) -> tuple[float, list[float]]:
    """Error, and the rates of a group over the steps."""
    mpu, case = Mpu(2), Case("VRLAMB", stage, dtype, 2)
    model = ParallelLM(mpu)
    mark(model)
    optimizer = ds_vrgd.VRLAMB(megatron_groups(model), lr=LR, weight_decay=DECAY, betas=(0.9, 0.999), eps=1e-6)
    schedule = Schedule(optimizer, warmup=20)
    config = {name: value for name, value in case.config(mpu.dp).items() if name != "optimizer"}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, mpu=mpu, config=config)
    half = torch.bfloat16 if dtype == "bf16" else torch.float32
    plain = ParallelLM(mpu).to(engine.device, half)
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    reference = reference_of({name: weight.to(half).double() for name, weight in logical_weights().items()})
    step_engine, rates = engine.step, []
    engine.step = lambda: step_engine(lr_kwargs={"increment": case.config(mpu.dp)["train_batch_size"]})
    for step in range(STEPS):
        with whole_weights(engine) as weights:
            plain.load_state_dict(weights, strict=False)
        rates.append(float(optimizer.param_groups[0]["lr"]))
        micro_batches = train(engine, case, mpu, step)
        chunks = chunk_gradients(plain, micro_batches, 1.0 / case.accumulation)
        follow(reference, rates[-1], [logical(chunk, mpu, shapes) for chunk in chunks])
    masters = logical(master_weights(engine), mpu, shapes)
    close(engine)
    return relative_error({name: weight.flatten() for name, weight in masters.items()}, reference), rates


# -- pipeline and data parallel ---------------------------------------------------------------------------------------


class EmbeddingPipe(nn.Module):
    """As Megatron's: one module holds positions, too, which the last stage has a copy of and never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(LENGTH, device=tokens.device)
        embedded: Tensor = self.word_embeddings(tokens) + self.position_embeddings(places)
        return embedded


def logits_of(embedding: EmbeddingPipe, x: Tensor) -> Tensor:
    return nn.functional.linear(x, embedding.word_embeddings_weight)


TIED, COPY = "tied_modules.embed.word_embeddings.weight", "copy.weight"


class Whole(nn.Module):
    """The same model in one piece, under the names that the stages have.

    The output has a copy of the table, so that autograd does not add its two gradients up in half precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"embed": EmbeddingPipe()})
        self.copy = nn.Embedding(VOCABULARY, WIDTH)
        self.add_module("1", Block())
        self.add_module("2", nn.LayerNorm(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x = getattr(self, "2")(getattr(self, "1")(self.tied_modules["embed"](tokens[:, :-1])))
        return loss_of(nn.functional.linear(x, self.copy.weight), tokens[:, 1:])


def whole_model() -> Whole:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Whole()
        with torch.no_grad():
            for param in model.tied_modules.parameters():
                param.mul_(0.3)
    return model


def pipeline_parallel(stage: int, dtype: str) -> tuple[float, list[float]]:
    case = Case("VRLAMB", stage, dtype, 3)
    tied: dict[str, Any] = {"tied_weight_attr": "word_embeddings_weight"}
    layers = [
        TiedLayerSpec("embed", EmbeddingPipe, **tied),
        LayerSpec(Block),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("embed", EmbeddingPipe, forward_fn=logits_of, **tied),
    ]
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=1, num_dp=2)
    with contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(layers=layers, topology=topology, loss_fn=loss_of, partition_method="uniform")
    start = dict(whole_model().named_parameters())
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(start[name])
    optimizer = ds_vrgd.VRLAMB(megatron_groups(module), lr=LR, weight_decay=DECAY, betas=(0.9, 0.999), eps=1e-6)
    config = {name: value for name, value in case.config(2).items() if name != "optimizer"}
    schedule = Schedule(optimizer, warmup=60)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, lr_scheduler=schedule, config=config)
    half = torch.bfloat16 if dtype == "bf16" else torch.float32
    plain = whole_model().to(engine.device, half)
    weights = {name: weight for name, weight in plain.named_parameters() if name != COPY}
    reference = reference_of({name: weight.detach().cpu().double() for name, weight in weights.items()})
    rates = []
    for step in range(STEPS):
        masters = masters_by_stage(engine)
        with torch.no_grad():
            for name, param in weights.items():
                param.copy_(masters[name][0 if 0 in masters[name] else 1].view_as(param))
            plain.copy.weight.copy_(weights[TIED])
        rates.append(float(optimizer.param_groups[0]["lr"]))
        own = shares(step, 2, case.accumulation)
        micro_batches = [tokens.to(engine.device) for share in own for tokens in share]
        chunks = chunk_gradients(plain, micro_batches, 1.0 / case.accumulation)
        for chunk in chunks:
            chunk[TIED] = chunk[TIED] + chunk.pop(COPY)
        follow(reference, rates[-1], chunks)
        engine.train_batch(samples(own[engine.grid.get_data_parallel_rank()]))
    masters = masters_by_stage(engine)
    close(engine)
    return relative_error({name: of[0 if 0 in of else 1] for name, of in masters.items()}, reference), rates


# ---------------------------------------------------------------------------------------------------------------------

RUNS = {
    "tensor-parallel-0-fp32": (tensor_parallel, 0, "fp32"),
    "tensor-parallel-2-bf16": (tensor_parallel, 2, "bf16"),
    "pipeline-0-fp32": (pipeline_parallel, 0, "fp32"),
    "pipeline-1-fp32": (pipeline_parallel, 1, "fp32"),
    "pipeline-1-bf16": (pipeline_parallel, 1, "bf16"),
}


def run_all(rank: int) -> dict[str, Any]:
    return {name: guarded(function, stage, dtype) for name, (function, stage, dtype) in RUNS.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, run_all)


@pytest.mark.parametrize("name", RUNS)
def test_follows_the_reference_at_the_rates_of_megatrons_schedule(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        assert not isinstance(of_rank[name], str), of_rank[name]
        error, rates = of_rank[name]
        assert error <= 8e-7
        assert rates == sorted(rates)
        assert rates[0] < 0.2 * rates[-1], "the schedule must have moved"
