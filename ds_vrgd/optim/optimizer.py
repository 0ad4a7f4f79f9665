"""The step that all optimizers here share: GSNR in front of an unchanged base optimizer."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ds_vrgd import gsnr
from ds_vrgd.moments import LayerTable, is_dtensor, local_gradient
from ds_vrgd.optim import checks, options, world
from ds_vrgd.optim.gradient import GradientObserver
from ds_vrgd.optim.observer import AVERAGE, NOT_LOADED, RATIOS, LayerStatistics, Observer, Shard
from ds_vrgd.optim.passes import KernelPasses, Rule, TorchPasses, passes_over
from ds_vrgd.optim.plain import PlainObserver
from ds_vrgd.optim.ranks.recorder import RankRecorder
from ds_vrgd.optim.ranks.watch import RankEvent
from ds_vrgd.optim.state import cast_averages, fitted, lacks_average

FEW_CHUNKS = 8
# Sets of shards whose tables of layers are kept; a model that leaves out other parameters in each step has many.
MOST_TABLES = 64

_made: weakref.WeakSet[VROptimizer] = weakref.WeakSet()
_state_only = False


@contextmanager
def allocate_state_only() -> Iterator[None]:
    """Make ``step()`` create missing state and update nothing: some engines call it once while they are built."""
    global _state_only
    before, _state_only = _state_only, True
    try:
        yield
    finally:
        _state_only = before


def unused_over(params: Iterable[Tensor]) -> VROptimizer | None:
    """Return an optimizer of ours that holds any of ``params``, is in no engine, and has neither stepped nor zeroed."""
    wanted = set(params)
    for optimizer in _made:
        held = {param for group in optimizer.param_groups for param in group["params"]}
        if optimizer.observer.unused and wanted & held:
            return optimizer
    return None


def find_optimizer(engine_or_optimizer: Any) -> VROptimizer:
    """Return the optimizer of ds_vrgd inside an engine or a wrapper, or the argument itself.

    Raises:
        TypeError: there is none.
    """
    seen: Any = engine_or_optimizer
    while seen is not None and not isinstance(seen, VROptimizer):
        seen = getattr(seen, "basic_optimizer", None) or getattr(seen, "optimizer", None)
    if seen is None:
        raise TypeError(f"{type(engine_or_optimizer).__name__} holds no optimizer of ds_vrgd")
    return seen


class VROptimizer(Rule, torch.optim.Optimizer):
    """The base class of all optimizers of this package.

    A subclass gives its :class:`~ds_vrgd.optim.passes.Rule` for gradients that are already variance-reduced.
    ``gamma=1`` in a param group turns GSNR off there: no hook, no traffic, no state.

    Args:
        params: parameters, or param groups that may override every argument that is not of the whole optimizer.
        arguments: of the subclass (``options.OPTIONS``); those of the whole optimizer become attributes.

    Attributes:
        observer: the adapter of the engine, which provides layouts and moments.
        layer_statistics: the measurements of the last step, one per call; none before the first, or with ``gamma=1``.
        overflow: whether the last step was left out because a gradient was not finite. DeepSpeed's engine reads it, as
            it does its own wrappers': the step counts as skipped, and the schedule waits.

    Raises:
        TypeError: an argument that the subclass does not have.
        ValueError: a value out of its range.
    """

    #: False for the optimizers that never reduce variance: gamma is 1 in all their groups.
    reduces_variance: ClassVar[bool] = True
    observer: Observer
    reduction: str
    ranks_per_node: int | None
    nonfinite: str
    watch: str | Callable[[RankEvent], None] | None

    def __new__(cls, *args: Any, **arguments: Any) -> Self:
        """Refuse unknown arguments with a message that says what was probably meant."""
        options.require_known(cls, arguments)
        return super().__new__(cls)

    def __init__(self, params: ParamsT, **arguments: Any) -> None:
        options.check(arguments)
        for name, default in options.WHOLE.items():
            setattr(self, name, arguments.pop(name, default))
        self._begin()
        super().__init__(params, arguments)
        self.observe(PlainObserver(self.param_groups))
        _made.add(self)

    def _begin(self) -> None:
        self._off: dict[int, dict[str, Any]] = {}  # the groups that are not observed
        self._observes = False  # whether any group is: DeepSpeed calls step() with one group at a time
        self._tables: dict[tuple[int, ...], LayerTable] = {}
        self.layer_statistics: list[LayerStatistics] = []
        self._statistics_window = self._judged_window = -1
        self._statistics: Any = None  # table and rest of those of this call, until ``_counts`` are summed
        self._counts: list[Tensor] = []
        self._warned_few_chunks = self._warned_no_gradient = False
        self._announced = self.overflow = False
        self._had_ratio = False  # whether a window has had a variance
        self._first_without = -1  # the first window that had none, which was warned about
        self.recorder = RankRecorder(type(self).__name__, self.watch) if self.watch is not None else None

    # -- observation and param groups ---------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """Take layouts and moments from ``observer`` from now on; the last observer is detached."""
        last = vars(self).get("observer")
        if last is not None and last is not observer:
            last.detach()
        self.observer = observer
        self._follow_groups()

    def _follow_groups(self) -> None:
        """Begin anew with what depends on the param groups as they are now."""
        self._off = {index: group for index, group in enumerate(self.param_groups) if group["gamma"] == 1.0}
        self._observes = len(self._off) < len(self.param_groups)
        self._tables.clear()
        self._statistics_window = self._judged_window = -1

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch does, and check its keys, its values and its parameters.

        Raises:
            ValueError: an unknown key, an argument out of its range, or a parameter that is not a whole layer.
        """
        if not self.reduces_variance and param_group.get("gamma", 1.0) != 1.0:
            options.require_known(type(self), {"gamma": param_group["gamma"]})
        options.check_group(type(self), self.defaults, param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            for summing in self._summing([group]):
                checks.require_whole_layers(type(self).__name__, summing)
            if "observer" in vars(self):
                self.observer.add_group(group)
        except ValueError:
            self.param_groups.pop()
            raise
        if group["gamma"] == 1.0:
            self._off[len(self.param_groups) - 1] = group
        else:
            self._observes = True

    def _summing(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups whose update sums over whole layers."""
        return [group for group in groups if self.sums_layers or group["gamma"] < 1.0]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients as torch does, and forget the chunks that made them up."""
        super().zero_grad(set_to_none)
        self.observer.drop()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients of all parameters together, in place, as ``torch.nn.utils.clip_grad_norm_`` does.

        Under FSDP2 this takes a fraction of its time, with one operation a unit in the place of one a DTensor.

        Args:
            max_norm: the largest 2-norm that is left as it is.

        Returns:
            The norm before, over all ranks' shards: a scalar.

        Raises:
            RuntimeError: the engine around the optimizer (DeepSpeed, Megatron-Core) clips by itself.
        """
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        return self.observer.clip(params, max_norm)

    # -- saved state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does, in two cases with the number of ratios, also where the steps count them.

        For DTensors: ``torch.distributed.checkpoint`` loads what a new optimizer has, and would leave out a number that
        it lacks. And where a base optimizer's checkpoint was loaded: no average is missing before the next step.
        """
        saved = super().state_dict()
        pairs = [(group, param) for group in self.param_groups for param in group["params"]]
        for index, state in saved["state"].items():
            group, param = pairs[index]
            if (AVERAGE in state and is_dtensor(param)) or lacks_average(self, group, state):
                saved["state"][index] = {RATIOS: int(state["step"]) or NOT_LOADED} | state
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, and also from a checkpoint of the base optimizer, or of its variance-reducing twin.

        Whether GSNR is on is what this optimizer was built with. A running mean of the ratio that the checkpoint lacks
        begins anew (:func:`ds_vrgd.gsnr.advance_average`), one that is not wanted is dropped, with one warning.

        Raises:
            ValueError: a state, an option or a shape that this optimizer cannot continue, or a state that is missing.
        """
        remarks: list[str] = []

        def fit(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
            form, found = fitted(self, saved)
            remarks.extend(found)
            return form

        # The last of the hooks: what the user's own make of the checkpoint is what must fit.
        last = self.register_load_state_dict_pre_hook(fit)
        try:
            super().load_state_dict(state_dict)
        finally:
            last.remove()
        if remarks and world.is_first():
            world.warn(f"{type(self).__name__}: {'; '.join(remarks)}")

    def __getstate__(self) -> dict[str, Any]:
        """Return torch's state, with the arguments of the whole optimizer."""
        return super().__getstate__() | {name: getattr(self, name) for name in options.WHOLE}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; arguments that an older or a base optimizer's checkpoint lacks take this one's defaults."""
        super().__setstate__(options.WHOLE | self.__dict__ | state)
        self.defaults.pop("differentiable", None)  # torch adds it: a key that a new optimizer's state dict has not
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            if not self.reduces_variance:
                group["gamma"] = 1.0  # the checkpoint may come from an optimizer that does
        if "observer" not in vars(self):
            self._begin()
            self.observe(PlainObserver(self.param_groups))
        elif self.observer.reload(self.param_groups):
            self._follow_groups()
        else:
            self._off = {index: self.param_groups[index] for index in self._off}
        cast_averages(self.param_groups, self.state)

    def _ensure_state(self, shard: Shard) -> None:
        """Create what state is missing, key by key: a checkpoint may have brought some of it."""
        if self.counts_steps and "step" not in shard.state:
            shard.state["step"] = torch.tensor(0.0)
        keys = self.state_keys(shard.group)
        if self.averages_ratio and AVERAGE not in shard.state and not shard.state["step"]:
            is_observed = not any(shard.group is off for off in self._off.values())
            keys = (*keys, AVERAGE) if is_observed else keys
        for key in keys:
            if key not in shard.state:
                dtype = shard.average_dtype if key == AVERAGE else None
                shard.state[key] = torch.zeros_like(shard.param, dtype=dtype, memory_format=torch.preserve_format)

    # -- the step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters once.

        Args:
            closure: computes the loss again, as for torch's optimizers: it is called first, with gradients enabled, and
                its backward passes belong to the window that this step ends.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            RuntimeError: GSNR is on and no chunk was observed since the last step, or one chunk alone in two windows
                and never more; or the ranks differ in their parameters, arguments or micro-batches.
            ValueError: a parameter is sharded, and the update needs sums over whole layers.
            FloatingPointError: ``nonfinite="error"``, and a gradient is not finite; nothing was updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fresh = not self.state
        shards = [
            Shard(group, param, local_gradient(param), self.state[param])
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        if not shards and fresh and not _state_only:
            self._warn_no_gradient()
        for shard in shards:
            self._ensure_state(shard)
        only_state = _state_only
        if fresh and shards and self._observes and not only_state:
            at_rest = not any(float(group["lr"]) for group in self.param_groups)
            only_state = self.observer.only_makes_state([shard.grad for shard in shards], rates_are_zero=at_rest)
        if shards and not only_state:
            self.observer.require_whole_layers(type(self).__name__, self._summing(self.param_groups))
            checks.require_off(type(self).__name__, self._off)
            if self.recorder is not None:
                self.observer.agree(self)  # before ranks that do not watch would be waited for
                self.recorder.take(self.observer)
            is_bad = self._verdict(shards)
            work = ([], []) if is_bad is True else self._prepared(shards)
            self.overflow, self._judged_window = bool(is_bad), self.observer.window  # here the host may wait
            if self.overflow:
                self.observer.skip_step(self.on_bad_gradient)
            else:
                self._step(*work)
            if self.recorder is not None:
                self.recorder.judge()
        return loss

    def _warn_no_gradient(self) -> None:
        """Warn once, without DeepSpeed, about a step before which no parameter has ever had a gradient."""
        has_params = any(group["params"] for group in self.param_groups)  # under Megatron a rank may have none
        if self._warned_no_gradient or not (has_params and isinstance(self.observer, GradientObserver)):
            return
        self._warned_no_gradient = True
        world.warn(
            f"{type(self).__name__}: step() finds no gradient in any of its parameters, and changes nothing. If "
            "backward() has run, the model has other parameters by now: fully_shard(), for one, replaces them. Make "
            "the optimizer after it. Under FSDP2, leave compiled autograd off: it hides the gradients. Reported once."
        )

    def _prepared(self, shards: Sequence[Shard]) -> tuple[list[TorchPasses | KernelPasses], list[Shard]]:
        """Return the passes of a step over ``shards``, and those that are updated as torch does; nothing has changed.

        Much of a step's work for the host is here, so that it is done while the device comes to the verdict.
        """
        for shard in shards:
            shard.layout = self.observer.layout(shard.param)
        reduced = [shard for shard in shards if shard.group["gamma"] < 1.0]
        plain = [shard for shard in shards if shard.group["gamma"] == 1.0]
        k = self._chunks(reduced) if reduced else 0
        single, measured, moments = [], [], []
        for shard in shards:
            of_shard = self.observer.moments(shard.param) if shard.group["gamma"] < 1.0 else None
            gradient, shard.scale = self.observer.gradient(shard, of_shard)
            shard.grad = gradient if gradient.shape == shard.tensor.shape else gradient.view_as(shard.tensor)
            if of_shard is not None and k // shard.layout.share < 2:
                single.append(shard)
            elif of_shard is not None:
                measured.append(shard)
                moments.append(of_shard)
        self._prescale(shards)
        self._scale_by_known_ratio(single)
        summed = plain if self.sums_layers else []
        passes = [
            passes_over(self, alike, self.table(alike), of_alike, k)
            for alike, of_alike in ((single, []), (measured, moments), (summed, []))
            if alike
        ]
        return passes, [] if self.sums_layers else plain

    def _step(self, work: Sequence[TorchPasses | KernelPasses], plain: Sequence[Shard]) -> None:
        """Update the shards of ``work`` pass by pass, and ``plain`` as torch does."""
        reduces = any(passes.shards[0].group["gamma"] < 1.0 for passes in work)
        if reduces and self._statistics_window != self.observer.window:
            self.layer_statistics, self._statistics_window = [], self.observer.window
        for passes in work:
            self._update(passes)
        for shard in plain:
            shard.count_ratio(brings=False)
            if shard.scale is not None:
                shard.grad = shard.grad * shard.scale
        for _, run in itertools.groupby(plain, lambda shard: id(shard.group)):
            alike = list(run)
            self._update_as_torch(alike[0].group, alike)
        if self._counts:
            self._sum_over_ranks([])
        self.observer.after_step()

    def _prescale(self, shards: Sequence[Shard]) -> None:
        """Bring the base optimizer's own factors, if it has any, into the shards' scales."""

    def _update(self, passes: TorchPasses | KernelPasses) -> None:
        """Update shards pass by pass."""
        passes.begin()
        shards, table = passes.shards, passes.table
        if passes.moments:
            passes.normalize(self._sum_statistics(passes))
        trust = None
        if self.sums_layers:
            sums = passes.measure()
            self._counts = passes.counts
            norms = [total.sqrt() for total in self._sum_over_ranks([(table, own) for own in sums])]
            columns, first = [], 0
            for _, run in itertools.groupby(shards, lambda shard: id(shard.group)):  # neighbours at once
                alike = list(run)
                end = first + sum(len(shard.layout.layers) for shard in alike)
                columns.append(self._trust(norms[0][first:end], norms[1][first:end], alike[0].group))
                first = end
            trust = torch.cat(columns)
        passes.update(trust)
        if not self.sums_layers:
            self._counts = passes.counts

    def _scale_by_known_ratio(self, shards: Sequence[Shard]) -> None:
        """Scale shards of which the window has one chunk, and so no ratio, by gamma where the last phat is no help."""
        for shard in shards:
            if not shard.has_average:
                dtype = torch.promote_types(shard.grad.dtype, torch.float32)
                gamma = torch.full((), shard.group["gamma"], dtype=dtype, device=shard.grad.device)
                shard.scale = gamma if shard.scale is None else gamma * shard.scale

    def _verdict(self, shards: Sequence[Shard]) -> bool | Tensor:
        """Return whether the window is left out: one verdict for all its calls and all ranks, before any update."""
        if not (self._observes or self.observer.judges):
            if any(group.get("prenormalize") for group in self.param_groups):
                self.observer.agree(self)  # a norm over the whole model, which each rank must hold
            return False
        self.observer.agree(self)
        self.observer.finish()
        if self._judged_window == self.observer.window:
            return self.overflow
        return self.observer.has_bad([shard.param for shard in shards])

    def on_bad_gradient(self) -> FloatingPointError | None:
        """Name the chunks of a window that is left out, in the log or in the error to be raised. A collective."""
        found = self.observer.bad_gradients()
        if self.recorder is not None:
            self.recorder.take_bad(found)
        return checks.report_bad(type(self).__name__, self.nonfinite, found)

    # -- GSNR ---------------------------------------------------------------------------------------------------------

    def _chunks(self, shards: Sequence[Shard]) -> int:
        """Return the k of this window, checked also for layers of which several micro-batches make one chunk."""
        in_all, window, name = self.observer.finish(), self.observer.window, type(self).__name__
        k = in_all // max(shard.layout.share for shard in shards)
        self._had_ratio = self._had_ratio or k > 1
        if in_all and not self._announced:
            self._announced = True
            self.observer.announce(name, in_all)
        checks.require_chunks(name, in_all, always_one=not self._had_ratio and 0 <= self._first_without < window)
        if k == 1 and self._first_without < 0:
            self._first_without = window
            known = self.averages_ratio and any(shard.has_average for shard in shards)
            ratio = "the averaged ratio of the windows before it" if known else "r = gamma"
            world.warn(
                f"{name}: this window has one chunk, which has no variance (the last window of an epoch may be short): "
                f"the step uses {ratio}. Reported once."
            )
        if 1 < k < FEW_CHUNKS and not self._warned_few_chunks:
            self._warned_few_chunks = True
            if world.is_first():
                world.warn(
                    f"{name} estimates the GSNR from only k = {k} chunks; the paper found k in [32, 256] "
                    "best. More accumulation steps at a smaller micro-batch raise k at the same batch size."
                )
        return in_all

    # -- sums over whole layers, wherever their elements are ----------------------------------------------------------

    def _sum_statistics(self, passes: TorchPasses | KernelPasses) -> Tensor:
        """Sum what was measured over the ranks, keep the statistics, and return what divides each layer's ratio."""
        shards, table, k = passes.shards, passes.table, passes.k
        raw, square, m2 = passes.ratio_sums()
        columns = [(table, column) for column in (raw, square, m2 * table.shares / k)]
        raw_sum, square_sum, variance_sum = self._sum_over_ranks(columns)
        mean, divisor = gsnr.layer_mean(raw_sum, square_sum, table.numels)
        unit = self.observer.unit(k) ** 2
        gammas = [shard.group["gamma"] for shard in shards for _ in shard.layout.layers]
        gamma = torch.tensor(gammas, dtype=torch.float64, device="cpu")
        found = functools.partial(LayerStatistics, table, k, gamma, mean, square_sum * unit, variance_sum * unit)
        self._statistics = table, found
        return divisor

    def table(self, shards: Sequence[Shard]) -> LayerTable:
        """Return the layers of ``shards``, in one table."""
        layouts = [shard.layout for shard in shards]
        key = tuple(id(layout) for layout in layouts)
        if key not in self._tables:
            if len(self._tables) >= MOST_TABLES:
                self._tables.clear()
            self._tables[key] = LayerTable(layouts, shards[0].tensor.device)
        return self._tables[key]

    def _sum_over_ranks(self, columns: Sequence[tuple[LayerTable, Tensor]]) -> list[Tensor]:
        """Return ``columns``, ``(L,)`` each, summed over the ranks that share layers; with them, waiting counts."""
        if not self._counts:
            return self.observer.ranks.sum(columns)
        table, found = self._statistics
        *totals, low, high = self.observer.ranks.sum([*columns, *((table, count) for count in self._counts)])
        self.layer_statistics.append(found(low / table.numels, high / table.numels))
        self._counts = []
        return totals
