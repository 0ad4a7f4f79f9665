"""A pipeline whose stages are cut over tensor-parallel ranks, as Megatron-DeepSpeed trains where it has both."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
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
from tests.engines.deepspeed.pipelines import guarded, masters_by_stage
from tests.engines.deepspeed.tensor_parallel import _Add, _Copy, close
from tests.support.model import VOCABULARY, param_groups
from tests.support.pipeline import loss_of, samples, shares
from tests.support.ranks import run_on_ranks
from tests.support.trajectory import DTYPES, Case, reference_groups, relative_error

WORLD, STAGES, PARTS, ACCUMULATION, WIDTH, HIDDEN, STEPS = 4, 2, 2, 4, 12, 10, 5
#: Columns of the tied table on each tensor-parallel rank, where their number does not divide its width.
UNEVEN = (7, 5)
#: Of the split weights: along which dimension.
TIED, COPY = "tied_modules.tokens.weight", "copy.weight"
SPLIT = {TIED: 1} | {
    f"{block}.{name}": dim
    for block in (1, 2, 3)
    for name, dim in {"up.weight": 0, "up.bias": 0, "down.weight": 1}.items()
}

pytestmark = pytest.mark.slow


class Rank:
    """Return this rank among the tensor-parallel ones, and the columns of the table that each of them has."""

    group: Any = None
    columns: tuple[int, ...] = (WIDTH // PARTS,) * PARTS

    @classmethod
    def number(cls) -> int:
        return torch.distributed.get_rank(cls.group)


class _Join(torch.autograd.Function):
    """Return the ranks' columns side by side, on all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        joined = x.new_zeros(*x.shape[:-1], WIDTH)
        joined.split(Rank.columns, -1)[Rank.number()].copy_(x)
        torch.distributed.all_reduce(joined, group=group)
        return joined

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.split(Rank.columns, -1)[Rank.number()], None


class Tokens(nn.Module):
    """A table cut by columns, and the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCABULARY, Rank.columns[Rank.number()]))

    def forward(self, tokens: Tensor) -> Tensor:
        joined: Tensor = _Join.apply(nn.functional.embedding(tokens, self.weight), Rank.group)
        return joined


def logits_of(tokens: Tokens, x: Tensor) -> Tensor:
    own = _Copy.apply(x, Rank.group).split(Rank.columns, -1)[Rank.number()]
    added: Tensor = _Add.apply(nn.functional.linear(own, tokens.weight), Rank.group)
    return added


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN // PARTS)
        self.down = nn.Linear(HIDDEN // PARTS, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(_Copy.apply(self.norm(x), Rank.group)))
        return x + _Add.apply(hidden @ self.down.weight.T, Rank.group) + self.down.bias


class Whole(nn.Module):
    """One pipeline in one piece, still cut over the tensor-parallel ranks: gives a rank its chunk gradients.

    The output has a copy of the table, so that autograd does not add up the two parts of its gradient in bf16.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict({"tokens": Tokens()})
        for block in (1, 2, 3):
            self.add_module(str(block), Block())
        self.add_module("4", nn.LayerNorm(WIDTH))
        self.copy = Tokens()

    def forward(self, tokens: Tensor) -> Tensor:
        table: Any = self.tied_modules["tokens"]
        x = table(tokens[:, :-1])
        for layer in (1, 2, 3, 4):
            x = getattr(self, str(layer))(x)
        return loss_of(logits_of(self.copy, x), tokens[:, 1:])


def logical_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, param in Whole().named_parameters():
        shape = list(param.shape)
        if name in SPLIT:
            shape[SPLIT[name]] = WIDTH if name == TIED else shape[SPLIT[name]] * PARTS
        mean = 1.0 if "norm.weight" in name or name == "4.weight" else 0.0
        if name != COPY:
            found[name] = mean + 0.3 * torch.randn(shape, generator=generator)
    return found


def own_part(name: str, whole: Tensor) -> Tensor:
    if name == TIED:
        return whole.split(Rank.columns, 1)[Rank.number()]
    return whole.chunk(PARTS, SPLIT[name])[Rank.number()] if name in SPLIT else whole


