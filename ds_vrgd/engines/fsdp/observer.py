"""The adapter of FSDP2: units feed the moments, and the gradient of a step is what is in ``.grad``."""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_vrgd.engines.fsdp.exchange import UnitExchange
from ds_vrgd.engines.fsdp.units import end_broken_pass, units_of
from ds_vrgd.engines.patches import Patches
from ds_vrgd.moments import BackwardPasses, Comparison, Moments, Ranks, ShardLayout, gathered, is_dtensor, local, weakly
from ds_vrgd.optim import VROptimizer, checks, find_optimizer, world
from ds_vrgd.optim.gradient import GradientObserver
from ds_vrgd.optim.observer import BadGradient


def attach(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer see the chunks of a model: :func:`ds_vrgd.attach`."""
    inner = find_optimizer(optimizer)
    inner.observe(FSDPObserver(model, inner))


class FSDPObserver(GradientObserver):
    """The observer of a model's units.

    Args:
        model, optimizer: the root module, and the optimizer of its parameters.

    Raises:
        ValueError, RuntimeError: as :func:`attach`.
    """

    def __init__(self, model: nn.Module, optimizer: VROptimizer) -> None:
        super().__init__()
        self._optimizer, self._units = type(optimizer).__name__, units_of(model)
        for unit in self._units:
            kind = type(unit.communication)
            if kind is not UnitExchange and kind.__name__ != "DefaultReduceScatter":
                raise ValueError(
                    f"'{unit.name}' reduces its gradients by {kind.__name__}, which somebody has set "
                    "(set_custom_reduce_scatter, or memory of the process group), and there can be one. Leave it out"
                )
        self._names: dict[Tensor, str] = {param: name for name, param in model.named_parameters()}
        params, unit = [param for unit in self._units for param in unit.params], self._units[0]
        self._layouts = {param: ShardLayout.of(self._names.get(param, "unnamed"), param) for param in params}
        if optimizer.watch is not None:
            ranks = torch.distributed.get_process_group_ranks(unit.shard_group)
            names = [self._name_of(param) for param in params]
            self.comparison = Comparison(names, ranks, unit.shard_group, unit.ranks * unit.replicas)
        layers = {
            param: (index, layout.segments[0].first if layout.segments else 0)
            for index, (param, layout) in enumerate(self._layouts.items())
        }
        self._exchanges = [
            UnitExchange(
                unit, self._on_reduction, self._norms, observed=False, comparison=self.comparison, layers=layers
            )
            for unit in self._units
        ]
        self._exchange_of = {param: exchange for exchange in self._exchanges for param in exchange.unit.params}
        self.reload(optimizer.param_groups)  # which may refuse them
        for exchange in self._exchanges:
            exchange.install()
        self._passes = BackwardPasses(self._end_pass)
        self._told = self._is_retired = self._broke_off = False
        self._forwards = self._ended = self._parts = 0
        self.ranks = Ranks(unit.device)
        # The window is dropped with the model's gradients, until detach() or as long as this lives.
        patches, handle = Patches(), model.register_forward_pre_hook(weakly(self._begin_forward), prepend=True)
        patches.instead(model, "zero_grad", weakly(self._drop_with_model))
        self._unfollow = [weakref.finalize(self, handle.remove), weakref.finalize(self, patches.undo)]

    def _begin_forward(self, model: nn.Module, inputs: Any) -> None:
        """Count a forward pass, and before it have FSDP2 end a backward pass that broke off."""
        self._end_broken_pass()
        self._forwards += torch.is_grad_enabled() and model.training
        for unit in self._units:
            unit.follow_freezing()
            unit.complete_unreduced()

    def _end_broken_pass(self) -> None:
        if torch._C._current_graph_task_id() == -1:  # no backward pass runs
            self._broke_off |= end_broken_pass(self._units)

    # -- the param groups ---------------------------------------------------------------------------------------------

    def reload(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Observe the param groups that a checkpoint has brought, whose gamma may differ; always True.

        An open window stays open: its gradients are still in ``.grad``, so its chunks are kept.
        """
        self._require_sharded(groups)
        observed = {param for group in groups if group["gamma"] < 1.0 for param in group["params"]}
        for exchange in self._exchanges:
            if exchange.observed == observed.isdisjoint(exchange.unit.params):
                exchange.reset()
                exchange.observed = not exchange.observed
        self._ranks_agree = False
        return True

    def add_group(self, group: dict[str, Any]) -> None:
        """Refuse a param group whose chunks were not observed from the start.

        Raises:
            ValueError: GSNR is on in the group.
        """
        self._require_sharded([group])
        if group["gamma"] < 1.0 and any(not self._exchange_of[p].observed for p in group["params"] if p.requires_grad):
            super().add_group(group)
        self._ranks_agree = False

    def _require_sharded(self, groups: Sequence[dict[str, Any]]) -> None:
        """Require that the parameters whose chunks are wanted are the model's sharded ones."""
        for param in (param for group in groups if group["gamma"] < 1.0 for param in group["params"]):
            if not param.requires_grad or param in self._exchange_of:
                continue
            name = self._names.get(param)
            if name is not None and not is_dtensor(param):
                raise ValueError(
                    f"{self._optimizer}: '{name}' is in no module that fully_shard was called on, and nobody reduces "
                    "its gradient. Call fully_shard on the model itself, too"
                )
            raise ValueError(
                f"{self._optimizer}: a parameter of the optimizer is not one of the model's sharded parameters. Make "
                "the optimizer after fully_shard, over model.parameters()"
            )

    # -- what FSDP2 reports -------------------------------------------------------------------------------------------

    def _on_reduction(self, exchange: UnitExchange) -> None:
        """Open the backward pass at its first reduction, and forget what the program has thrown away."""
        if self._passes.broke_off or self._broke_off:
            raise _broken_pass()
        if not self._passes.take(exchange):
            raise RuntimeError(
                f"FSDP2 reduces the gradients of '{exchange.unit.name}' twice in one backward pass, as it does where a "
                "module runs twice in a forward pass, and half of a chunk is no chunk. Call fully_shard on the module "
                "around both calls instead, so that one reduction has their sum"
            )
        exchange.drop_discarded()

    def _end_pass(self) -> None:
        for exchange in self._exchanges:
            if exchange.observed and exchange.unit.has_unreduced:
                raise RuntimeError(
                    f"a backward pass has left a gradient of '{exchange.unit.name}' unreduced, and reduced others, so "
                    "that a chunk of one layer is not a chunk of another. Call set_requires_gradient_sync on the whole "
                    "model, and fully_shard around a checkpointed module that runs twice in a forward pass"
                )
        for exchange in self._passes.came:
            exchange.merge_alone()
            exchange.note_versions()
            exchange.passes |= 1 << self._ended
        self._ended += 1

    # -- what the optimizer asks for in step() ------------------------------------------------------------------------

    def announce(self, optimizer: str, k: int) -> None:
        """Report k, units, layers and parameters on the first rank."""
        ranks, numels = k // self._parts, [param.numel() for param in self._exchange_of if param.requires_grad]
        world.announce(
            f"{optimizer}: k = {k} ({ranks} rank{'s' * (ranks > 1)} x {self._parts} micro-batch"
            f"{'es' * (self._parts > 1)}) in the first step; FSDP2, the exchange in place of its reduce-scatter; "
            f"{len(self._units)} units, {len(numels)} layers, {sum(numels):,} parameters"
        )

    def only_makes_state(self, grads: Sequence[Tensor], *, rates_are_zero: bool) -> bool:
        """Return whether ``torch.distributed.checkpoint`` primes the optimizer: without a backward pass, at rate 0."""
        return rates_are_zero and not any(exchange.parts for exchange in self._exchanges)

    def finish(self) -> int:
        """Complete the window's moments; a collective where there are copies of the shards (HSDP).

        Raises:
            RuntimeError: a backward pass of the window broke off, or another optimizer has been attached.
        """
        if self._is_retired:
            raise RuntimeError(
                f"{self._optimizer}: another optimizer has been attached to this model since, and sees its chunks. Use "
                "one optimizer with several param groups, or attach this one again before the next backward pass"
            )
        if self._passes.unfinished or self._broke_off or any(unit.awaits_end for unit in self._units):
            raise _broken_pass()
        if not self._parts:
            for exchange in self._exchanges:
                exchange.drop_nones()
            # Not the most of one unit: before torch 2.13 units that take turns are not in each other's passes.
            self._parts = functools.reduce(operator.or_, (exchange.passes for exchange in self._exchanges)).bit_count()
            for exchange in self._exchanges:
                exchange.finish(self._parts)
        return self._parts * self._units[0].ranks * self._units[0].replicas

    def _gradients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the buffers of the units' gradients, and gradients that lie elsewhere."""
        found: dict[UnitExchange | None, list[Tensor]] = {}
        for tensor in tensors:
            if tensor.grad is not None:
                found.setdefault(self._exchange_of.get(tensor), []).append(local(tensor.grad))
        return [
            grad
            for exchange, of_unit in found.items()
            for grad in (of_unit if exchange is None else exchange.as_one(of_unit))
        ]

    def bad_gradients(self) -> list[BadGradient]:
        """Return the bad gradients of all ranks. A collective.

        Rank and micro-batch are those of a unit's buffer, and the layers are where its moments are not finite.
        """
        layers = {each.unit.name: [self._name_of(param) for param in each.bad()] for each in self._exchanges}
        group = world.group()
        everyone = gathered(layers, group)
        found = checks.gather_bad(self._norms, lambda param: self._exchange_of[param].unit.name, group)
        return [
            BadGradient(bad.rank, bad.micro_batch, layer, bad.kind)
            for bad in found
            for layer in dict.fromkeys(name for of_rank in everyone for name in of_rank[bad.layer]) or [bad.layer]
        ]

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments of this rank's part of a parameter, flat."""
        return self._exchange_of[tensor].moments(tensor)

    def unit(self, k: int) -> float:
        """Return the number of micro-batches, by which each loss counts as divided, times what FSDP2 left undivided."""
        unit = self._units[0]
        return self._parts * unit.ranks * unit.replicas / unit.divisor * unit.divided_before

    def drop(self) -> None:
        """Forget the window's chunks with its gradients, and what FSDP2 would merge with the next one's."""
        self._end_broken_pass()
        for unit in self._units:
            unit.forget_unreduced()
        super().drop()

    def _drop_with_model(self, zero_grad: Callable[..., None], set_to_none: bool = True) -> None:
        """Drop the window with ``model.zero_grad()``, which misses the gradients of parameters that are whole now."""
        zero_grad(set_to_none)
        for param in self._exchange_of:
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                local(param.grad).zero_()
        self.drop()

    def after_step(self) -> None:
        """End the window with the step."""
        if self._parts and self._forwards > self._parts and not self._told and world.is_first():
            self._told = True
            logging.getLogger("ds_vrgd").warning(
                "%s: %d forward passes of this step made %d chunks on each rank. set_requires_gradient_sync(False) "
                "merges micro-batches into one chunk, and k counts chunks.",
                self._optimizer, self._forwards, self._parts,
            )  # fmt: skip
        super().after_step()
        self._broke_off = False
        self._forwards = self._ended = self._parts = 0
        self._passes.clear()
        for exchange in self._exchanges:
            exchange.reset()

    def detach(self) -> None:
        """Give every unit its own communication back, and the model its ``zero_grad``."""
        self._is_retired = True
        for undo in self._unfollow:
            undo()
        for exchange in self._exchanges:
            exchange.detach()


def _broken_pass() -> RuntimeError:
    return RuntimeError(
        "a backward pass of this window broke off (an exception, such as running out of memory), or compiled autograd "
        "ran it, and the gradients hold a part of it. Leave compiled autograd off. Where you catch an exception, call "
        "optimizer.zero_grad(), and begin the window again."
    )
