"""The types that the optimizers work on, and the protocol of an engine adapter, which observes the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_vrgd.moments import Comparison, LayerTable, Moments, Ranks, ShardLayout, local

#: The key of the running mean of the ratio in a tensor's state (its rule is ``gsnr.advance_average``).
AVERAGE = "exp_avg_gsnr"
#: The key of the number of ratios in that mean; absent while every step has brought one, and ``step`` counts them.
RATIOS = "gsnr_step"
#: That number in the state of an optimizer that has not stepped, into which ``torch.distributed.checkpoint`` loads.
NOT_LOADED = -1


@dataclass(frozen=True)
class BadGradient:
    """One layer's gradient of one chunk that is not finite."""

    rank: int  # global, of the rank that computed it
    micro_batch: int  # its number in the window, from 0
    layer: str  # name of the parameter
    kind: str  # "NaN" or "inf"


class Observer(Protocol):
    """An engine adapter: it observes the chunk gradients, and knows how the optimizer's tensors are laid out.

    Methods with a body here have the answer of an engine that lays out its parameters once, when it is built.

    Attributes:
        ranks: the ranks over which the tensors' layers are cut.
        window: number of the window that is open; a window is what one optimizer step sees.
        unused: whether no engine has been built around the optimizer, and no window has ended.
        judges: whether a window with a gradient that is not finite is left out also where GSNR is off.
        comparison: of the ranks in this window; None where no rank sees the gradients of others, or nobody watches.
    """

    ranks: Ranks
    window: int
    unused: bool = False
    judges: bool = False
    comparison: Comparison | None = None

    def detach(self) -> None:
        """Remove all hooks, for good: another observer has taken this one's place, or the engine is gone."""

    def add_group(self, group: dict[str, Any]) -> None:
        """Observe one more param group.

        Raises:
            ValueError: the engine can no longer observe it.
        """
        if group["gamma"] < 1.0 or "adapt" in group:  # LARS and LAMB need to know the layers in any case
            raise ValueError(
                "a param group was added after the engine was built, which does not observe its parameters. Give the "
                "optimizer all param groups before you build the engine"
            )

    def reload(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Observe the param groups that a checkpoint has brought; return whether the observation begins anew."""
        return False

    def require_whole_layers(self, optimizer: str, groups: Sequence[dict[str, Any]]) -> None:
        """Require that the parameters of ``groups``, whose update sums over layers, are whole, if no engine cuts them.

        Raises:
            ValueError: naming the parameter, how it is cut, and what to use instead.
        """
        return

    def only_makes_state(self, grads: Sequence[Tensor], *, rates_are_zero: bool) -> bool:
        """Return whether a first call of ``step()`` should create the state and nothing else."""
        return False

    def layout(self, tensor: Tensor) -> ShardLayout:
        """Return what one of the optimizer's tensors holds."""

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the ranks' parameters and arguments once, where the engine has not done so. A collective."""
        return

    def announce(self, optimizer: str, k: int) -> None:
        """Report once what is trained, where the engine has not done so; called at the first step that has chunks."""
        return

    def finish(self) -> int:
        """Complete the window; return its number of chunks k (0: nothing was observed)."""

    def has_bad(self, tensors: Sequence[Tensor]) -> bool | Tensor:
        """Return whether a gradient of the window is not finite: the same on all ranks, in all calls of a window.

        A tensor, a scalar, is a verdict that nobody has waited for yet.
        """

    def bad_gradients(self) -> list[BadGradient]:
        """Return the gradients of all ranks' chunks that are not finite. A collective."""

    def skip_step(self, on_bad_gradient: Callable[[], FloatingPointError | None]) -> None:
        """Leave the window out; at its end call ``on_bad_gradient`` once, and raise the error that it returns."""

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments of one of the optimizer's tensors, flat."""

    def gradient(self, shard: Shard, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the step without GSNR, not to be changed, and a scalar factor of it (None: 1).

        The gradient has the size of the shard, whose ``grad`` is what ``step()`` found. ``moments`` are those of the
        chunks, where they were observed.
        """

    def unit(self, k: int) -> float:
        """Return the factor from autograd's gradients to those of the chunks' own losses, for a window of k chunks."""

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the gradient of ``tensors``, over the whole model: a scalar in SUM_DTYPE."""

    def clip(self, tensors: Sequence[Tensor], max_norm: float) -> Tensor:
        """Scale the gradients of ``tensors``, the whole model, to a 2-norm of at most ``max_norm``; return the norm.

        Raises:
            RuntimeError: the engine clips by itself.
        """
        raise RuntimeError(
            "the engine clips the gradients in its own step. Set gradient_clipping in the DeepSpeed JSON, or clip_grad "
            "of Megatron-Core's OptimizerConfig, in the place of clip_grad_norm_()"
        )

    def drop(self) -> None:
        """Forget the window's chunks: its gradients were thrown away."""

    def after_step(self) -> None:
        """End a call of ``step()`` (under an engine, perhaps one of several calls for one window)."""
        return


@dataclass
class Shard:
    """One tensor that a call of ``step()`` updates, with its gradient and its state."""

    group: dict[str, Any]  # its param group
    param: Tensor  # what is in the param group, perhaps a DTensor
    grad: Tensor  # the gradient that the base optimizer takes, of the shape of ``tensor``: ``ghat`` after GSNR
    state: dict[str, Any]  # the optimizer's state of ``param``, of DTensors where it is one
    tensor: Tensor = field(init=False)  # the weights that this rank has of ``param``, in their own shape
    scale: Tensor | None = None  # a scalar that ``grad`` is still to be multiplied by; None for 1
    layout: ShardLayout = field(init=False)  # what the tensor holds; known in ``step()``

    def __post_init__(self) -> None:
        """Find this rank's part of the weights."""
        self.tensor = local(self.param)

    def part(self, key: str) -> Tensor:
        """Return this rank's part of a state tensor."""
        return local(self.state[key])

    @property
    def average_dtype(self) -> torch.dtype:
        """Return the dtype that the group's ``gsnr_dtype`` names: bf16, or the weights' own dtype."""
        return torch.bfloat16 if str(self.group["gsnr_dtype"]).endswith("bfloat16") else self.tensor.dtype

    @property
    def ratios(self) -> int:
        """Return the number of ratios in the running mean: the steps, except for those without a ratio."""
        return int(self.state.get(RATIOS, self.state["step"]))

    @property
    def has_average(self) -> bool:
        """Return whether the running mean has a ratio in it."""
        return AVERAGE in self.state and self.ratios > 0

    def count_ratio(self, *, brings: bool) -> None:
        """Count the ratio of a step before the step is counted; where gamma was always 1 there is none to count."""
        if brings and RATIOS in self.state:
            self.state[RATIOS] += 1
        elif not brings and (self.group["gamma"] < 1.0 or AVERAGE in self.state):
            self.state[RATIOS] = self.ratios

    def new_average(self) -> Tensor:
        """Return memory for a running mean of the ratio that begins."""
        return torch.empty_like(self.param, dtype=self.average_dtype)


@dataclass
class LayerStatistics:
    """The measurements of one call of ``step()``, on the device: columns of ``(L,)``, each over whole layers.

    ``square`` and ``variance`` are without loss scale, and not divided by the accumulation steps
    (:meth:`Observer.unit`).
    """

    table: LayerTable  # names and sizes of the layers
    k: int  # number of chunks
    gamma: Tensor  # floor of the ratio, on any device
    mean_ratio: Tensor  # mean of the raw ratio
    square: Tensor  # sum of the squared mean gradient
    variance: Tensor  # sum of the 1/k variance
    clamped_low: Tensor  # fraction of the elements whose ratio was raised to gamma
    clamped_high: Tensor  # fraction of those whose ratio was lowered to 1

    @property
    def measured(self) -> list[int]:
        """Return the indices of the layers that have elements; a layer without any has no ratio."""
        return [index for index, layer in enumerate(self.table.layers) if layer.numel]
