"""Drive a pipeline engine for some steps beside the dense float64 reference of the same model in one piece."""

from __future__ import annotations

import contextlib
import io
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor

import ds_vrgd
from ds_vrgd.doctor.chunks import chunk_gradients, norm_of
from ds_vrgd.doctor.reference import DenseOptimizer, raw_ratio
from ds_vrgd.engines.deepspeed.observer import observer_of
from tests.support.model import param_groups
from tests.support.pipeline import COPY, pipeline, plain_model, samples, shares
from tests.support.resuming import everything, moving_config
from tests.support.trajectory import DTYPES, Case, reference_groups, relative_error

TIED = "tied_modules.tokens.weight"


@dataclass(frozen=True)
class Staged:
    """A case on a pipeline.

    Attributes:
        case: what of it an engine without a pipeline has, too.
        stages: of the pipeline.
        blocks: of the model, between the embedding and the output.
        tied: whether these two share their weight.
        options: of the ``PipelineModule``.
        matrices: options of the param group of the matrices, tied ones among them.
    """

    case: Case
    stages: int = 2
    blocks: int = 1
    tied: bool = True
    options: dict[str, Any] = field(default_factory=dict)
    matrices: dict[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """The outcome of a run on this rank.

    Attributes:
        of_weights, of_distance, moved: as in :class:`~tests.support.trajectory.Result`.
        copies: |a - b| / |a| of the tied weights' masters on the first stage and another one, at most.
        alike: whether the tied weights that the stages compute with are equal, bit for bit.
        mean_ratios: of the first step, by layer, and what they should be; None without GSNR.
        noise: the noise scale at the first step, and what it should be.
        evaluated: whether evaluation has left everything as it was.
    """

    of_weights: float
    of_distance: float
    moved: float
    copies: float
    alike: bool
    mean_ratios: tuple[dict[str, float], dict[str, float]] | None
    noise: tuple[float, float] | None
    evaluated: bool
    wrapper: str


def build(staged: Staged, config: dict[str, Any] | None = None) -> Any:
    ranks = torch.distributed.get_world_size() // staged.stages
    with contextlib.redirect_stdout(io.StringIO()):
        module = pipeline(staged.blocks, staged.stages, tied=staged.tied, **staged.options)
        groups = param_groups(module, **staged.case.without_decay())
        groups[0] |= staged.matrices
        config = config or staged.case.config(ranks)
        engine, *_ = deepspeed.initialize(model=module, model_parameters=groups, config=config)
    return engine


def masters_by_stage(engine: Any, group: Any | None = None) -> dict[str, dict[int, Tensor]]:
    """Return the flat fp32 weights of the ranks of ``group``, by name and stage. A collective of these ranks."""
    observer, mine = observer_of(engine), {}
    for tensor in observer.tensors:
        layout, flat = observer.layout(tensor), tensor.detach().flatten()
        for segment in layout.segments:
            layer = layout.layers[segment.layer]
            piece = flat[segment.start : segment.start + segment.numel].cpu().clone()
            mine[layer.name] = piece if layer.groups or not engine.grid.get_data_parallel_rank() else piece[:0]
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, (engine.stage_id, mine), group=group)
    found: dict[str, dict[int, Tensor]] = {}
    for stage, pieces in everyone:
        for name, piece in pieces.items():
            of = found.setdefault(name, {})
            of[stage] = torch.cat([of[stage], piece]) if stage in of else piece
    return found


def train(engine: Any, staged: Staged, steps: range) -> None:
    ranks = engine.grid.get_data_parallel_world_size()
    for step in steps:
        engine.train_batch(samples(shares(step, ranks, staged.case.accumulation)[engine.grid.get_data_parallel_rank()]))


