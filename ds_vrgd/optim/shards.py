"""What the optimizers work on: shards with their gradient and state, and who provides their layouts and moments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ds_vrgd.moments import LayerTable, Moments, Ranks, ShardLayout
from ds_vrgd.optim.nonfinite import BadGradient

if TYPE_CHECKING:
    from ds_vrgd.optim.base import VROptimizer


class Observer(Protocol):
    """Who watches the chunk gradients, and knows how the optimizer's tensors are laid out.

    Attributes:
        ranks: the ranks over which the tensors' layers are cut.
        window: number of the window that is open; a window is what one optimizer step sees.
    """

    ranks: Ranks
    window: int

    def layout(self, tensor: Tensor) -> ShardLayout:
        """What one of the optimizer's tensors holds."""
        ...

    def agree(self, optimizer: VROptimizer) -> None:
        """Once: compare the ranks' parameters and arguments, where nobody has done so at the start. A collective."""
        ...

    def finish(self) -> int:
        """Complete the window; returns its number of chunks k (0: nothing was observed)."""
        ...

    def has_bad(self, tensors: Sequence[Tensor]) -> bool:
        """Whether any gradient of the window is not finite: the same on all ranks, and in all calls of a window.

        Args:
            tensors: those of this call of ``step()``.
        """
        ...

    def bad_gradients(self) -> list[BadGradient]:
        """Those of all ranks' chunks; a collective."""
        ...

    def skip_step(self, on_bad_gradient: Callable[[], FloatingPointError | None]) -> None:
        """The window is left out: see that ``on_bad_gradient`` is called once at its end, and its error raised."""
        ...

    def moments(self, tensor: Tensor) -> Moments:
        """Of one of the optimizer's tensors, flat."""
        ...

    def gradient(self, tensor: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor | None]:
        """The gradient of the step without GSNR: a tensor of ``tensor``'s size, and what it must be multiplied by.

        Args:
            tensor: one of the optimizer's.
            moments: of its chunks, where they were observed.

        Returns:
            The gradient, not to be changed, and a scalar on its device (None: 1).
        """
        ...

    def unit(self, k: int) -> float:
        """What autograd's gradients of this window must be multiplied by to be those of the chunks' own losses.

        Args:
            k: the window's number of chunks.
        """
        ...

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """2-norm of the gradient that ``step()`` was handed, over the whole model: a scalar in SUM_DTYPE.

        Args:
            tensors: those of this call of ``step()``.
        """
        ...

    def after_step(self) -> None:
        """A call of ``step()`` has updated its tensors (under an engine, perhaps one of several calls)."""
        ...


@dataclass
class Shard:
    """One tensor that a call of ``step()`` updates, with what belongs to it.

    Attributes:
        group: its param group.
        tensor: the weights, in their own shape.
        grad: the gradient that the base optimizer takes, in the same shape: ``ghat`` after GSNR.
        state: its optimizer state.
        scale: a scalar that ``grad`` is still to be multiplied by; None for 1.
    """

    group: dict[str, Any]
    tensor: Tensor
    grad: Tensor
    state: dict[str, Any]
    scale: Tensor | None = None

    def settle(self) -> None:
        """Multiply the scale into the gradient."""
        if self.scale is not None:
            self.grad, self.scale = self.grad * self.scale, None


@dataclass
class LayerStatistics:
    """What one call of ``step()`` saw of its layers, on the device: columns of ``(L,)``, each over whole layers.

    Attributes:
        table: names and sizes of the layers.
        k: number of chunks.
        mean_ratio: mean of the raw ratio.
        square: sum of the squared mean gradient, without loss scale, and not divided by the accumulation steps
            (:meth:`Observer.unit`).
        variance: sum of the 1/k variance, in the same units.
        clamped_low, clamped_high: fraction of the elements whose ratio was raised to gamma, lowered to 1.
    """

    table: LayerTable
    k: int
    mean_ratio: Tensor
    square: Tensor
    variance: Tensor
    clamped_low: Tensor | None = None
    clamped_high: Tensor | None = None

    def count(self, low: Tensor, high: Tensor) -> None:
        """Take the number of clamped elements of every layer."""
        self.clamped_low, self.clamped_high = low / self.table.numels, high / self.table.numels


def by_group(shards: Sequence[Shard]) -> list[list[Shard]]:
    """The shards of each param group, in the order of the groups."""
    groups: dict[int, list[Shard]] = {}
    for shard in shards:
        groups.setdefault(id(shard.group), []).append(shard)
    return list(groups.values())
