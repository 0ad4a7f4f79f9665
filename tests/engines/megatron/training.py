"""Training of a tiny GPT of Megatron-Core's own classes with ``ds_vrgd.megatron``, next to the dense reference.

The chunks of the reference are what every rank holds in its gradient buffers when Megatron-Core asks for the reduction
of a bucket. They and the weights are read through Megatron-Core's own names and maps.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

import ds_vrgd.megatron
from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.engines.megatron.exchange import BucketExchange
from tests.engines.megatron.cases import Case
from tests.support.ranks import DEVICE
from tests.support.trajectory import DTYPES, noise_error

VOCABULARY, LENGTH, SAMPLES = 32, 8, 2


@dataclass
class Result:
    """The result of a run: as for FSDP2 (tests/engines/fsdp/training.py), and the number of bucket groups."""

    of_weights: float
    moved: float
    k: int | None
    of_noise: float | None
    buckets: int
    layers: int


@dataclass
class Run:
    """What is trained."""

    case: Case
    model: Any
    optimizer: Any
    schedule: Any

    @property
    def wrapper(self) -> Any:
        return self.optimizer.chained_optimizers[0]

    @property
    def names(self) -> dict[Tensor, str]:
        stage = f"stage{parallel_state.get_pipeline_model_parallel_rank()}." if self.case.pipeline > 1 else ""
        return {p: stage + name.removeprefix("module.") for name, p in self.model.named_parameters() if p.requires_grad}

    def window(self, step: int) -> None:
        """Run the forward and backward passes of a step, by Megatron-Core's schedule."""
        seed = 1000 * step + parallel_state.get_data_parallel_rank()
        tokens = torch.randint(
            VOCABULARY, (self.case.accumulation, SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(seed)
        )
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=iter(tokens.to(DEVICE)), model=[self.model],
            num_microbatches=self.case.accumulation, seq_length=LENGTH, micro_batch_size=SAMPLES, forward_only=False,
        )  # fmt: skip

    def step(self) -> bool:
        success, _, _ = self.optimizer.step()
        if success:
            self.schedule.step(1)
        return bool(success)


def _forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Any]:
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=tokens.device).expand(SAMPLES, LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, device=tokens.device).tril() < 0.5
    output = model(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:])
    if model.config.calculate_per_token_loss:
        count = torch.tensor(output.numel(), dtype=torch.int, device=tokens.device)
        return output, lambda losses: (losses.float().sum(), count, {})
    return output, lambda losses: (losses.float().mean(), {})


def initialize(tensor: int, pipeline: int) -> None:
    """Make the model-parallel groups, unless they are there: each has communicators of its own."""
    sizes = parallel_state.get_tensor_model_parallel_world_size, parallel_state.get_pipeline_model_parallel_world_size
    if not parallel_state.model_parallel_is_initialized() or [size() for size in sizes] != [tensor, pipeline]:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor, pipeline)
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def build(case: Case) -> Run:
    """Build model and optimizer; the model-parallel groups are there."""
    half = {"bf16": {"bf16": True}, "fp16": {"fp16": True}}.get(case.dtype, {})
    dtype = DTYPES[case.dtype]
    torch.manual_seed(5)
    config = TransformerConfig(**{
        "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "use_cpu_initialization": True,
        "tensor_model_parallel_size": case.tensor, "pipeline_model_parallel_size": case.pipeline,
        "pipeline_dtype": dtype, "params_dtype": dtype, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False, "bias_dropout_fusion": False, "masked_softmax_fusion": False,
        "persist_layer_norm": False, "init_method_std": 0.3, **half, **case.model,
    })  # fmt: skip
    with norms_for_sequence_parallelism(config):
        gpt = _gpt(case, config).to(DEVICE)
    if half:
        gpt = Float16Module(config, gpt)
    for name, param in gpt.named_parameters():
        param.requires_grad = not any(fnmatch(name, pattern) for pattern in case.frozen)
    ddp = {"use_distributed_optimizer": True, "bucket_size": 700, **case.ddp}
    model = DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), gpt)
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = model.no_sync
    hyper = case.hyper()
    lr = hyper.pop("lr")
    given = {"lr": lr, "min_lr": lr / 2, "weight_decay": hyper.pop("weight_decay", 0.0)}
    options = OptimizerConfig(**{
        "optimizer": "adam", "use_distributed_optimizer": ddp["use_distributed_optimizer"], "clip_grad": 0.0,
        **half, **given, **case.config,
    })  # fmt: skip
    overrides = {key: {**value, **case.of_vectors} for key, value in standard_overrides(options).items()}
    overrides |= {ParamKey(name=pattern): {**given} for pattern, given in case.overrides.items()}
    optimizer = ds_vrgd.megatron.get_optimizer(options, [model], overrides, optimizer=case.optimizer, **hyper)
    config.grad_scale_func = optimizer.scale_loss
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=lr, min_lr=lr / 2, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="linear", start_wd=given["weight_decay"], end_wd=given["weight_decay"], wd_incr_steps=10,
        wd_incr_style="constant",
    )  # fmt: skip
    return Run(case, model, optimizer, schedule)


