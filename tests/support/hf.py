"""Train a tiny language model with the Hugging Face Trainer or Accelerate, and follow with the dense reference.

The data and the model come from code. The reference gets its chunk gradients from a plain copy of the model that holds
the weights of each step, and from a loss that is written here: the sum of the cross-entropies of a chunk's tokens. It
knows nothing of the Trainer's divisions.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_vrgd
from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.doctor.weights import master_weights, whole_weights
from ds_vrgd.noise import find_optimizer
from tests.support.trajectory import ADAPTIVE, DTYPES, relative_error

VOCABULARY, LENGTH, EXAMPLES, LR, DECAY = 61, 9, 96, 5e-3, 0.1
IGNORED = -100


def make_model() -> Any:
    """Return a model with tied embeddings, biases, norms, no dropout, and the same weights wherever it is made.

    It is a Llama because its attention has no biases: the gradient of a key's bias is nothing but rounding, and no two
    ways of adding agree on that.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=14, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=LENGTH, mlp_bias=True, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(77)
        return LlamaForCausalLM(config)


class Corpus(torch.utils.data.Dataset):
    """Token sequences of unequal length: padding has no label, so chunks hold unequal numbers of labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(0, VOCABULARY, (EXAMPLES, LENGTH), generator=generator)
        self.lengths = torch.randint(2, LENGTH + 1, (EXAMPLES,), generator=generator)

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[self.lengths[index] :] = IGNORED
        return {"input_ids": self.tokens[index], "labels": labels}


def chunk_gradients(model: Any, inputs: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    """Return the gradient of ``weight`` times the sum of the cross-entropies of a chunk's tokens, by name."""
    model.zero_grad()
    logits = model(input_ids=inputs["input_ids"]).logits.float()
    flat, labels = logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(flat, labels, reduction="sum", ignore_index=IGNORED)
    (loss * weight).backward()
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def labels_in(inputs: Mapping[str, Tensor]) -> int:
    return int((inputs["labels"][:, 1:] != IGNORED).sum())


def decayed(name: str) -> bool:
    """Return whether the Trainer decays a parameter of a Llama: all except for biases and norms."""
    return not (name.endswith("bias") or "norm" in name)


@contextmanager
def fresh(*, fsdp: bool = False) -> Iterator[None]:
    """Restore the globals and the environment in which Accelerate and transformers keep the last configuration.

    With ``fsdp`` the ranks count as GPUs: Accelerate shards on accelerators alone.
    """
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import DistributedType
    from transformers import training_args
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before = dict(os.environ)
    # Accelerate knows DeepSpeed on accelerators alone: without one, it takes every rank for the only one.
    # So does the Trainer bf16.
    prepare_backend, has_bf16 = PartialState._prepare_backend, training_args.is_torch_bf16_gpu_available
    if torch.distributed.is_initialized() and not torch.cuda.is_available():
        PartialState._prepare_backend = lambda self, *args, **kwargs: (
            "gloo",
            DistributedType.MULTI_GPU if fsdp else DistributedType.MULTI_CPU,
        )
        training_args.is_torch_bf16_gpu_available = lambda: True
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    try:
        yield
    finally:
        PartialState._prepare_backend, training_args.is_torch_bf16_gpu_available = prepare_backend, has_bf16
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        unset_hf_deepspeed_config()
        for key in set(os.environ) - set(before):
            del os.environ[key]
        os.environ.update(before)


