"""Random programs under FSDP2, each step against the dense reference.

They are those of ``tests/optim/test_random.py`` for sharded models: what is sharded, how, and what programs do between
``backward()`` and ``step()`` comes together as nobody thought of it. Losses are linear in the weights, so that the
gradient of every chunk is known, and every rank knows the chunks of all.
"""

from __future__ import annotations

import copy
import random
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import ds_vrgd
from ds_vrgd.doctor.chunks import norm_of
from ds_vrgd.doctor.reference import DenseOptimizer
from ds_vrgd.moments import is_dtensor, local
from ds_vrgd.optim import OPTIMIZERS
from tests.support.model import OutOfMemory
from tests.support.ranks import DEVICE, run_on_ranks
from tests.support.trajectory import ADAPTIVE

PROGRAMS, MORE_PROGRAMS, STEPS = 16, 200, 5
BOUND = 8e-7  # norm-wise, of the weights, as everywhere
SHAPES = [(3, 4), (7,), (2, 3, 2), (1,), (11, 1), (1, 5), (4,)]
RATES = {"VRSGD": 0.02, "VRMomentum": 0.01, "VRLARS": 0.5, "LARS": 0.5}
#: (replicas, shards) of a world.
MESHES = {2: [(1, 2)] * 4 + [None] * 12, 3: [None], 4: [(2, 2), (2, 2), None]}
#: (param_dtype, reduce_dtype)
POLICIES = [(None, None), (None, None), (torch.bfloat16, None), (torch.bfloat16, torch.float32), (None, torch.bfloat16)]
Gradients = dict[str, list[Tensor]]  # by name, of every rank