def logical(mine: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Join the parts of the tensor-parallel ranks; a weight that is not split must be the same on all, bit for bit."""
    everyone: list[Any] = [None] * PARTS
    shaped = {name: tensor.detach().cpu().view(shapes[name]) for name, tensor in mine.items()}
    torch.distributed.all_gather_object(everyone, shaped, group=Rank.group)
    whole = {}
    for name in mine:
        parts = [part[name] for part in everyone]
        assert name in SPLIT or all(torch.equal(part, parts[0]) for part in parts), f"{name} differs"
        whole[name] = torch.cat(parts, SPLIT[name]) if name in SPLIT else parts[0]
    return whole


def follow(name: str, case: Case) -> dict[str, Any]:
    topology = PipeModelDataParallelTopology(num_pp=STAGES, num_mp=PARTS, num_dp=1)
    pairs = [torch.distributed.new_group(ranks) for ranks in topology.get_axis_comm_lists("model")]
    Rank.group = next(group for group in pairs if group != torch.distributed.GroupMember.NON_GROUP_MEMBER)
    Rank.columns = UNEVEN if "uneven" in name else (WIDTH // PARTS,) * PARTS
    layers = [
        TiedLayerSpec("tokens", Tokens),
        *(LayerSpec(Block) for _ in range(3)),
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("tokens", Tokens, forward_fn=logits_of),
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        module = PipelineModule(layers=layers, topology=topology, loss_fn=loss_of, partition_method="uniform")
    start = logical_weights()
    with torch.no_grad():
        for name, param in module.named_parameters():
            param.copy_(own_part(name, start[name]))
            param.tensor_model_parallel = name in SPLIT
    groups = param_groups(module, **case.without_decay())
    engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=case.config(1))
    plain = Whole().to(engine.device, DTYPES[case.dtype])
    shapes = {name: param.shape for name, param in plain.named_parameters()}
    begin = {name: weight.to(DTYPES[case.dtype]).double() for name, weight in start.items()}
    reference = DenseOptimizer(case.optimizer, begin, reference_groups(begin, case), **case.hyper())
    layers_seen: set[str] = set()
    for step in range(STEPS):
        mine = masters_of_rank(engine)
        with torch.no_grad():
            for name, param in plain.named_parameters():
                param.copy_(mine[TIED if name == COPY else name].view_as(param))
        (own,) = shares(step, 1, ACCUMULATION)
        chunks = chunk_gradients(plain, [tokens.to(engine.device) for tokens in own], 1.0 / ACCUMULATION)
        summed = [chunk | {TIED: chunk[TIED] + chunk.pop(COPY)} for chunk in chunks]
        reference.step([logical(chunk, shapes) for chunk in summed], clip=case.clip)
        engine.train_batch(samples(own))
        layers_seen = set(ds_vrgd.gsnr_stats(engine).layers)
    masters = logical(masters_of_rank(engine), shapes)
    error = relative_error({name: weight.flatten() for name, weight in masters.items()}, reference)
    close(engine)
    return {"error": error, "layers": layers_seen == set(start)}


def masters_of_rank(engine: Any) -> dict[str, Tensor]:
    """Return, by name, this tensor-parallel rank's parts of all stages; copies of one weight must be equal bitwise."""
    pieces = masters_by_stage(engine, group=engine.mpu.get_pipe_parallel_group())
    for name, of in pieces.items():
        assert all(torch.equal(piece, of[min(of)]) for piece in of.values()), name
    return {name: of[min(of)] for name, of in pieces.items()}


CASES = {
    "z0-fp32": Case("VRLAMB", 0, "fp32", ACCUMULATION),
    "z0-fp32-uneven": Case("VRLAMB", 0, "fp32", ACCUMULATION),
    "z1-fp32-uneven": Case("VRAdam", 1, "fp32", ACCUMULATION),
    "z1-fp32": Case("VRLAMB", 1, "fp32", ACCUMULATION),
    "z1-fp32-clipped": Case("VRSGD", 1, "fp32", ACCUMULATION, clip=0.3),
    "z1-bf16": Case("VRLARS", 1, "bf16", ACCUMULATION),
    "z1-bf16-fp32-uneven": Case("VRAdamW", 1, "bf16", ACCUMULATION, "fp32"),
}


def run_all(rank: int) -> dict[str, Any]:
    return {name: guarded(follow, name, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, run_all)


@pytest.mark.parametrize("name", CASES)
def test_follows_the_reference_of_the_undivided_model(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        assert not isinstance(of_rank[name], str), of_rank[name]
        assert of_rank[name]["error"] <= 8e-7
        assert of_rank[name]["layers"]