def _gpt(case: Case, config: TransformerConfig) -> Any:
    return GPTModel(
        config, get_gpt_layer_local_spec(normalization="LayerNorm"), VOCABULARY,
        LENGTH, pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(), share_embeddings_and_output_weights=case.tied,
        position_embedding_type="learned_absolute",
    )  # fmt: skip


@contextlib.contextmanager
def norms_for_sequence_parallelism(config: TransformerConfig) -> Iterator[None]:
    """Let torch's LayerNorm take part in sequence parallelism, for which Megatron-Core asks for apex: it is marked."""
    before = vars(WrappedTorchNorm)["__new__"]

    def make(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        norm = torch.nn.LayerNorm(hidden_size, eps)
        for param in norm.parameters():
            param.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    if config.sequence_parallel:
        WrappedTorchNorm.__new__ = make  # type: ignore[method-assign]
    try:
        yield
    finally:
        WrappedTorchNorm.__new__ = before  # type: ignore[method-assign]


def standard_overrides(options: OptimizerConfig) -> Mapping[Any, Any]:
    from megatron.core.optimizer import get_standard_config_overrides

    return get_standard_config_overrides(options)


# -- what Megatron-Core holds ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded() -> Iterator[dict[Tensor, Tensor]]:
    """Record the gradients of this rank at every request for a reduction."""
    found: dict[Tensor, Tensor] = {}
    before = {cls: getattr(cls, name) for cls, name in _REDUCTIONS.items()}

    def recording(of: Any, original: Any) -> Any:
        @functools.wraps(original)
        def start(self: Any, *args: Any, **kwargs: Any) -> Any:
            group = self._bucket_group if of is BucketExchange else self
            found.update({param: param.main_grad.detach().clone() for param in group.params})
            return original(self, *args, **kwargs)

        return start

    for cls, name in _REDUCTIONS.items():
        setattr(cls, name, recording(cls, before[cls]))
    try:
        yield found
    finally:
        for cls, name in _REDUCTIONS.items():
            setattr(cls, name, before[cls])


_REDUCTIONS: dict[Any, str] = {BucketExchange: "start", _ParamAndGradBucketGroup: "start_grad_sync"}


def summed(run: Run, mine: Mapping[Tensor, Tensor]) -> dict[Tensor, Tensor]:
    """Return gradients with those sums that Megatron-Core forms after the reduction: without GSNR they are exact."""
    found = {}
    for param in run.names:  # in one order on all ranks
        found[param] = grad = mine[param].double()
        if run.model.config.sequence_parallel and getattr(param, "sequence_parallel", False):
            dist.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
        if run.case.tied and getattr(param, "shared_embedding", False):
            dist.all_reduce(grad, group=parallel_state.get_embedding_group())
    return found


def joined(run: Run, mine: Mapping[Tensor, Tensor]) -> list[dict[str, Tensor]]:
    """Return, for every data-parallel rank, whole tensors of all layers by name. A collective of all ranks."""
    dims = {
        name: param.partition_dim if getattr(param, "tensor_model_parallel", False) else -1
        for param, name in run.names.items()
    }
    own = {run.names[param]: (value.double().cpu(), dims[run.names[param]]) for param, value in mine.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    where = parallel_state.get_data_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    dist.all_gather_object(everyone, (where, own))
    found: list[dict[str, Tensor]] = [{} for _ in range(parallel_state.get_data_parallel_world_size())]
    for data in range(len(found)):
        parts: dict[str, list[Tensor]] = {}
        for (of_data, _), of_rank in sorted(everyone, key=lambda entry: entry[0]):
            for name, (value, dim) in of_rank.items() if of_data == data else ():
                if dim < 0:
                    parts[name] = [value]
                else:
                    parts.setdefault(name, []).append(value.movedim(dim, 0))
        dim_of = {name: dim for _, of_rank in everyone for name, (_, dim) in of_rank.items()}
        for name, values in parts.items():
            found[data][name] = values[0] if dim_of[name] < 0 else torch.cat(values).movedim(0, dim_of[name])
    return found


def weights(run: Run) -> dict[str, Tensor]:
    """Return the whole master weights of all layers by name. A collective of all ranks."""
    if run.model.ddp_config.overlap_param_gather:
        run.model.start_param_sync(force_sync=True)  # else it waits for the next forward pass
    whole = {}
    for param in run.names:
        if not hasattr(param, "main_param"):
            whole[param] = param.detach().clone()
        elif not getattr(param, "main_param_sharded", False):
            whole[param] = param.main_param.detach().clone()
        else:
            whole[param] = _gathered(run, param, lambda own, main=param.main_param: main.detach())
    return joined(run, whole)[0]


def reduced(run: Run) -> dict[str, Tensor]:
    """Return the whole gradients that the buffers hold after the reduction, by name. A collective of all ranks."""
    is_sharded, whole = run.model.ddp_config.use_distributed_optimizer, {}
    for param in run.names:
        grad = param.main_grad.detach().float().flatten()  # type: ignore[attr-defined]
        whole[param] = (_gathered(run, param, lambda own, grad=grad: grad[own]) if is_sharded else grad).view_as(param)
    return joined(run, whole)[0]


def _gathered(run: Run, param: Any, part: Callable[[slice], Tensor]) -> Tensor:
    """Return a whole tensor in a parameter's shape, of which each data-parallel rank has a part. A collective."""
    flat = torch.zeros(param.numel(), device=param.device)
    if param in run.wrapper.model_param_group_index_map:
        ranges = run.wrapper._get_model_param_range_map(param)["param"]
        own = slice(ranges.start, ranges.end)
        flat[own] = part(own)
    dist.all_reduce(flat, group=parallel_state.get_data_parallel_group())
    return flat.view(param.shape)


def states(run: Run) -> dict[str, dict[str, Tensor]]:
    """Return the whole master weights and states of the distributed optimizer, by key and name. A collective."""
    of, found = run.wrapper._get_main_param_and_optimizer_states, {}
    for key in ("param", "exp_avg", "exp_avg_sq", "exp_avg_gsnr"):
        whole = {param: _gathered(run, param, lambda own, param=param, key=key: of(param)[key]) for param in run.names}
        found[key] = joined(run, whole)[0]
    return found


def reference_of(run: Run, start: Mapping[str, Tensor]) -> DenseOptimizer:
    matrices = [name for name, weight in start.items() if weight.dim() > 1 and not name.endswith(".bias")]
    vectors = [name for name in start if name not in matrices]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, **run.case.of_vectors}]
    return DenseOptimizer(run.case.optimizer, start, groups, **run.case.hyper())


