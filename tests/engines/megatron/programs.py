"""Random programs under Megatron-Core, for ``test_random.py``: each step against the dense reference.

Losses are linear in the weights, so that every micro-batch's gradient is known without a look into Megatron-Core's
buffers. Where ranks are tensor- or pipeline-parallel, and in some windows elsewhere, Megatron-Core's schedule runs the
model itself, and the chunks are what the buffers hold when they are reduced.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

import ds_vrgd
from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.noise import clamped_by_noise
from ds_vrgd.optim import OPTIMIZERS
from tests.engines.megatron.cases import Case
from tests.engines.megatron.lifecycle import end_writer, load, message_of, save
from tests.engines.megatron.training import (
    LENGTH,
    SAMPLES,
    VOCABULARY,
    Run,
    _forward,
    build,
    initialize,
    joined,
    recorded,
    reduced,
    weights,
)  # fmt: skip
from tests.support.ranks import DEVICE
from tests.support.trajectory import noise_error

STEPS = 4
OF_WEIGHTS = 8e-7
OF_NOISE = 1e-5  # of two chunks, some layers' all but agree
GROUPS = ("*word_embeddings.weight", "*linear_fc1.weight", "*layernorm.weight")
FROZEN = ("*position_embeddings.weight", "*layers.0.*", "*.bias")
Chunk = dict[str, Tensor]


def drawn(draw: random.Random, tensor: int, pipeline: int) -> Case:
    """Return a configuration that is supported."""
    vr, ranks = [name for name in OPTIMIZERS if name.startswith("VR")], dist.get_world_size() // (tensor * pipeline)
    name = draw.choice([*OPTIMIZERS, *vr])
    dtype = draw.choice(("fp32", "fp32", "bf16", "bf16", "fp16"))
    sharded, overlap = draw.random() < 0.65, draw.random() < 0.5
    ddp = {
        "use_distributed_optimizer": sharded, "overlap_grad_reduce": overlap,
        "overlap_param_gather": sharded and overlap and draw.random() < 0.5,
        "grad_reduce_in_fp32": draw.random() < 0.4, "bucket_size": draw.choice((100, 700, 2000)),
        "average_in_collective": draw.random() < 0.3,
    }  # fmt: skip
    config: dict[str, Any] = {"clip_grad": draw.choice((0.0, 0.0, 0.3, 30.0))}
    if dtype == "fp16":
        config |= {"initial_loss_scale": 64.0, "hysteresis": 1}
    elif draw.random() < 0.2 and (sharded or dtype == "bf16"):
        config["loss_scale"] = 32.0
    arguments: dict[str, Any] = {}
    if name in vr and draw.random() < 0.15:
        arguments["gamma"] = 1.0
    if name.endswith("LAMB") and draw.random() < 0.3:
        arguments["prenormalize"] = True
    if draw.random() < 0.1 and ranks > 1:
        arguments["watch"] = "log"
    overrides = {}
    if draw.random() < 0.6:
        given: dict[str, Any] = {"max_lr": draw.choice((1e-2, 3e-2)), "min_lr": 1e-3}
        if name in vr and "gamma" not in arguments:
            given["gamma"] = draw.choice((0.05, 0.3))
        pattern = draw.choice(GROUPS)
        chosen = {key: value for key, value in given.items() if draw.random() < 0.7}
        if pattern != GROUPS[-1] and draw.random() < 0.5:
            chosen["wd_mult"] = 0.5
        overrides = {pattern: chosen} if chosen else {}
    frozen = tuple(pattern for pattern in FROZEN if draw.random() < 0.12)
    tied = pipeline == 1 and draw.random() < 0.3
    return Case(name, dtype, draw.randint(1, 3), tensor, pipeline, ddp, config, {}, tied, arguments, overrides, frozen)


class Program:
    """A training drawn by ``seed``, with the optimizer beside the reference.

    Attributes:
        draw: the same on all ranks.
        own: noise of this data-parallel rank.
        history: the names of what was done, for a failure's message.
        chunk: what this rank's buffers should hold in the open window, in their dtype.
        factor: by what the rates of the next step differ from the schedule's.
    """

    def __init__(self, seed: int, folder: str, mine: dict[Tensor, Tensor], tensor: int = 1, pipeline: int = 1) -> None:
        self.draw, self.folder, self.mine = random.Random(seed), folder, mine
        self.rank, self.ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.common, self.own = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7 * seed + self.rank)
        self.case = drawn(self.draw, tensor, pipeline)
        self.history = [str(self.case)]
        self.linear = tensor == pipeline == 1
        self.run = build(self.case)
        self.chunk: dict[Tensor, Tensor] = {}
        self.steps, self.factor = 0, {"lr": 1.0, "weight_decay": 1.0}
        self.saved: tuple[str, str, DenseOptimizer, int] | None = None
        self.reference = self.make_reference()

    def make_reference(self) -> DenseOptimizer:
        """Return a reference that begins with the weights as they are: a group for every layer."""
        start = weights(self.run)
        return DenseOptimizer(
            self.case.optimizer, start, [{"params": [name], **self.options(name, start[name])} for name in start],
            **{key: value for key, value in self.case.hyper().items() if key != "watch"},
        )  # fmt: skip

    def overrides(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pattern, given in self.case.overrides.items():
            found |= given if fnmatch(name, pattern) else {}
        return found

    def options(self, name: str, weight: Tensor) -> dict[str, Any]:
        """Return the options of a layer apart from the rates."""
        is_vector = weight.dim() == 1 or name.endswith(".bias")
        own = {key: value for key, value in self.overrides(name).items() if key == "gamma"}
        return (self.case.of_vectors if is_vector else {}) | own

    def set_rates(self) -> None:
        """Give the reference the rates that Megatron-Core's schedule should have set."""
        done = min(self.steps, 10) / 10
        for group in self.reference.groups:
            (name,) = group["params"]
            own, hyper = self.overrides(name), self.case.hyper()
            high, low = own.get("max_lr", hyper["lr"]), own.get("min_lr", hyper["lr"] / 2)
            is_vector = self.reference.params[name].dim() == 1 or name.endswith(".bias")
            decays = 0.0 if is_vector else own.get("wd_mult", 1.0)
            group["lr"] = (low + (high - low) * (1.0 - done)) * self.factor["lr"]
            group["weight_decay"] = hyper.get("weight_decay", 0.0) * decays * self.factor["weight_decay"]

    # -- what the configuration means ----------------------------------------------------------------------------------

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.run.optimizer.param_groups  # type: ignore[no-any-return]

    @property
    def observed(self) -> bool:
        """Return whether the chunks are observed: gamma was below 1 at the start."""
        return self.case.optimizer.startswith("VR") and self.case.arguments.get("gamma") != 1.0

    @property
    def reduces(self) -> bool:
        """Return whether the next step reduces variance."""
        return self.observed and any(group["gamma"] < 1.0 for group in self.groups)

    @property
    def is_half(self) -> bool:
        return next(iter(self.run.names)).main_grad.itemsize < 4  # type: ignore[attr-defined]

    @property
    def exchanges(self) -> bool:
        """Return whether the exchange takes the place of Megatron-Core's reduction."""
        takes_mean = self.case.optimizer in ("LARS", "LAMB", "VRLARS", "VRLAMB") and self.is_half
        return self.observed or takes_mean or "watch" in self.case.arguments

    @property
    def overlap(self) -> bool:
        return bool(self.run.model.ddp_config.overlap_grad_reduce)

    @property
    def first_batch(self) -> bool:
        return any(group.is_first_batch for group in self.run.model.bucket_groups)

    # -- a window --------------------------------------------------------------------------------------------------

    def zero(self) -> None:
        """Begin a window, or begin it again."""
        self.run.model.zero_grad_buffer()
        self.run.optimizer.zero_grad()
        self.chunk = {param: torch.zeros_like(param.main_grad) for param in self.run.names}  # type: ignore[attr-defined]

    def backward(self, used: list[Tensor], bad: Tensor | None, raises: Tensor | None = None) -> None:
        """Run a micro-batch through layers, with a value that is not finite or an error in one of them."""
        terms, scale = [], float(self.run.optimizer.get_loss_scale())
        for param in used:
            grad = torch.randn(param.shape, generator=self.own)
            grad += torch.full(param.shape, 0.5)
            if param is bad:
                grad.view(-1)[0] = torch.nan if param.dim() == 1 else torch.inf
            grad = (grad * 0.1 * scale).to(param)
            product = param * grad
            if param is raises:
                product.register_hook(_raise)
            terms.append(product.sum())
            self.chunk[param].add_(grad)
        torch.stack(terms).sum().backward()

    def linear_window(self) -> None:
        self.zero()
        names, count = list(self.run.names), self.draw.randint(1, 4)
        bad_rank = self.draw.randrange(self.ranks) if self.can_skip() and self.draw.random() < 0.15 else None
        bad_layer, bad_at = self.draw.choice(names), self.draw.randrange(count)
        raises = self.draw.random() < 0.1 and self.exchanges and not (self.overlap and self.first_batch)
        thrown = self.draw.randrange(count) if self.draw.random() < 0.2 else None
        uneven = not self.overlap and self.draw.random() < 0.15
        self.history.append(f"{count} micro-batches" + f", bad on {bad_rank} at {bad_at}" * (bad_rank is not None)
                            + f", thrown at {thrown}" * (thrown is not None) + ", uneven" * uneven)  # fmt: skip
        for index in range(count):
            if index == thrown:
                self.zero()
            if raises and index == count - 1:
                self.history.append("raised")
                assert "broke off" in message_of(partial(self.backward, names, None, self.draw.choice(names)))
                self.zero()
            is_last = index == count - 1
            used = names if (is_last and self.overlap) or self.draw.random() < 0.6 else self.draw.sample(names, 5)
            alone = not is_last and (self.overlap or self.draw.random() < 0.5)
            if uneven and self.rank == index % self.ranks:
                continue
            bad = (
                bad_layer
                if bad_rank == self.rank and index == bad_at and any(param is bad_layer for param in used)
                else None
            )
            if alone:
                with self.run.model.no_sync():
                    self.backward(used, bad)
            else:
                self.backward(used, bad)
        if self.draw.random() < 0.15 and not self.overlap:
            param = self.draw.choice(names)
            self.history.append(f"edited on rank 0: {self.run.names[param]}")
            if self.rank == 0:
                param.main_grad.mul_(2.0)  # type: ignore[attr-defined]
                self.chunk[param].mul_(2.0)
        if (
            self.reduces
            and bad_rank is None
            and not (self.overlap and not self.first_batch)
            and self.draw.random() < 0.1
        ):
            self.expect("k = 0")
            self.linear_window()  # a step that was refused may have scaled the buffers
            return
        self.run.model.finish_grad_sync()
        if self.draw.random() < 0.1:
            self.history.append("thrown after the reduction")
            self.zero()
            self.backward(names, None)
            self.run.model.finish_grad_sync()

    def expect(self, message: str) -> None:
        """Step where it is an error."""
        self.history.append(f"expect {message}")
        found = message_of(self.run.optimizer.step)
        assert message in found, f"{message!r} is not in {found!r}"

    def scheduled_window(self) -> None:
        """Run Megatron-Core's schedule, sometimes with a gradient that is not finite."""
        bad_rank = self.draw.randrange(self.ranks) if self.can_skip() and self.draw.random() < 0.15 else None
        param = random.Random(self.draw.random()).choice(list(self.run.names))  # stages have unequally many
        self.history.append("schedule" + f", bad on {bad_rank}" * (bad_rank is not None))
        handle = param.register_hook(lambda grad: grad * torch.nan) if bad_rank == self.rank else None
        self.run.window(self.draw.randrange(1000))
        if handle:
            handle.remove()
        self.chunk = {param: self.mine[param] for param in self.run.names}

    def can_skip(self) -> bool:
        """Return whether a gradient that is not finite is found; elsewhere it reaches the weights, as with Adam."""
        return self.reduces or getattr(self.run.wrapper, "grad_scaler", None) is not None

    # -- a step ------------------------------------------------------------------------------------------------------

    def edit(self) -> list[str]:
        """Scale reduced gradients on all ranks, and return the layers' names."""
        names = dict(self.run.names)
        chosen = self.draw.sample(list(names), 2)
        factor = self.draw.choice((0.5, 3.0))
        for param in chosen:
            param.main_grad.mul_(factor)  # type: ignore[attr-defined]
        self.history.append(f"edited {[names[param] for param in chosen]}")
        return [names[param] for param in chosen]

    def step(self) -> None:
        """Run a window and a step with the optimizer and with the reference."""
        self.mix_gammas()
        if self.linear and self.draw.random() < 0.75:
            self.linear_window()
        else:
            self.scheduled_window()
        edited = self.edit() if self.linear and self.draw.random() < 0.2 else []
        scale = float(self.run.optimizer.get_loss_scale())
        chunks = joined(self.run, {param: grad.double() / scale for param, grad in self.chunk.items()})
        held = {name: grad / scale for name, grad in reduced(self.run).items()}
        rounded = self.is_half and not self.exchanges
        mean = {
            name: held[name] if rounded or name in edited else torch.stack([chunk[name] for chunk in chunks]).mean(0)
            for name in held
        }
        finite = all(bool(chunk[name].isfinite().all()) for chunk in chunks for name in chunk)
        self.change_rates()
        self.set_rates()
        if finite:
            self.reference.step(chunks, clip=self.case.config["clip_grad"], mean=mean)
        success = self.run.step()
        assert success == finite, f"step() returns {success}"
        if finite:
            self.steps, self.factor = self.steps + 1, {"lr": 1.0, "weight_decay": 1.0}
            if self.reduces:
                self.check_statistics(chunks)
        self.check_weights()
        if self.reduces and finite and self.draw.random() < 0.05:
            self.expect("k = 0")

    def check_weights(self) -> None:
        found, right = weights(self.run), self.reference.params
        errors = {name: norm_of([found[name] - right[name]]) / max(norm_of([right[name]]), 1e-30) for name in right}
        error = norm_of([found[name] - right[name] for name in right]) / norm_of(list(right.values()))
        worst = max(errors, key=lambda name: errors[name])
        assert error <= OF_WEIGHTS, f"weights {error:.1e}; {worst} {errors[worst]:.1e}"
        for param in self.run.names:
            alike = [torch.empty_like(param) for _ in range(self.ranks)]
            dist.all_gather(alike, param.detach(), group=parallel_state.get_data_parallel_group())
            assert all(torch.equal(alike[0], other) for other in alike), f"ranks differ in {self.run.names[param]}"

    def check_statistics(self, chunks: list[Chunk]) -> None:
        stats = ds_vrgd.gsnr_stats(self.run.optimizer)
        assert stats.k == self.ranks, stats.k
        assert set(stats.layers) == set(self.reference.params), set(stats.layers) ^ set(self.reference.params)
        for group in self.reference.groups:
            (name,) = group["params"]
            of_noise, _ = clamped_by_noise(self.ranks, group["gamma"]) or (None, None)
            assert stats.layers[name].noise_low == of_noise, f"{name} has another layer's gamma in the statistics"
            low = float((self.reference.last_ratio[name] == group["gamma"]).double().mean())
            assert abs(stats.layers[name].clamped_low - low) <= 2.5 / self.reference.params[name].numel(), (
                f"{name}: {stats.layers[name].clamped_low} clamped to gamma, and not {low}"
            )
        if all(any(chunk[name].any() for chunk in chunks) for name in chunks[0]):
            varied = all(float(torch.stack([c[name] for c in chunks]).var(0).sum()) > 0 for name in chunks[0])
            if varied:
                noise = noise_error(ds_vrgd.noise.gradient_noise(self.run.optimizer, 4), chunks, 4)
                assert noise <= OF_NOISE, f"noise {noise:.1e}"

    # -- between the steps -----------------------------------------------------------------------------------------

    def change_rates(self) -> None:
        for key in ("lr", "weight_decay"):
            if self.draw.random() < 0.15:
                self.history.append(f"halve {key}")
                self.factor[key] *= 0.5
                for group in self.groups:
                    group[key] *= 0.5

    def change_gamma(self) -> None:
        """Set gamma for all groups, perhaps to 1, which turns GSNR off until it is lowered."""
        gamma = self.draw.choice((0.05, 0.2, 1.0))
        self.history.append(f"gamma {gamma}")
        for group in [*self.groups, *self.reference.groups]:
            group["gamma"] = gamma

    def mix_gammas(self) -> None:
        """Set gamma to 1 in some groups alone, which is refused, and undo it."""
        gammas = [group["gamma"] for group in self.groups]
        if self.observed and len(gammas) > 1 and max(gammas) < 1.0 and self.draw.random() < 0.1:
            self.run.window(0)
            self.groups[self.draw.randrange(len(gammas))]["gamma"] = 1.0
            self.expect("gamma is 1.0 in some param groups")
            for group, gamma in zip(self.groups, gammas, strict=True):
                group["gamma"] = gamma

    def save(self) -> None:
        sharded = self.case.ddp["use_distributed_optimizer"]
        whole, parts = ("fully_reshardable", "dp_reshardable") if sharded else ("unsharded", "state_dict")
        # dist_checkpointing has one tensor of the states of all layers, and misses those of one that is frozen.
        way = parts if "*layers.0.*" in self.case.frozen else self.draw.choice((whole, parts))
        self.history.append(f"save {way}")
        folder = f"{self.folder}-{len(self.history)}"
        if way == "state_dict":
            state = {"model": self.run.model.state_dict(), "optimizer": self.run.optimizer.state_dict()}
            torch.save(state, f"{folder}-{dist.get_rank()}.pt")
        else:
            save(self.run, way, folder)
        self.saved = way, folder, copy.deepcopy(self.reference), self.steps

    def load(self, run: Run) -> None:
        assert self.saved is not None
        way, folder, reference, self.steps = self.saved
        if way == "state_dict":
            found = torch.load(f"{folder}-{dist.get_rank()}.pt", weights_only=False)
            run.model.load_state_dict(found["model"])
            run.optimizer.load_state_dict(found["optimizer"])
        else:
            load(run, way, folder)
        self.run, self.reference = run, copy.deepcopy(reference)
        self.factor = {"lr": 1.0, "weight_decay": 1.0}  # the schedule sets them anew
        run.schedule.num_steps = self.steps
        run.schedule.step(0)
        gammas = {group["gamma"] for group in self.reference.groups}
        for group in run.optimizer.param_groups if gammas == {1.0} else ():
            group["gamma"] = 1.0  # whether GSNR is on is no checkpoint's choice

    def resume(self) -> None:
        """Go on with a new model and optimizer, perhaps with other buckets."""
        self.save()
        assert self.saved is not None
        if self.saved[0] != "dp_reshardable" and self.draw.random() < 0.5:
            self.case = replace(self.case, ddp={**self.case.ddp, "bucket_size": self.draw.choice((100, 5000))})
        self.history.append("resume")
        self.load(build(self.case))

    def roll_back(self) -> None:
        if self.saved is not None:
            self.history.append("roll back")
            for group in self.groups if self.observed and not self.reduces else ():
                group["gamma"] = 0.5  # where GSNR is off, the averages of the checkpoint would be dropped
            self.load(self.run)

    def evaluate(self) -> None:
        self.history.append("evaluate")
        tokens = torch.randint(VOCABULARY, (1, SAMPLES, LENGTH + 1), generator=self.common)
        self.run.model.eval()
        get_forward_backward_func()(
            forward_step_func=_forward, data_iterator=iter(tokens.to(DEVICE)), model=[self.run.model],
            num_microbatches=1, seq_length=LENGTH, micro_batch_size=SAMPLES, forward_only=True,
        )  # fmt: skip
        self.run.model.train()

    def train(self) -> None:
        for step in range(STEPS):
            if step:
                for chance, action in ((0.12, self.resume), (0.15, self.roll_back), (0.2, self.evaluate)):
                    if self.draw.random() < chance:
                        action()
                if self.observed and self.draw.random() < 0.2:
                    self.change_gamma()
                if self.saved is None and self.draw.random() < 0.1:
                    self.save()
            self.step()
        self.run.optimizer.optimizer.observer.detach()


def _raise(grad: Tensor) -> None:
    raise RuntimeError("broke off")


def run_programs(rank: int, seeds: Sequence[int], folder: str, tensor: int = 1, pipeline: int = 1) -> dict[int, str]:
    """Run the programs of ``seeds`` in one process, and return what was wrong in those that failed."""
    logging.getLogger("ds_vrgd").setLevel("ERROR")
    warnings.simplefilter("ignore")
    initialize(tensor, pipeline)
    failed: dict[int, str] = {}
    with recorded() as mine:
        for seed in seeds:
            program = Program(seed, f"{folder}/{seed}", mine, tensor, pipeline)
            try:
                program.train()
            except AssertionError as error:  # on all ranks
                failed[seed] = "\n".join([f"{error}", *program.history])
            except Exception as error:  # perhaps on one rank, for which the others would wait
                raise RuntimeError("\n".join([f"seed {seed}", *program.history])) from error
            program.run.optimizer.optimizer.observer.detach()
    end_writer()
    return failed