def follow(staged: Staged) -> Outcome:
    """Train, and return the errors against the reference."""
    case, engine = staged.case, build(staged)
    ranks, dtype = engine.grid.get_data_parallel_world_size(), DTYPES[case.dtype]
    apart = staged.tied and staged.stages > 1
    plain = plain_model(staged.blocks, tied=staged.tied, apart=apart).to(engine.device, dtype)
    start = {name: param.detach().cpu().double() for name, param in plain.named_parameters() if name != COPY}
    groups = reference_groups(start, case)
    groups[0] |= staged.matrices
    reference = DenseOptimizer(case.optimizer, start, groups, **case.hyper())
    mean_ratios, noise, evaluated = None, None, True
    for step in range(case.steps):
        masters = masters_by_stage(engine)
        with torch.no_grad():
            for name, param in plain.named_parameters():
                of = masters[TIED if name == COPY else name]
                param.copy_(of[min(of)].view_as(param))
        own = shares(step, ranks, case.accumulation)
        scale = getattr(engine.optimizer, "loss_scale", 1.0) / case.accumulation
        micro_batches = [tokens.to(engine.device) for share in own for tokens in share]
        chunks = chunk_gradients(plain, micro_batches, scale)
        if apart:
            chunks = [chunk | {TIED: chunk[TIED] + chunk[COPY]} for chunk in chunks]
        reference.step(chunks, clip=case.clip)
        train(engine, staged, range(step, step + 1))
        if step == 0 and case.optimizer.startswith("VR"):
            stats = ds_vrgd.gsnr_stats(engine)
            observed = [name for name in start if start[name].dim() == 1 or not staged.matrices]
            right = {name: float(raw_ratio([chunk[name] for chunk in chunks], 1e-6).mean()) for name in observed}
            mean_ratios = {name: layer.mean_ratio for name, layer in stats.layers.items()}, right
            noise = ds_vrgd.noise_scale(engine), noise_of(chunks, observed, engine.train_micro_batch_size_per_gpu())
            assert stats.k == len(chunks)
        if step == 1:
            before = everything(engine, schedule=False)
            engine.eval_batch(samples(own[engine.grid.get_data_parallel_rank()]), num_micro_batches=1)
            evaluated = same(before, everything(engine, schedule=False))
    assert (engine.global_steps, engine.skipped_steps) == (case.steps, 0)
    masters = masters_by_stage(engine)
    copies, alike = compare_copies(engine, masters)
    error = relative_error({name: of[min(of)] for name, of in masters.items()}, reference)
    moved = norm_of([reference.params[name] - start[name] for name in start])
    moved /= norm_of(list(reference.params.values()))
    wrapper = type(engine.optimizer).__name__
    engine.destroy()
    return Outcome(error, error / moved, moved, copies, alike, mean_ratios, noise, evaluated, wrapper)


def noise_of(chunks: list[dict[str, Tensor]], names: list[str], size: int) -> float:
    """Return the noise scale (McCandlish et al. 2018, appendix A) from the norms of one and of all chunks' means."""
    k = len(chunks)
    small = sum(norm_of([chunk[name] for name in names]) ** 2 for chunk in chunks) / k
    big = norm_of([torch.stack([chunk[name] for chunk in chunks]).mean(0) for name in names]) ** 2
    square = (k * size * big - size * small) / (k * size - size)
    return (small - big) / (1 / size - 1 / (k * size)) / square


def compare_copies(engine: Any, masters: dict[str, dict[int, Tensor]]) -> tuple[float, bool]:
    of = masters.get(TIED, {})
    worst = max((norm_of([of[s] - of[min(of)]]) / norm_of([of[min(of)]]) for s in of), default=0.0)
    weights = dict(engine.module.named_parameters())
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, weights[TIED].detach().cpu() if TIED in weights else None)
    held = [weight for weight in everyone if weight is not None]
    return worst, all(torch.equal(weight, held[0]) for weight in held)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def resume(staged: Staged, folder: Path) -> tuple[bool, bool]:
    """Return whether a run that was saved and loaded resumes as the one that never stopped, and whether it moves."""
    ranks = torch.distributed.get_world_size() // staged.stages
    straight = build(staged, moving_config(staged.case, ranks))
    train(straight, staged, range(2))
    with contextlib.redirect_stdout(io.StringIO()):
        straight.save_checkpoint(str(folder), client_state={"note": 1})
    saved = everything(straight)
    train(straight, staged, range(2, 4))
    right = everything(straight)
    straight.destroy()
    other = build(staged, moving_config(staged.case, ranks))
    _, client_state = other.load_checkpoint(str(folder))
    assert client_state["note"] == 1
    train(other, staged, range(2, 4))
    found = everything(other)
    other.destroy()
    return same(right, found), not same(saved["masters"], right["masters"])


def guarded(function: Any, *arguments: Any) -> Any:
    """Return the function's result, or the error that it raises, as text."""
    try:
        return function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()[-600:]}"
