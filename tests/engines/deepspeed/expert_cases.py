"""Drive engines with DeepSpeed's MoE layers beside the dense float64 reference, and a plain evaluation."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.doctor.chunks import SeenGradients, difference
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights
from tests.support.logs import Log
from tests.support.resuming import differences
from tests.support.trajectory import ARGUMENTS, relative_error

WORLD, STEPS, ACCUMULATION, WIDTH, EXPERTS, TOKENS = 4, 5, 2, 6, 4, 24
EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts."


@dataclass(frozen=True)
class ExpertCase:
    """One engine: ZeRO stage, dtype, ranks over which the four experts are spread, optimizer."""

    stage: int
    dtype: str
    spread: int
    optimizer: str = "VRLAMB"

    def name(self) -> str:
        return f"{self.optimizer}-z{self.stage}-{self.dtype}-ep{self.spread}"

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": TOKENS,
            "gradient_accumulation_steps": ACCUMULATION,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 60, "contiguous_gradients": True},
            "optimizer": {"type": self.optimizer, "params": dict(ARGUMENTS[self.optimizer])},
            "bf16": {"enabled": self.dtype == "bf16"},
            "steps_per_print": 10**9,
        }


CASES = [
    ExpertCase(1, "fp32", 2),
    ExpertCase(2, "fp32", 1),
    ExpertCase(2, "bf16", 2),
    ExpertCase(2, "fp32", 2, "VRSGD"),
    ExpertCase(2, "fp32", 4, "VRSGD"),
]

#: The cases in which a gradient of an expert is spoiled.
SPOILED = [ExpertCase(1, "fp32", 4), ExpertCase(2, "bf16", 2)]


class Routed(nn.Module):
    """A layer, experts that one token in each is sent to, another layer; a squared error."""

    def __init__(self, spread: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
        self.moe = MoE(
            WIDTH,
            expert,
            EXPERTS,
            spread,
            k=1,
            drop_tokens=False,
            use_rts=False,
            noisy_gate_policy=None,
            min_capacity=0,
        )
        self.down = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y, *_ = self.moe(torch.tanh(self.up(x)))
        return self.down(y).float().square().mean()


def make(spread: int) -> Routed:
    """Return the model, with the same weights whatever the spread."""
    torch.manual_seed(31)
    model = Routed(spread)
    own = EXPERTS // spread
    first = torch.distributed.get_rank() % spread * own
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, global_name(name, first))))
        with torch.no_grad():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.5)
    return model


def global_name(name: str, first: int) -> str:
    match = re.fullmatch(rf"{re.escape(EXPERT)}(\d+)(\..*)", name)
    return name if match is None else f"{EXPERT}{int(match[1]) + first}{match[2]}"


def samples(step: int) -> list[Tensor]:
    """Return all micro-batches of a step, over accumulation and ranks."""
    generator = torch.Generator().manual_seed(50 + step)
    return list(torch.randn(ACCUMULATION * WORLD, TOKENS, WIDTH, generator=generator))


def plain_gradients(weights: dict[str, Tensor], batch: Tensor) -> dict[str, Tensor]:
    """Compute every token by every expert, and multiply by the gate's choice, in float64."""
    w = {name: weight.double().clone().requires_grad_() for name, weight in weights.items()}
    x = torch.tanh(nn.functional.linear(batch.double(), w["up.weight"], w["up.bias"]))
    gates = nn.functional.linear(x, w["moe.deepspeed_moe.gate.wg.weight"]).softmax(-1)
    chosen = nn.functional.one_hot(gates.argmax(-1), EXPERTS) * gates
    outputs = []
    for number in range(EXPERTS):
        first, last = (f"{EXPERT}{number}.{place}" for place in (0, 2))
        hidden = torch.tanh(nn.functional.linear(x, w[f"{first}.weight"], w[f"{first}.bias"]))
        outputs.append(nn.functional.linear(hidden, w[f"{last}.weight"], w[f"{last}.bias"]))
    y = (torch.stack(outputs, -2) * chosen.unsqueeze(-1)).sum(-2)
    loss = nn.functional.linear(y, w["down.weight"], w["down.bias"]).square().mean()
    return dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True))


def build(case: ExpertCase) -> Any:
    model = make(case.spread)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=case.config())
    return engine


def train(engine: Any, step: int) -> None:
    batches = samples(step)
    for index in range(ACCUMULATION):
        batch = batches[index * WORLD + torch.distributed.get_rank()]
        engine.backward(engine(batch.to(engine.device, next(engine.module.parameters()).dtype)))
        engine.step()