def deepspeed_config(stage: int, optimizer: str | None = None, **more: Any) -> dict[str, Any]:
    """Return a JSON as users of the Trainer write it."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 500},
        "steps_per_print": 10**9,
    }
    if stage == 3:
        config["zero_optimization"] |= {"stage3_param_persistence_threshold": 0}
    if optimizer:
        config["optimizer"] = {"type": optimizer, "params": {"lr": "auto", "weight_decay": "auto", "gamma": 0.1}}
    return config | more


@dataclass(frozen=True)
class Case:
    """One way to train with the Trainer.

    Attributes:
        stage: ZeRO stage; None for no DeepSpeed: DDP, FSDP2, or one process.
        entry: how the optimizer gets there: class, factory, json.
        optimizer: its name.
        dtype: of the Trainer's and DeepSpeed's mixed precision: fp32, bf16, fp16.
        clip: ``max_grad_norm``.
        counts: whether the Trainer divides by the tokens of the window; else each micro-batch is a mean of its own.
        accumulation: micro-batches per step.
        mixin: whether the Trainer has :class:`~ds_vrgd.hf.VRTrainerMixin`.
        config: further keys of the DeepSpeed JSON.
        arguments: further ``TrainingArguments``.
        fsdp: the ``fsdp_config`` of FSDP2; None for none.
    """

    stage: int | None
    entry: str = "class"
    optimizer: str = "VRLAMB"
    dtype: str = "fp32"
    clip: float = 0.0
    counts: bool = True
    accumulation: int = 3
    mixin: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    fsdp: Mapping[str, Any] | None = None


@dataclass
class Result:
    """The result of a case, on rank 0.

    Attributes:
        error: |theta - theta_ref| / |theta_ref|, of the fp32 (master) weights.
        moved: |theta_ref - theta_0| / |theta_ref|.
        log: the Trainer's ``log_history``.
        k: chunks of the last step.
        tokens: labels in each chunk of the first step.
        groups: of the optimizer, without the parameters.
        names: of the layers that ``gsnr_stats`` reports.
    """

    error: float
    moved: float
    log: list[dict[str, Any]]
    k: int
    tokens: list[int]
    groups: list[dict[str, Any]]
    names: set[str]


STEPS, WARMUP = 5, 2


def scheduled(step: int) -> float:
    """Return the rate of the Trainer's "linear" schedule with warm-up, at a step from 0."""
    return LR * (step / WARMUP if step < WARMUP else (STEPS - step) / (STEPS - WARMUP))