class Block(nn.Module):
    """Weights of their own, and perhaps a block inside: each adds ``(weight * signal).sum()`` to a running loss."""

    def __init__(self, how: str | None = None, inner: Block | None = None) -> None:
        super().__init__()
        self.how, self.inner, self.fails = how, inner, False

    def forward(self, loss: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        for name, weight in self.named_parameters(recurse=False):
            if name in signals:
                loss = loss + (weight * signals[name]).sum()
        if self.inner is not None and self.inner.is_used(signals):
            loss = self.inner(loss, signals)
        return OutOfMemory.apply(loss) if self.fails else loss  # type: ignore[no-any-return]

    def is_used(self, signals: Mapping[str, Tensor]) -> bool:
        return any(name.rpartition(".")[2] in signals for name, _ in self.named_parameters(remove_duplicate=False))


class Model(Block):
    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.whole: set[int] = set()  # blocks that run together: FSDP2 waits for all of a unit

    def forward(self, loss: Tensor, signals: Mapping[str, Tensor]) -> Tensor:
        loss = super().forward(loss, signals)
        together = any(self.blocks[index].is_used(signals) for index in self.whole)
        for index, block in enumerate(self.blocks):
            if block.is_used(signals) or (together and index in self.whole):
                if block.how:
                    loss = checkpoint(block, loss, signals, use_reentrant=block.how == "reentrant")
                else:
                    loss = block(loss, signals)
        return loss


def halve(param: Any) -> None:
    local(param.grad).mul_(0.5)


class Program:
    """A training drawn by ``seed``: its model, and the optimizer beside the reference.

    Attributes:
        passes: of the open window, each with the gradients by name that still count.
        mean: what ``.grad`` should hold, by name; no entry for None.
        pending: what FSDP2 has not reduced yet, in the dtype of the wire.
        partial: what it has not reduced over the copies of the shards.
        awake: names whose unit has run: from then on FSDP2 reduces zeros where they take no part.
    """

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.folder, self.seed, self.rank, self.world = folder, seed, dist.get_rank(), dist.get_world_size()
        self.log: list[str] = []
        self.draw_model()
        self.draw_optimizer()
        self.model, self.optimizer = self.build()
        self.reference = DenseOptimizer(self.kind, self.weights, copy.deepcopy(self.groups), **self.arguments)
        self.awake: set[str] = set()
        self.begin_window()

    # -- what is trained ----------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        return self.draw.random() < probability

    def normal(self, shape: Any) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def draw_model(self) -> None:
        """Draw the modules, which of them are units, and how."""
        mesh = self.draw.choice(MESHES[self.world])
        self.mesh = mesh or (self.world,)
        self.shards = self.mesh[-1]
        self.param_dtype, self.reduce_dtype = self.draw.choice(POLICIES)
        self.wire = self.reduce_dtype or self.param_dtype or torch.float32
        self.reshard = self.chance(0.6)
        if self.world == 4 and mesh is None and self.chance(0.3):
            self.reshard = 2  # ranks that share what a forward pass leaves
        self.reshards_after_backward = self.chance(0.85)
        self.offload = self.chance(0.15)
        self.divisor = self.draw.choice((None, None, None, 1.0, 2.0, 3.0))
        self.force_sum = self.chance(0.15)
        blocks = self.draw.randint(1, 4)
        hows = (None, None, None, "reentrant", "non-reentrant")
        self.hows = [self.draw.choice(hows) for _ in range(blocks)]
        self.loss_has_grad = "reentrant" in self.hows or self.chance(0.5)
        self.inner = [self.chance(0.3) for _ in range(blocks)]
        self.units = [self.chance(0.6) for _ in range(blocks)]
        self.inner_units = [self.chance(0.5) for _ in range(blocks)]
        self.together: list[int] = []
        if blocks > 2 and self.chance(0.2):  # one unit of several modules
            self.together = [0, 1]
            self.units[0] = self.units[1] = False
            self.hows[0] = self.hows[1] = None
        self.tied = blocks > 1 and not self.units[0] and not self.units[-1] and self.chance(0.5) and (
            not self.together or blocks == 2)  # fmt: skip
        owners = ["root", *(f"blocks.{i}" for i in range(blocks)), *(f"blocks.{i}.inner" for i in range(blocks))]
        self.shapes: dict[str, tuple[int, ...]] = {}
        for owner in owners:
            index = int(owner.split(".")[1]) if owner != "root" else 0
            if owner.endswith("inner") and not self.inner[index]:
                continue
            for _ in range(self.draw.randint(0 if owner == "root" else 1, 3)):
                name = f"w{len(self.shapes)}"
                self.shapes[name if owner == "root" else f"{owner}.{name}"] = self.draw.choice(SHAPES)
        self.weights = {name: self.normal(shape) for name, shape in self.shapes.items()}
        self.names = list(self.shapes)
        self.frozen = {name for name in self.names[1:] if self.chance(0.1)}

    def draw_optimizer(self) -> None:
        self.kind = self.draw.choice(list(OPTIMIZERS))
        names = self.draw.sample(self.names, len(self.names))
        cut = self.draw.randint(0, len(names))
        self.groups: list[dict[str, Any]] = [{"params": part} for part in (names[:cut], names[cut:]) if part]
        off = self.chance(0.15)
        for group in self.groups:
            if self.kind.startswith("VR"):
                group["gamma"] = 1.0 if off else self.draw.choice((0.1, 0.1, 0.3, 1.0))
            if self.kind in ADAPTIVE and self.chance(0.3):
                group["adapt"] = False
        self.observed = {name for group in self.groups if group.get("gamma", 1.0) < 1.0 for name in group["params"]}
        self.attached = bool(self.observed) or self.wire == torch.bfloat16 or self.chance(0.5)
        self.arguments: dict[str, Any] = {
            "lr": RATES.get(self.kind, 1e-2),
            "weight_decay": self.draw.choice((0.0, 0.1)),
        }
        if self.kind in ("LAMB", "VRLAMB") and self.chance(0.3):
            self.arguments["prenormalize"] = True
        if not (self.attached or self.force_sum):
            self.divisor = None  # FSDP2 would have gloo multiply, which it cannot
        self.reshards_after_backward |= not self.attached  # nobody follows model.zero_grad() where it misses gradients
        # A parameter that FSDP2 ignores, whose gradient the program averages itself; its chunks are seen by nobody.
        self.outside = next((n for n in self.names if "." not in n and n not in self.observed | self.frozen), None)
        if self.divisor not in (None, 1.0) or self.chance(0.6):
            self.outside = None
        self.hooked = next((n for n in self.trained() if n != self.outside and self.chance(0.05)), None)

    def build(self) -> tuple[Any, Any]:
        """Return the sharded model with the first weights, and its optimizer."""
        blocks = [Block(how, Block() if inner else None) for how, inner in zip(self.hows, self.inner, strict=True)]
        model = Model(blocks)
        for name, weight in self.weights.items():
            owner, _, last = name.rpartition(".")
            trained = name not in self.frozen
            model.get_submodule(owner).register_parameter(last, nn.Parameter(weight.clone(), requires_grad=trained))
        model.to(DEVICE)
        if self.tied:
            first = next(name for name in self.names if name.startswith("blocks.0.w"))
            last = f"blocks.{len(self.hows) - 1}"
            model.get_submodule(last).register_parameter(first.rpartition(".")[2], model.get_parameter(first))
        names = ("shard",) if len(self.mesh) == 1 else ("replicate", "shard")
        options: dict[str, Any] = {
            "mesh": init_device_mesh(DEVICE, self.mesh, mesh_dim_names=names),
            "mp_policy": MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype),
            "reshard_after_forward": self.reshard,
        }
        if self.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for index, block in enumerate(model.blocks):
            if self.inner[index] and self.inner_units[index]:
                fully_shard(block.inner, **options)
            if self.units[index]:
                fully_shard(block, **options)
        if self.together:
            fully_shard([model.blocks[index] for index in self.together], **options)
            model.whole = set(self.together)
        outside = {model.get_parameter(self.outside)} if self.outside else set()
        fully_shard(model, ignored_params=outside, **options)
        for module in self.fsdp_modules(model):
            if self.divisor is not None:
                module.set_gradient_divide_factor(self.divisor)
            if self.force_sum:
                module.set_force_sum_reduction_for_comms(True)
        model.set_reshard_after_backward(self.reshards_after_backward)
        if self.hooked:
            hooked = model.get_parameter(self.hooked)
            hooked.register_post_accumulate_grad_hook(halve)
        self.params = {name: model.get_parameter(name) for name in self.names}
        groups = [{**group, "params": [self.params[name] for name in group["params"]]} for group in self.groups]
        optimizer = OPTIMIZERS[self.kind](groups, **self.arguments)
        if self.attached:
            ds_vrgd.attach(model, optimizer)
        return model, optimizer

    @staticmethod
    def fsdp_modules(model: nn.Module) -> list[Any]:
        return [module for module in model.modules() if isinstance(module, FSDPModule)]

    @property
    def judged(self) -> bool:
        return bool(self.observed)

    def unit_of(self, name: str) -> str:
        """Return a name of the unit that a parameter belongs to."""
        parts = name.split(".")
        if len(parts) == 1:
            return "outside" if name == self.outside else "root"
        index = int(parts[1])
        if parts[2] == "inner" and self.inner_units[index]:
            return f"inner {index}"
        if self.units[index]:
            return f"block {index}"
        return "together" if index in self.together else "root"

    def trained(self) -> list[str]:
        return [name for name in self.names if name not in self.frozen]

    # -- a window -----------------------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Begin a window, with the zeros that the last one may have left in ``.grad``."""
        self.mean: dict[str, Tensor] = {
            name: torch.zeros(self.shapes[name]) for name, param in self.params.items() if param.grad is not None
        }
        self.passes: list[Gradients] = []
        self.partial: dict[str, Tensor] = {}
        self.all_reduces = True
        self.pending: Gradients = {} if self.attached or "pending" not in vars(self) else self.pending
        self.signal = {name: self.normal(shape).sign() * (0.5 + self.normal(shape).abs()) for name, shape in
                       self.shapes.items()}  # fmt: skip

    def uses(self, name: str) -> int:
        first = next((name for name in self.names if name.startswith("blocks.0.w")), None)
        return 2 if self.tied and name == first else 1

    def forward(self, used: Iterable[str], signals: Gradients) -> Tensor:
        mine = {name.rpartition(".")[2]: signals[name][self.rank].to(DEVICE) for name in used}
        return self.model(torch.zeros((), requires_grad=self.loss_has_grad, device=DEVICE), mine)  # type: ignore[no-any-return]

    def draw_signals(self, used: Iterable[str], *, bad: bool) -> Gradients:
        """Return what every rank's gradients of a micro-batch will be: exact in bf16 where anything is."""
        found = {}
        for name in used:
            rows = [self.signal[name] + 0.4 * self.normal(self.shapes[name]) for _ in range(self.world)]
            found[name] = [row.bfloat16().float() if self.wire == torch.bfloat16 or self.param_dtype else row
                           for row in rows]  # fmt: skip
        for name in found:
            if self.chance(0.05):
                found[name] = [torch.zeros_like(row) for row in found[name]]
        if bad:
            name = self.draw.choice([n for n in found if n not in self.frozen and n != self.outside])
            found[name][self.draw.randrange(self.world)].view(-1)[-1] = self.draw.choice((torch.nan, torch.inf))
        return found

    def draw_used(self, *, everything: bool) -> list[str]:
        if everything or self.chance(0.6):
            used = list(self.names)
        else:
            used = self.draw.sample(self.names, self.draw.randint(1, len(self.names)))
        if not set(used) & set(self.trained()) - {self.outside}:
            used += [self.draw.choice([name for name in self.trained() if name != self.outside])]
        return used

    def wake(self, used: Iterable[str]) -> None:
        """Note which units a forward pass has reached."""

        def is_below(name: str, module: str) -> bool:
            return name.startswith(f"{module}.")

        units = {"root"}
        for name in used:
            parts = name.split(".")
            if len(parts) > 1:
                units |= {self.unit_of(name), f"block {parts[1]}"}
                if int(parts[1]) in self.together:
                    units.add("together")
            if self.uses(name) == 2:
                units.add(f"block {len(self.hows) - 1}")
        self.awake |= {name for name in self.names if self.unit_of(name) in units}

    def backward(self, *, everything: bool = False, bad: bool = False, sync: bool = True) -> None:
        """Run one micro-batch; its passes bring their gradients to ``pending``, or to ``mean`` and ``passes``."""
        used = self.draw_used(everything=everything)
        signals = self.draw_signals(used, bad=bad)
        self.log.append(f"backward {used} bad={bad} sync={sync}")
        self.model.set_requires_gradient_sync(sync)  # which is the next one's, too
        self.model.set_requires_all_reduce(sync and self.all_reduces)
        loss = self.forward(used, signals)
        self.wake(used)
        again, twice = self.chance(0.08), self.param_dtype is None is self.reduce_dtype and self.chance(0.04)
        if twice:
            self.log.append("twice")
            more = self.draw_signals(used, bad=False)
            loss = loss + self.forward(used, more)
            signals = {name: [a + b for a, b in zip(rows, more[name], strict=True)] for name, rows in signals.items()}
        try:
            loss.backward(retain_graph=again)
        except RuntimeError as error:
            if not (twice and any(text in str(error) for text in ("twice in one backward pass", "unreduced"))):
                raise
            self.log.append("refused")
            self.zero_grad()
            self.backward(everything=True)
            return
        self.bring(used, signals, sync=sync)
        if again:
            self.log.append("again")
            loss.backward()
            self.bring(used, signals, sync=sync)

    def bring(self, used: Iterable[str], signals: Gradients, *, sync: bool) -> None:
        """Account for a backward pass."""
        grads = {name: [row * self.uses(name) for row in signals[name]] for name in used if name not in self.frozen}
        if self.outside in grads:
            rows = grads.pop(self.outside)
            self.add(self.outside, torch.stack(rows).double().mean(0))
        for name, rows in grads.items():
            was = self.pending.pop(name, None)
            if was is not None:
                rows = [a.float() + b for a, b in zip(was, rows, strict=True)]
            self.pending[name] = [row.to(self.wire) for row in rows]
        if not sync:
            return
        if self.attached:
            for name in set(self.trained()) & self.awake - self.pending.keys() - {self.outside}:
                self.pending[name] = [torch.zeros(self.shapes[name])] * self.world
        for name, rows in self.pending.items():
            mean = torch.stack(rows).double().sum(0) / (self.divisor or self.world)
            self.partial[name] = self.partial[name] + mean if name in self.partial else mean
        if self.all_reduces:
            for name, mean in self.partial.items():
                self.add(name, mean)
            self.partial = {}
        self.passes.append({name: [row.double() for row in rows] for name, rows in self.pending.items()})
        self.pending = {}

    def add(self, name: str, grad: Tensor) -> None:
        self.mean[name] = self.mean[name] + grad if name in self.mean else grad
        if name == self.hooked:
            self.mean[name] = self.mean[name] * 0.5

    def is_bad(self) -> bool:
        """Return whether a gradient of the window is not finite; it stays so until its whole unit is thrown away."""
        rows = [row for each in self.passes for of_ranks in each.values() for row in of_ranks]
        return not all(bool(torch.isfinite(row).all()) for row in (*rows, *self.mean.values()))

    def drop(self, names: Iterable[str]) -> None:
        gone = set(names)
        self.passes = [{name: rows for name, rows in each.items() if name not in gone} for each in self.passes]
        self.passes = [each for each in self.passes if each]

    def throw_away(self) -> None:
        """Throw the window's gradients away, all or those of one layer, in one of the ways that torch has."""
        hows = ("optimizer", "optimizer, zeros", "model", "model, zeros", "each", "one", "block")
        how = self.draw.choice(hows[:4] if self.partial else hows[:5] if self.is_bad() else hows)
        self.log.append(f"throw away: {how}")
        if how in ("each", "one", "block"):
            gone = self.names if how == "each" else [self.draw.choice(self.names)]
            if how == "block":
                gone = [name for name in self.names if name.startswith("blocks.0.")]
            for name in gone:
                self.params[name].grad = None
                self.mean.pop(name, None)
            self.drop(gone)
            return
        owner = self.optimizer if how.startswith("optimizer") else self.model
        owner.zero_grad(set_to_none="zeros" not in how)
        if not self.attached and "zeros" in how:  # nobody has followed it, and nobody needs to
            self.mean = {name: torch.zeros_like(grad) for name, grad in self.mean.items()}
            self.passes = []
            return
        self.mean = {name: torch.zeros_like(grad) for name, grad in self.mean.items() if "zeros" in how}
        self.passes = []
        if self.attached:
            self.pending, self.partial = {}, {}

    def edit(self) -> None:
        """Change a gradient: the step takes it, and the ratio is that of the chunks."""
        name, factor = self.draw.choice(self.names), self.draw.choice((0.5, 3.0))
        how = self.draw.choice(("in place", "another", "one rank"))
        if name not in self.mean or name == self.outside:
            return
        self.log.append(f"edit {name} {how}")
        param = self.params[name]
        if how == "in place":
            param.grad.mul_(factor)
        elif how == "another":
            param.grad = param.grad * factor
        else:
            rank = self.draw.randrange(self.shards)
            if self.rank % self.shards == rank:
                local(param.grad).mul_(factor)
            rows = -(-len(self.mean[name]) // self.shards)
            self.mean[name] = self.mean[name].clone()
            self.mean[name][rank * rows : (rank + 1) * rows] *= factor
            return
        self.mean[name] = self.mean[name] * factor

    def clip(self) -> None:
        limit = self.draw.choice((0.5, 2.0, 1000.0))
        own = self.chance(0.5) or self.outside is not None or self.offload
        self.log.append(f"clip {limit} own={own}")
        norm: Any = (
            self.optimizer.clip_grad_norm_(limit) if own else nn.utils.clip_grad_norm_(self.params.values(), limit)
        )
        norm = norm.full_tensor() if is_dtensor(norm) else norm
        if not self.mean:
            return
        right = norm_of(list(self.mean.values()))
        assert abs(float(norm) - right) <= 1e-5 * right or not torch.isfinite(torch.tensor(right)), (float(norm), right)
        factor = min(1.0, limit / (right + 1e-6))
        self.mean = {name: grad * factor for name, grad in self.mean.items()}

    def look(self) -> None:
        """Run the model without training it."""
        used = self.draw_used(everything=False)
        how = self.draw.choice(("no_grad", "eval", "unused"))
        self.log.append(f"look {how}")
        signals = self.draw_signals(used, bad=False)
        if how == "unused":
            self.forward(used, signals)
        else:
            self.model.train(how != "eval")
            with torch.no_grad():
                self.forward(used, signals)
            self.model.train()
        self.wake(used)

    def break_off(self) -> None:
        """Run a backward pass that fails, and throw the window away, or go on and be told."""
        blocks = [module for module in self.model.modules() if isinstance(module, Block)]
        used = self.draw_used(everything=True)
        failing = self.draw.choice(blocks)
        self.log.append(f"break off at {[name for name, module in self.model.named_modules() if module is failing]}")
        failing.fails = True
        signals, sync = self.draw_signals(used, bad=False), self.chance(0.8)
        self.model.set_requires_gradient_sync(sync)
        loss = self.forward(used, signals)
        failing.fails = False  # reentrant checkpoints aside, the graph has it
        self.wake(used)
        try:
            loss.backward()
        except MemoryError:
            pass
        else:  # nothing that is trained is below
            self.log.append("nothing failed")
            self.bring(used, signals, sync=sync)
            return
        if self.outside in self.mean or self.outside in used:
            self.params[self.outside].grad = None
            self.mean.pop(self.outside, None)
        if self.chance(0.3):
            self.log.append("ignored")
            try:
                self.backward(everything=True)
            except RuntimeError as error:
                if "broke off" not in str(error):
                    raise
                self.log.append("told")
            else:
                return
        self.zero_grad()

    def zero_grad(self) -> None:
        """Begin the next window."""
        keep_zeros = self.chance(0.3)
        owner = self.draw.choice((self.optimizer, self.model))
        self.log.append(f"zero_grad {type(owner).__name__} {keep_zeros}")
        owner.zero_grad(set_to_none=not keep_zeros)
        self.begin_window()

    def window(self) -> None:
        """Run the backward passes of a step, and what the program does between them."""
        count = self.draw.randint(1, 5)
        bad = self.draw.randrange(count) if self.judged and self.chance(0.1) else None
        marked = self.chance(0.8)
        # Without attach, buffers of passes that use other parameters differ in size, and FSDP2 cannot add them up.
        partial = len(self.mesh) == 2 and self.attached and self.chance(0.3)
        merges = self.chance(0.25) and (self.attached or self.param_dtype in (None, self.wire))
        thrown = self.draw.randrange(count) if self.chance(0.3) else None
        for micro_batch in range(count):
            if micro_batch == thrown:
                self.throw_away()
            if self.chance(0.1):
                self.edit()
            if self.chance(0.05) and self.outside is None and not self.is_bad():
                self.clip()
            if self.chance(0.1):
                self.look()
            if self.attached and self.chance(0.04):
                self.break_off()
            if self.chance(0.05):
                self.load_in_place()
            is_last = micro_batch == count - 1
            sync = is_last or not (merges and self.chance(0.5) and self.awake == set(self.names))
            self.model.set_is_last_backward(is_last or marked)
            self.all_reduces = is_last or not partial
            self.backward(everything=is_last, bad=micro_batch == bad, sync=sync)
        if self.outside in self.mean:
            grad = self.params[self.outside].grad
            dist.all_reduce(grad)
            grad.div_(self.world)
        if self.chance(0.2):
            self.edit()
        if self.chance(0.2):
            self.clip()
        if self.chance(0.1) and not self.is_bad():
            name = self.draw.choice(self.names)
            self.log.append(f"last: None {name}")
            if len(self.mean.keys() - {name}) > 0:
                self.params[name].grad = None
                self.mean.pop(name, None)
                self.drop([name])

    def step(self) -> None:
        """Step with the optimizer and with the reference, and begin the next window."""
        chunks = [{name: rows[rank] for name, rows in each.items()} for each in self.passes for rank in
                  range(self.world)]  # fmt: skip
        held = {name for name, param in self.params.items() if param.grad is not None}
        assert held == set(self.mean), (held, set(self.mean))
        self.log.append(f"step k={len(chunks)} of {sorted(self.mean)}")
        self.optimizer.step()
        assert bool(self.optimizer.overflow) == self.is_bad()
        if not self.optimizer.overflow:
            skipped = {name: (self.reference.params[name].clone(), copy.deepcopy(self.reference.state[name]))
                       for name in self.names if name not in self.mean}  # fmt: skip
            self.reference.step(chunks or [self.mean], mean=self.mean)
            for name, (weight, state) in skipped.items():
                self.reference.params[name], self.reference.state[name] = weight, state
            if any(self.gamma_of(name) < 1.0 for name in self.mean):
                statistics = self.optimizer.layer_statistics
                assert statistics[0].k == len(chunks), (statistics[0].k, len(chunks))
        if self.attached and self.chance(0.2):  # FSDP2 leaves the root whole, where model.zero_grad() misses it
            self.look()
        self.zero_grad()

    def gamma_of(self, name: str) -> float:
        return next(group["gamma"] for group in self.reference.groups if name in group["params"])  # type: ignore[no-any-return]

    # -- between windows ----------------------------------------------------------------------------------------------

    def load_in_place(self) -> None:
        self.log.append("load in place")
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        self.set_options()

    def set_options(self) -> None:
        """Set what a checkpoint does not decide, and the reference knows."""
        for group, of_reference in zip(self.optimizer.param_groups, self.reference.groups, strict=True):
            group["gamma"], group["lr"] = of_reference["gamma"], of_reference["lr"]

    def resume(self) -> None:
        """Continue from what was saved, in memory or in files, with a new optimizer and perhaps a new model."""
        anew, files, whole = self.chance(0.6), self.chance(0.3), self.kind != "VRSGD" and self.chance(0.3)
        # With gamma = 1 everywhere, a parameter that is not in the file has taken one step at rate 0, as torch's have.
        files = files and (self.judged or all(state["step"] for state in self.reference.state.values()))
        self.log.append(f"resume anew={anew} files={files} whole={whole}")
        options = StateDictOptions(full_state_dict=whole and not files, strict=False)
        self.optimizer.zero_grad()
        self.begin_window()
        weights, states = get_state_dict(self.model, self.optimizer, options=options)
        weights, states = copy.deepcopy(weights), copy.deepcopy(states)
        if files:
            dcp.save({"model": weights, "optimizer": states}, checkpoint_id=self.folder / str(self.seed))
        outside = self.params[self.outside].detach().clone() if self.outside else None
        if anew:
            self.model, self.optimizer = self.build()
            self.awake = set()
        else:
            groups = [{**group, "params": [self.params[name] for name in group["params"]]}
                      for group in self.groups]  # fmt: skip
            self.optimizer = OPTIMIZERS[self.kind](groups, **self.arguments)
            if self.attached:
                ds_vrgd.attach(self.model, self.optimizer)
        if files:
            weights, states = get_state_dict(self.model, self.optimizer, options=options)
            planner = DefaultLoadPlanner(allow_partial_load=True)  # a parameter that never had a gradient has no state
            dcp.load(
                {"model": weights, "optimizer": states}, checkpoint_id=self.folder / str(self.seed), planner=planner
            )
        set_state_dict(self.model, self.optimizer, model_state_dict=weights, optim_state_dict=states, options=options)
        if outside is not None:
            self.params[self.outside].data.copy_(outside)
        self.set_options()

    def change(self) -> None:
        """Change gamma or the learning rate of a group, or freeze or unfreeze a parameter."""
        index = self.draw.randrange(len(self.groups))
        group, right = self.optimizer.param_groups[index], self.reference.groups[index]
        what = self.draw.choice(("gamma", "lr", "frozen"))
        self.log.append(f"change {what}")
        if what == "gamma" and right["gamma"] < 1.0:
            group["gamma"] = right["gamma"] = self.draw.choice((0.05, 0.5, 1.0))
        elif what == "lr":
            group["lr"] = right["lr"] = self.arguments["lr"] * self.draw.choice((0.5, 2.0))
        elif what == "frozen":
            name = self.draw.choice(self.names)
            rest = set(self.trained()) - {name, self.outside}
            if name not in (self.outside, self.hooked) and rest:
                self.frozen ^= {name}
                self.params[name].requires_grad_(name not in self.frozen)

    def run(self) -> None:
        for step in range(STEPS):
            if step and self.chance(0.2):
                self.resume()
            if step and self.chance(0.3):
                self.change()
            self.window()
            self.step()
            error = self.error()
            assert error <= BOUND, f"step {step}: {error:.1e}"

    def error(self) -> float:
        right, found = self.reference.params, []
        for name, param in self.params.items():  # of model.parameters() FSDP2 may hold some whole, in bf16
            weight: Any = param.detach().to(DEVICE)
            found.append((weight.full_tensor() if is_dtensor(weight) else weight).cpu().double() - right[name])
        return norm_of(found) / norm_of(list(right.values()))


def outcomes(rank: int, seeds: Iterable[int], folder: Path) -> dict[int, str]:
    """Run the programs; an error becomes its text."""
    found = {}
    for seed in seeds:
        program: Any = None
        try:
            program = Program(seed, folder)
            program.run()
            found[seed] = ""
        except Exception:
            found[seed] = "\n".join([*(program.log if program else ()), traceback.format_exc()])
    return found


def check(found: list[dict[int, str]]) -> None:
    wrong = [f"seed {seed}, rank {rank}: {text}" for rank, of in enumerate(found) for seed, text in of.items() if text]
    assert not wrong, "\n".join(wrong)


def test_programs_follow_the_reference(tmp_path: Path) -> None:
    check(run_on_ranks(2, outcomes, range(PROGRAMS), tmp_path))


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_programs_follow_the_reference(world: int, tmp_path: Path) -> None:
    check(run_on_ranks(world, outcomes, range(PROGRAMS, MORE_PROGRAMS), tmp_path))