def chunks_of(seen: list[list[dict[str, Tensor]]], case: ExpertCase) -> tuple[list[Any], list[Any]]:
    """Return the chunks of shared layers and of experts, from ``seen[rank][micro-batch]`` by each rank's own names."""
    own = EXPERTS // case.spread
    shared, experts = [], []
    for index in range(ACCUMULATION):
        for start in range(0, WORLD, case.spread):  # the ranks that hold all experts together
            chunk: dict[str, Tensor] = {}
            for rank in range(start, start + case.spread):
                of_rank = seen[rank][index]
                shared.append({name: grad for name, grad in of_rank.items() if EXPERT not in name})
                for name, grad in of_rank.items():
                    if EXPERT in name:
                        chunk[global_name(name, (rank - start) * own)] = grad / case.spread
            experts.append(chunk)
    return shared, experts


def run_case(case: ExpertCase, rank: int) -> dict[str, Any]:
    engine = build(case)
    seen = SeenGradients(engine.module)
    epilogue = engine._backward_epilogue
    engine._backward_epilogue = lambda: (epilogue(), seen.end_chunk(1.0 / ACCUMULATION))
    start = {name: weight.double() for name, weight in whole(engine, case).items()}
    references = [
        DenseOptimizer(
            case.optimizer, {n: w for n, w in start.items() if (EXPERT in n) == is_expert}, **ARGUMENTS[case.optimizer]
        )
        for is_expert in (False, True)
    ]
    of_plain = 0.0
    for step in range(STEPS):
        before = whole(engine, case)
        train(engine, step)
        mine, seen._chunks = seen._chunks, []
        everyone: list[Any] = [None] * WORLD
        torch.distributed.all_gather_object(everyone, mine)
        parts = chunks_of(everyone, case)
        if case.dtype == "fp32":
            plain = [plain_gradients(before, batch) for batch in samples(step)]
            mean = [{n: sum(c[n] for c in part) / len(part) for n in part[0]} for part in (plain, *parts)]
            of_plain = max(of_plain, difference([mean[1] | mean[2]], [mean[0]]))
        for reference, part in zip(references, parts, strict=True):
            reference.step(part)
    masters = master_weights(engine)
    assert set(masters) == set(start)
    errors = [relative_error({name: masters[name] for name in r.params}, r) for r in references]
    stats = ds_vrgd.gsnr_stats(engine)
    mode = engine.basic_optimizer.observer.mode
    engine.destroy()
    return {"errors": errors, "of_plain": of_plain, "k": stats.k, "layers": set(stats.layers), "mode": mode}


def spoil(case: ExpertCase, rank: int) -> dict[str, Any]:
    """Put a NaN into the last rank's gradient of an expert; return whether anything changes, and the log."""
    engine, log, spoiling = build(case), Log(), [False]
    local = dict(engine.module.named_parameters())[f"{EXPERT}0.2.bias"]
    if rank == WORLD - 1:
        hooks = list((local._backward_hooks or {}).items())
        local._backward_hooks.clear()
        local.register_hook(lambda grad: grad * float("nan") if spoiling[0] else grad)
        local._backward_hooks.update(hooks)
    logging.getLogger("ds_vrgd").addHandler(log)
    train(engine, 0)
    before, spoiling[0] = whole(engine, case), True
    train(engine, 1)
    after, spoiling[0] = whole(engine, case), False
    train(engine, 2)
    logging.getLogger("ds_vrgd").removeHandler(log)
    moved = differences(after, whole(engine, case)) != []
    found = {"changed": differences(before, after), "skipped": engine.skipped_steps, "moved": moved, "log": log.lines}
    engine.destroy()
    return found


def whole(engine: Any, case: ExpertCase) -> dict[str, Tensor]:
    """Return all weights by their names over all ranks. A collective."""
    first = torch.distributed.get_rank() % case.spread * (EXPERTS // case.spread)
    mine = {global_name(n, first): p.detach().float().clone() for n, p in engine.module.named_parameters()}
    everyone: list[Any] = [None] * WORLD
    torch.distributed.all_gather_object(everyone, mine)
    return {name: weight for weights in everyone for name, weight in weights.items()}


def resume(case: ExpertCase, folder: Path) -> list[str]:
    """Return the bitwise differences of a resumed run from one that never stopped."""
    engine = build(case)
    train(engine, 0)
    engine.save_checkpoint(str(folder), tag="saved")
    train(engine, 1)
    straight = master_weights(engine)
    engine.destroy()
    again = build(case)
    again.load_checkpoint(str(folder), tag="saved")
    train(again, 1)
    stopped = master_weights(again)
    again.destroy()
    return differences(straight, stopped)


def run_all(rank: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        found[case.name()] = run_case(case, rank)
    found["spoiled"] = [spoil(case, rank) for case in SPOILED]
    found["resumed"] = resume(ExpertCase(2, "bf16", 2), Path(folder))
    try:
        build(ExpertCase(0, "fp32", 2))
    except ValueError as error:
        found["stage 0"] = str(error)
    engine = build(ExpertCase(2, "fp32", 2))
    train(engine, 0)
    try:
        ds_vrgd.noise_scale(engine)
    except RuntimeError as error:
        found["noise"] = str(error)
    return found