def run_case(case: Case, steps: int = 5) -> Result:
    """Train, and return the errors."""
    of_noise = None
    with recorded() as mine:
        run = build(case)
        start = weights(run)
        reference = reference_of(run, start)
        scale = float(run.optimizer.get_loss_scale())
        if run.model.config.calculate_per_token_loss:
            scale *= LENGTH * SAMPLES * case.accumulation
        for step in range(steps):
            run.window(step)
            chunks = joined(run, {param: grad / scale for param, grad in summed(run, mine).items()})
            for group in reference.groups:
                group["lr"] = run.optimizer.param_groups[0]["lr"]
            reference.step(chunks, clip=case.config.get("clip_grad", 0.0))
            assert run.step()
            if step == 0 and run.optimizer.optimizer.layer_statistics:
                samples = SAMPLES * case.accumulation
                of_noise = noise_error(ds_vrgd.noise.gradient_noise(run.optimizer, samples), chunks, samples)
    end = weights(run)
    size = norm_of(list(reference.params.values()))
    error = norm_of([end[name] - weight for name, weight in reference.params.items()]) / size
    moved = norm_of([reference.params[name] - start[name] for name in start]) / size
    inner = run.optimizer.optimizer
    stats = ds_vrgd.gsnr_stats(run.optimizer) if inner.layer_statistics else None
    inner.observer.detach()
    return Result(
        error, moved, stats and stats.k, of_noise, len(run.model.bucket_groups), len(stats.layers) if stats else 0
    )


def run_cases(rank: int, cases: Mapping[str, Case]) -> dict[str, Result | str]:
    """Run every case in one process; an error becomes its text."""
    found: dict[str, Result | str] = {}
    for name, case in cases.items():
        initialize(case.tensor, case.pipeline)
        try:
            found[name] = run_case(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found