def training_arguments(case: Case, output: Path, **more: Any) -> Any:
    from transformers import TrainingArguments

    told: dict[str, Any] = {
        "output_dir": str(output),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": case.accumulation,
        "max_steps": STEPS,
        "learning_rate": LR,
        "weight_decay": DECAY,
        "max_grad_norm": case.clip,
        "lr_scheduler_type": "linear",
        "warmup_steps": WARMUP,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "log_level": "error",
        "bf16": case.dtype == "bf16",
        "fp16": case.dtype == "fp16",
    }
    if case.fsdp is not None:
        told |= {"fsdp": True, "fsdp_config": {"version": 2, **case.fsdp}}
        told["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    elif case.stage is None:
        told["use_cpu"] = not torch.cuda.is_available()
    else:
        named = case.optimizer if case.entry == "json" else None
        told["deepspeed"] = deepspeed_config(case.stage, named, **case.config)
    return TrainingArguments(**told | dict(case.arguments) | more)


def make_trainer(case: Case, output: Path, *, model: Any = None, base: Any = None, **more: Any) -> Any:
    """Return a Trainer that is ready; ``base`` may be a subclass of the Trainer."""
    from transformers import Trainer

    from ds_vrgd.hf import GSNRCallback, VRTrainerMixin

    made = getattr(ds_vrgd, case.optimizer)
    given: Any = {
        "class": (made, {"gamma": 0.1} | ({} if case.mixin else {"lr": LR})),
        "factory": (functools.partial(made, gamma=0.1), {}),
        "json": None,
    }[case.entry]
    base = base or Trainer
    cls = type("VRTrainer", (VRTrainerMixin, base), {}) if case.mixin else base
    trainer = cls(
        model=model or make_model(),
        args=training_arguments(case, output, **more),
        train_dataset=Corpus(),
        optimizer_cls_and_kwargs=given,
    )
    trainer.model_accepts_loss_kwargs = case.counts
    trainer.add_callback(GSNRCallback(trainer))
    return trainer


def weights_of(trainer: Any) -> dict[str, Tensor]:
    """Return the model's weights in its own dtype, whole; a collective under DeepSpeed."""
    if not trainer.is_deepspeed_enabled:
        params = {name: param.detach() for name, param in trainer.model.named_parameters()}
        return {
            name: (param.full_tensor() if hasattr(param, "full_tensor") else param).cpu().clone()
            for name, param in params.items()
        }
    with whole_weights(trainer.model_wrapped) as weights:
        return {name: weight.detach().cpu().clone() for name, weight in weights.items()}


def recording() -> Any:
    """Return a Trainer class that takes a step of the reference after each window."""
    from transformers import Trainer

    class Recording(Trainer):  # type: ignore[misc]
        case: Case

        def begin(self, case: Case) -> None:
            self.case, self.window, self.steps, self.tokens = case, [], 0, []
            self.plain = make_model().to(DTYPES[case.dtype] if case.stage is not None else torch.float32)
            self.start = {name: param.detach().double().clone() for name, param in self.plain.named_parameters()}
            names = list(self.start)
            vectors: dict[str, Any] = {"params": [name for name in names if not decayed(name)], "weight_decay": 0.0}
            if case.mixin and case.optimizer in ADAPTIVE:
                vectors["adapt"] = False
            groups = [{"params": [name for name in names if decayed(name)]}, vectors]
            self.reference = DenseOptimizer(case.optimizer, self.start, groups, lr=LR, weight_decay=DECAY, gamma=0.1)

        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if not self.window:
                self.plain.load_state_dict(weights_of(self), strict=False)
                self.scale = float(getattr(self.optimizer.optimizer, "loss_scale", 1.0))
            self.window.append({name: value.cpu() for name, value in inputs.items()})
            loss = super().training_step(model, inputs, num_items_in_batch)
            if self.accelerator.sync_gradients:  # the last window of an epoch may be shorter
                self.follow()
                self.window = []
            return loss

        def follow(self) -> None:
            everyone: list[Any] = [self.window]
            if torch.distributed.is_initialized():
                everyone = [None] * torch.distributed.get_world_size()
                torch.distributed.all_gather_object(everyone, self.window)
            counts = [[labels_in(inputs) for inputs in window] for window in everyone]
            of_all = [count for of_rank in counts for count in of_rank]
            self.tokens = self.tokens or of_all
            together = [of_all if self.args.average_tokens_across_devices else of_rank for of_rank in counts]
            chunks = [self.chunk(each, of) for window, of in zip(everyone, together, strict=True) for each in window]
            for group in self.reference.groups:
                group["lr"] = scheduled(self.steps)
            self.steps += 1
            self.reference.step(chunks, clip=self.case.clip)

        def chunk(self, inputs: Any, counts: list[int]) -> dict[str, Tensor]:
            """Return a chunk gradient. Their mean is that of the mean over all tokens, or over the chunks' means.

            ``counts`` are the tokens of all chunks whose tokens are counted together.
            """
            k = len(counts)
            if self.case.dtype == "fp32":
                weight = k / sum(counts) if self.case.counts else 1.0 / labels_in(inputs)
                return chunk_gradients(self.plain, inputs, weight)
            # Half precision rounds what it is given: the loss must be the Trainer's own, bit for bit.
            world = k // len(self.window)
            self.plain.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if self.case.stage is None else nullcontext():
                loss = self.plain(**inputs, num_items_in_batch=torch.tensor(sum(counts))).loss
            (loss * world * self.scale).backward()
            factor = len(self.window) / self.scale
            return {n: p.grad.double() * factor for n, p in self.plain.named_parameters() if p.grad is not None}

    return Recording


def follow_noise(trainer: Any, since: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return the Trainer's GSNRCallback, and a meter that sees each step with the samples that its chunks really have.

    ``since`` is that meter's state so far.
    """
    from transformers import TrainerCallback

    from ds_vrgd.hf import GSNRCallback

    meter, step, samples = ds_vrgd.NoiseScaleMeter(), trainer.training_step, []
    if since is not None:
        meter.load_state_dict(since)

    def counted(model: Any, inputs: Any, *rest: Any) -> Any:
        samples.append(len(inputs["input_ids"]))
        return step(model, inputs, *rest)

    class Counts(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            optimizer = find_optimizer(trainer.optimizer)
            if not optimizer.overflow:
                k = ds_vrgd.gsnr_stats(optimizer).k
                meter.update(optimizer, sum(samples) * trainer.accelerator.num_processes / k)
            samples.clear()

    trainer.training_step = counted
    trainer.add_callback(Counts())
    return next(one for one in trainer.callback_handler.callbacks if isinstance(one, GSNRCallback)), meter


def run_case(case: Case, output: Path) -> Result:
    """Train with the Trainer and the reference, and compare."""
    with fresh(fsdp=case.fsdp is not None):
        trainer = make_trainer(case, output, base=recording())
        trainer.begin(case)
        trainer.train()
        reference, start = trainer.reference, trainer.start
        assert trainer.steps == trainer.state.global_step == STEPS
        if trainer.is_deepspeed_enabled:
            masters = master_weights(trainer.model_wrapped)
        else:
            masters = {name: weight.flatten() for name, weight in weights_of(trainer).items()}
        optimizer = find_optimizer(trainer.optimizer)
        moved = norm_of([reference.params[name] - start[name] for name in start])
        stats = ds_vrgd.gsnr_stats(optimizer)
        result = Result(
            relative_error(masters, reference),
            moved / norm_of(list(reference.params.values())),
            trainer.state.log_history,
            stats.k,
            trainer.tokens,
            [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups],
            set(stats.layers),
        )
        if trainer.is_deepspeed_enabled:
            trainer.model_wrapped.destroy()
        return result


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns; an error, which all ranks share, as its text."""
    try:
        return function(*arguments)
    except Exception as error:
        where = "".join(traceback.format_exception(error, limit=-3))
        return f"{type(error).__name__}: {error}\n\n{where}"
