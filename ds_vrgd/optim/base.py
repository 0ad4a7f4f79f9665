"""The step that all optimizers here share: GSNR in front of an unchanged base optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from ds_vrgd import gsnr, kernels
from ds_vrgd.moments import LayerTable, Moments
from ds_vrgd.optim import alive, allocation, arguments, nonfinite, world
from ds_vrgd.optim.average import KEY as AVERAGE
from ds_vrgd.optim.average import averaged, dtype_of_average
from ds_vrgd.optim.plain import PlainObserver
from ds_vrgd.optim.restore import cast_averages, fitted
from ds_vrgd.optim.shards import LayerStatistics, Observer, Shard
from ds_vrgd.optim.sources import plain_sources, sources_with_sums
from ds_vrgd.optim.sums import LayerSums
from ds_vrgd.optim.verify import verify_direction

if TYPE_CHECKING:
    from types import ModuleType

    from ds_vrgd.kernels.records import Source

FEW_CHUNKS = 8


class VROptimizer(LayerSums, torch.optim.Optimizer):
    """Base of all optimizers of this package.

    A subclass gives :meth:`state_keys` and :meth:`_update`, the base optimizer's step on gradients that are already
    variance-reduced. ``gamma=1`` in a param group turns GSNR off there: no hook, no traffic, no state.

    Args:
        params: parameters, or param groups that may override every argument.
        defaults: hyper-parameters, checked here.
        unknown: arguments that the subclass does not have, refused here.
        reduction: "auto", "fused" or "observe"; for the engine that is built around the optimizer.
        ranks_per_node: for that engine, too; None to go by the launcher.
        nonfinite: "skip" or "error": what to do about a window with a gradient that is not finite.

    Attributes:
        overflow: whether the last step was left out because a gradient was not finite. DeepSpeed's engine reads it, as
            it does its own wrappers': the step counts as skipped, and the schedule waits.
    """

    #: Whether the base optimizer counts its steps in ``state["step"]``.
    counts_steps: ClassVar[bool] = False
    #: Whether the ratio is averaged over the steps (``exp_avg_gsnr``) before it scales the gradient.
    averages_ratio: ClassVar[bool] = False
    #: Whether the kernels also serve param groups whose gamma is 1; else their step is torch's own.
    has_plain_kernel: ClassVar[bool] = False
    #: Whether weight decay stays out of the moments; None where they have nothing to do with it.
    decoupled_decay: ClassVar[bool | None] = None
    #: False for the optimizers that never reduce variance: gamma is 1 in all their groups.
    reduces_variance: ClassVar[bool] = True

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        unknown: dict[str, Any],
        *,
        reduction: str = "auto",
        ranks_per_node: int | None = None,
        nonfinite: str = "skip",
    ) -> None:
        hidden = () if self.reduces_variance else arguments.GSNR
        of_all = {"reduction": reduction, "ranks_per_node": ranks_per_node, "nonfinite": nonfinite}
        arguments.check(type(self).__name__, defaults | of_all, defaults | of_all | unknown, hidden)
        self.reduction, self.ranks_per_node, self.nonfinite = reduction, ranks_per_node, nonfinite
        self._init_observation()
        super().__init__(params, defaults)
        self.observe(PlainObserver(self.param_groups))
        alive.remember(self)

    def _init_observation(self) -> None:
        self._observer: Observer | None = None
        self._tables: dict[tuple[int, ...], LayerTable] = {}
        self._statistics: list[LayerStatistics] = []
        self._statistics_window = -1
        self._counts: list[Tensor] = []
        self._warned_few_chunks = False
        self._first_window: int | None = None
        self._judged_window = -1
        self.overflow = False
        self._k = 0

    def observe(self, observer: Observer) -> None:
        """Take layouts and moments from ``observer`` from now on."""
        if isinstance(self._observer, PlainObserver):
            self._observer.detach()
        self._observer = observer
        self._tables.clear()
        self._first_window = None
        self._statistics_window = self._judged_window = -1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch, with the group's own arguments checked; keys that are no argument are left alone."""
        if not self.reduces_variance and param_group.get("gamma", 1.0) != 1.0:
            arguments.refuse_gsnr(type(self).__name__, param_group)
        arguments.refuse_of_the_whole(type(self).__name__, param_group)
        known = {name: value for name, value in param_group.items() if name in self.defaults}
        arguments.check(type(self).__name__, self.defaults, known)
        super().add_param_group(param_group)
        if isinstance(self._observer, PlainObserver):
            self._observer.watch(self.param_groups[-1])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; the chunks that made up the gradients are forgotten with them."""
        super().zero_grad(set_to_none)
        if isinstance(self._observer, PlainObserver):
            self._observer.after_step()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, and also from a checkpoint of the base optimizer, or of its variance-reducing twin.

        Whether GSNR is on is what this optimizer was built with. A running mean of the ratio that the checkpoint lacks
        begins anew (:func:`~ds_vrgd.optim.average.averaged`), one that is not wanted is dropped; one warning says so.

        Raises:
            ValueError: a state, an option or a shape that this optimizer cannot continue, or a state that is missing.
        """
        fit, notes = fitted(self, state_dict)
        super().load_state_dict(fit)
        cast_averages(self)
        if notes and world.is_first():
            warnings.warn(f"{type(self).__name__}: {'; '.join(notes)}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        """As in torch, with the arguments of the whole optimizer."""
        return super().__getstate__() | {name: getattr(self, name) for name in arguments.OF_THE_WHOLE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; arguments that an older or a base optimizer's checkpoint lacks take this one's defaults."""
        super().__setstate__(arguments.OF_THE_WHOLE | self.__dict__ | state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if not self.reduces_variance:
                group["gamma"] = 1.0  # the checkpoint may come from an optimizer that does
        if not hasattr(self, "_observer"):
            self._init_observation()
        if self._observer is None or isinstance(self._observer, PlainObserver):
            self.observe(PlainObserver(self.param_groups))  # the restored groups may differ in gamma

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters once.

        Args:
            closure: not supported, since it would run backward passes in the middle of a window.

        Raises:
            RuntimeError: GSNR is on and fewer than two chunks were observed since the last step, or the ranks differ in
                their parameters, arguments or micro-batches.
            FloatingPointError: ``nonfinite="error"``, and a gradient is not finite; nothing was updated.
        """
        if closure is not None:
            raise ValueError(f"{type(self).__name__}.step() takes no closure; call backward() before step()")
        shards = [
            Shard(group, tensor, tensor.grad, self.state[tensor])
            for group in self.param_groups
            for tensor in group["params"]
            if tensor.grad is not None
        ]
        for shard in shards:
            self._ensure_state(shard)
        if allocation.state_only or not shards or self._skips(shards):
            return
        reduced = [shard for shard in shards if shard.group["gamma"] < 1.0]
        plain = [shard for shard in shards if shard.group["gamma"] == 1.0]
        for shard in plain:
            gradient, shard.scale = self.observer.gradient(shard.tensor, None)
            shard.grad = gradient.view_as(shard.tensor)
        moments = self._moments(reduced) if reduced else []
        self._prescale(shards)
        room = self._kernels(shards, moments)
        if room is not None:
            if reduced:
                table = self.table(reduced)
                self._kernel_update(room, reduced, table, self._sources(room, reduced, table, moments))
            if plain:
                self._plain_kernel_update(room, plain)
        else:
            if reduced:
                self._scale_by_ratio(reduced, moments)
            for shard in shards:
                shard.settle()
            self._update(shards)
        if self._counts:
            self.sum_over_ranks(None, [])
        self.observer.after_step()

    @property
    def observer(self) -> Observer:
        """Who provides layouts and moments."""
        assert self._observer is not None
        return self._observer

    def _ensure_state(self, shard: Shard) -> None:
        """Create what state is missing, key by key: a checkpoint may have brought some of it."""
        if self.counts_steps:
            shard.state.setdefault("step", torch.tensor(0.0))
        keys = self.state_keys(shard.group)
        if self.averages_ratio and shard.group["gamma"] < 1.0 and shard.state["step"] == 0:
            keys = (*keys, AVERAGE)
        for key in keys:
            if key not in shard.state:
                dtype = dtype_of_average(shard) if key == AVERAGE else None
                shard.state[key] = torch.zeros_like(shard.tensor, dtype=dtype, memory_format=torch.preserve_format)

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Per-element state that the base optimizer keeps for a param group."""
        raise NotImplementedError

    def _prescale(self, shards: Sequence[Shard]) -> None:
        """Bring the base optimizer's own factors, if it has any, into the shards' scales."""

    def _update(self, shards: Sequence[Shard]) -> None:
        """The base optimizer's step on ``shard.grad``."""
        raise NotImplementedError

    # -- gradients that are not finite --------------------------------------------------------------------------------

    def _skips(self, shards: Sequence[Shard]) -> bool:
        """Whether the window must be left out: one verdict for all its calls and all ranks, before any is updated."""
        if all(group["gamma"] == 1.0 for group in self.param_groups):
            return False
        self.observer.agree(self)
        self.observer.finish()
        if self._judged_window != self.observer.window:
            self._judged_window = self.observer.window
            self.overflow = self.observer.has_bad([shard.tensor for shard in shards])
        if self.overflow:
            self.observer.skip_step(self.on_bad_gradient)
        return self.overflow

    def on_bad_gradient(self) -> FloatingPointError | None:
        """Name the chunks of a window that is left out, in the log or in the error to be raised. A collective."""
        return nonfinite.complain(type(self).__name__, self.nonfinite, self.observer.bad_gradients())

    # -- GSNR ---------------------------------------------------------------------------------------------------------

    def _moments(self, shards: Sequence[Shard]) -> list[Moments]:
        """Moments of every shard; its gradient and scale are the observer's from here on."""
        self._k = self._chunks(shards)
        handed = [shard.grad for shard in shards]
        moments = [self.observer.moments(shard.tensor) for shard in shards]
        for shard, of_shard in zip(shards, moments, strict=True):
            gradient, shard.scale = self.observer.gradient(shard.tensor, of_shard)
            shard.grad = gradient.view_as(shard.tensor)
        if self._first_window is None:
            self._first_window = self.observer.window
        if self.observer.window == self._first_window:
            verify_direction(self.table(shards), self.observer.ranks, handed, moments)
        return moments

    def _scale_by_ratio(self, shards: Sequence[Shard], moments: Sequence[Moments]) -> None:
        """Replace each gradient by ``ghat`` (equations 2 and 7 to 10)."""
        table = self.table(shards)
        raws: list[Tensor] = []
        sums: list[Tensor] = []
        square: list[Tensor] = []
        variance: list[Tensor] = []
        for shard, layout, of_shard in zip(shards, table.layouts, moments, strict=True):
            mean = of_shard.mean
            raws.append(gsnr.raw_ratio(mean, of_shard.m2, self._k // layout.share, shard.group["gsnr_eps"]))
            sums.append(layout.sums(raws[-1], 1))
            square.append(layout.sums(mean, 2))
            variance.append(layout.sums(of_shard.m2, 1))
        layer_mean = self._note(table, *(torch.cat(column) for column in (sums, square, variance)))
        low, high = [], []
        for shard, layout, raw, mean in zip(shards, table.layouts, raws, table.split(layer_mean), strict=True):
            gamma = shard.group["gamma"]
            ratio = gsnr.normalized_ratio(raw, layout.spread(mean.to(raw.dtype)))
            low.append(layout.sums((ratio < gamma).to(ratio.dtype), 1))
            high.append(layout.sums((ratio > 1.0).to(ratio.dtype), 1))
            ratio = gsnr.clamped_ratio(ratio, gamma).view_as(shard.grad)
            if self.averages_ratio:
                ratio = averaged(shard, layout, ratio)
            shard.settle()
            shard.grad = (ratio * shard.grad).to(shard.tensor.dtype)
        self._counts = [torch.cat(low), torch.cat(high)]

    def _note(self, table: LayerTable, raw: Tensor, square: Tensor, m2: Tensor) -> Tensor:
        """Sum this rank's columns over the ranks, and keep the statistics; returns the layers' mean raw ratio."""
        raw_sum, square_sum, variance_sum = self.sum_over_ranks(table, [raw, square, m2 * table.shares / self._k])
        layer_mean = raw_sum / table.numels
        if self._statistics_window != self.observer.window:
            self._statistics, self._statistics_window = [], self.observer.window
        unit = self.observer.unit(self._k) ** 2
        self._statistics.append(LayerStatistics(table, self._k, layer_mean, square_sum * unit, variance_sum * unit))
        return layer_mean

    def _chunks(self, shards: Sequence[Shard]) -> int:
        """The k of this window, checked, also for the layers of which several micro-batches make one chunk."""
        in_all = self.observer.finish()
        k = in_all // max(self.observer.layout(shard.tensor).share for shard in shards)
        if k < 2:
            raise RuntimeError(
                f"{type(self).__name__} saw k = {k} chunk gradients since the last step, and needs at least 2 for a "
                "variance (a chunk is one micro-batch on one data-parallel rank). Use more ranks or accumulate more "
                "micro-batches before step(), or set gamma=1.0 for the base optimizer."
            )
        if k < FEW_CHUNKS and not self._warned_few_chunks:
            self._warned_few_chunks = True
            warnings.warn(
                f"{type(self).__name__} estimates the GSNR from only k = {k} chunks; the paper found k in [32, 256] "
                "best. More accumulation steps at a smaller micro-batch raise k at the same batch size.",
                stacklevel=6,
            )
        return in_all

    # -- kernels ------------------------------------------------------------------------------------------------------

    def _kernels(self, shards: Sequence[Shard], moments: Sequence[Moments]) -> ModuleType | None:
        """The kernels for this call; None if not all that they would touch is fp32 and contiguous on one device."""
        tensors = [tensor for shard in shards for tensor in (shard.tensor, shard.grad)]
        tensors += [shard.state[key] for shard in shards for key in self.state_keys(shard.group)]
        tensors += [tensor for of_shard in moments for tensor in (of_shard.total, of_shard.m2)]
        return kernels.serving(*tensors)

    def _sources(
        self, room: ModuleType, shards: Sequence[Shard], table: LayerTable, moments: Sequence[Moments]
    ) -> list[Source]:
        """Measure the ratio's sums; returns what the update kernels read of every shard."""
        sources, sums = sources_with_sums(room, shards, table, moments, self._k)
        means = self._note(table, *sums)
        return [source._replace(means=means) for source in sources]

    def _kernel_update(
        self, room: ModuleType, shards: Sequence[Shard], table: LayerTable, sources: Sequence[Source]
    ) -> None:
        """The base optimizer's step in kernels; leaves the numbers of clamped elements in ``_counts``."""
        raise NotImplementedError

    def _plain_kernel_update(self, room: ModuleType, shards: Sequence[Shard]) -> None:
        """The base optimizer's step where ``gamma`` is 1."""
        if self.has_plain_kernel:
            self._kernel_update(room, shards, self.table(shards), plain_sources(shards))
            return
        for shard in shards:
            shard.settle()
        self._update(shards)
