"""The passes of a step over its shards: Triton kernels where they can serve, else torch's operators piece by piece.

A rule (``sgd``, ``adam``, ``lars``, ``lamb``) updates one piece: a run of one layer's elements. On a CPU a piece is so
small that it stays in the cache through all operations of its rule, which makes a step many times faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ds_vrgd import gsnr, kernels
from ds_vrgd.kernels.blocks import GROWTH, SMALL_SQUARES, BlockTable
from ds_vrgd.kernels.records import AdamNumbers, Columns, MomentumNumbers, RatioNumbers, ShardCall, Tensors
from ds_vrgd.moments import LayerTable, Moments, local
from ds_vrgd.optim.observer import AVERAGE, Shard

#: Elements of a piece for each thread of a CPU: the tensors of an Adam step have 10 MB then, which the last cache
#: holds. Smaller pieces are slower, as torch needs about 2 us to begin each of some 25 operations.
ELEMENTS_A_THREAD = 2**18

_STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq")
#: The blocks of each table, made by its first kernel.
_blocks: WeakKeyDictionary[LayerTable, BlockTable] = WeakKeyDictionary()

#: The column of a layer, and the scalars of one of its pieces: numbers on a CPU, tensors elsewhere.
_Scalars = tuple[int, list[Any]]


class Rule:
    """The update of an optimizer: one piece of a shard in torch, one shard as a kernel.

    A rule whose step depends on norms of whole layers (LARS, LAMB) has two passes: :meth:`_measured`, and when the
    norms are known :meth:`_update_piece`. Every other rule has the last pass alone, and its ``trust`` is None.
    """

    #: Whether the base optimizer counts its steps in ``state["step"]``.
    counts_steps: ClassVar[bool] = False
    #: Whether weight decay stays out of the moments; None where they have nothing to do with it.
    decoupled_decay: ClassVar[bool | None] = None
    #: Whether the ratio is averaged over the steps (``exp_avg_gsnr``) before it scales the gradient.
    averages_ratio: ClassVar[bool] = False
    #: Whether the rule sums over whole layers; if not, its step where gamma is 1 is torch's own.
    sums_layers: ClassVar[bool] = False
    #: Returns what scales each layer's update, given norms of weights and measured tensors, and their param group.
    _trust: ClassVar[staticmethod[[Tensor, Tensor, dict[str, Any]], Tensor]]
    #: The kernels of the passes, in :mod:`ds_vrgd.kernels.update`.
    kernels: ClassVar[tuple[str, ...]]
    #: The per-element state, if it is the same in all param groups.
    _keys: ClassVar[tuple[str, ...]] = ()
    #: As in ``torch.optim.Optimizer``.
    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    def state_keys(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the keys of the per-element state that the rule keeps for a param group."""
        return self._keys

    def _measured(self, piece: Piece) -> Tensor:
        """Do the first pass over a piece; return the tensor whose norm is compared with that of the weights."""
        raise NotImplementedError

    def _update_piece(self, piece: Piece, trust: Tensor | float | None) -> None:
        """Update a piece, given the scalar that scales its update."""
        raise NotImplementedError

    def _numbers(self, group: dict[str, Any], step: int) -> AdamNumbers | MomentumNumbers:
        """Return the numbers of a step that the kernels need; ``step`` counts from 1, where the rule counts."""
        raise NotImplementedError

    def _update_as_torch(self, group: dict[str, Any], shards: Sequence[Shard]) -> None:
        """Do the step of torch's optimizer on ``shard.grad`` of the shards of a param group, bit for bit."""
        raise NotImplementedError


class Piece:
    """A run of one layer's elements inside a shard, the one at ``index`` in the call.

    Attributes:
        layer, first: column of the layer in the table, and which of the flattened layer's elements comes first.
        weights: a view of the piece's weights.
        scratch: two pieces of memory like ``weights``, which stay in a CPU's cache: the first is for the gradient, the
            second for the rule. None elsewhere, for new memory.
    """

    def __init__(self, passes: TorchPasses, index: int, run: slice | None, layer: int, first: int) -> None:
        self._passes, self._run = passes, run
        self.shard, self.index, self.layer, self.first = passes.shards[index], index, layer, first
        self.weights = self.of(self.shard.tensor)
        self.scratch = passes.scratch(self.weights)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the piece's part of one of the shard's tensors, a view."""
        if self._run is None:
            return tensor.view_as(self.shard.tensor)
        return (tensor if tensor.dim() == 1 else tensor.view(-1))[self._run]

    def state(self, key: str) -> Tensor:
        """Return the piece's part of a state tensor."""
        return self.of(self.shard.part(key))

    def gradient(self) -> Tensor:
        """Return the gradient for the base optimizer: with its ratio, where the shard has one. Not to be changed."""
        return self._passes.gradient(self)


@dataclass
class Passes:
    """The passes of a rule over shards."""

    rule: Rule  # the optimizer
    shards: Sequence[Shard]  # of groups that all have GSNR, or all have not
    table: LayerTable  # their layers
    moments: Sequence[Moments]  # the chunks' moments of each shard; empty without GSNR
    k: int  # number of chunks of a layer whose micro-batches are chunks of their own
    # After the first pass with GSNR, ``(L,)`` each: how many elements were clamped low, and high.
    counts: list[Tensor] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        """Find which averages a checkpoint has not brought; nothing changes before :meth:`begin`."""
        self._averages = self.rule.averages_ratio and bool(self.moments)
        self._begins = [self._averages and AVERAGE not in shard.state for shard in self.shards]
        self._begun = {index: self.shards[index].new_average() for index, new in enumerate(self._begins) if new}
        # Of one chunk no ratio is known: the last one is used, and the average stays as it is.
        holds = self.rule.averages_ratio and not self.moments
        self._holds = [holds and shard.group["gamma"] < 1.0 and shard.has_average for shard in self.shards]

    def begin(self) -> None:
        """Count the step and its ratios, before the first pass."""
        for index, average in self._begun.items():
            self.shards[index].state[AVERAGE] = average
        if self.rule.counts_steps:
            for shard in self.shards:
                shard.count_ratio(brings=bool(self.moments))
            torch._foreach_add_([shard.state["step"] for shard in self.shards], torch.tensor(1.0))

    def chunks_of(self, index: int) -> int:
        """Return the number of chunks of a shard's layers."""
        return self.k // self.table.layouts[index].share


class TorchPasses(Passes):
    """The passes through torch's operators, for tensors of any dtype on any device."""

    def __post_init__(self) -> None:
        """Choose the memory of the pieces."""
        super().__post_init__()
        self._means: list[Any] = []
        self._counted: list[_Scalars] | None = [] if self.moments else None
        self._on_cpu = self.table.numels.device.type == "cpu"
        tensors = [tensor for shard in self.shards for tensor in (shard.tensor, shard.grad)]
        tensors += [moments.total for moments in self.moments]
        self._in_cache = self._on_cpu and all(tensor.dtype == torch.float32 for tensor in tensors)
        self._memory = torch.empty(2, 0)

    def ratio_sums(self) -> list[Tensor]:
        """Return this rank's sums by layer of the raw ratio, of the squared mean gradient and of m2."""
        sums: list[_Scalars] = []
        for piece in self._pieces():
            raw, square, m2 = self._scalars(*gsnr.ratio_sums(*self._chunks(piece), piece.scratch))
            sums.append((piece.layer, [raw, square / self.moments[piece.index].parts ** 2, m2]))
        return self._by_layer(sums, 3)

    def normalize(self, means: Tensor) -> None:
        """Set the divisor of each layer's raw ratio, ``(L,)``: before the first pass with GSNR."""
        self._means = self._scalars(*means)

    def measure(self) -> list[Tensor]:
        """Do the first pass; return this rank's sums by layer of the squared weights and of the squared update."""
        sums: list[_Scalars] = []
        for piece in self._pieces():
            other = self.rule._measured(piece)
            spare = piece.scratch[0] if other is piece.scratch[1] else piece.scratch[1]
            squares = [sum_of_squares(values, spare) for values in (piece.weights, other)]
            sums.append((piece.layer, self._scalars(*squares)))
        self._count()
        return self._by_layer(sums, 2)

    def update(self, trust: Tensor | None) -> None:
        """Do the last pass, given what scales the update of each layer, ``(L,)``."""
        scales = None if trust is None else self._scalars(*trust)
        for piece in self._pieces():
            self.rule._update_piece(piece, None if scales is None else scales[piece.layer])
        self._count()

    def gradient(self, piece: Piece) -> Tensor:
        """Return ``ghat = r gbar`` of a piece, or ``phat gbar`` where the ratio is averaged; ``gbar`` without GSNR."""
        shard = piece.shard
        gradient = piece.of(shard.grad)
        (factor,) = (None,) if shard.scale is None else self._scalars(shard.scale)
        if self._means or self._holds[piece.index]:
            ratio = self._ratio(piece) if self._means else piece.state(AVERAGE)
            if self._averages or self._holds[piece.index]:
                factor = (1.0 if factor is None else factor) / (1.0 - shard.group["beta3"] ** shard.ratios)
            ratio = ratio.to(torch.promote_types(ratio.dtype, torch.float32))
            gradient = torch.mul(ratio, gradient, out=piece.scratch[0])
            return (gradient if factor is None else gradient.mul_(factor)).to(piece.weights.dtype)
        if factor is not None:
            gradient = torch.mul(gradient, factor, out=piece.scratch[0])
        return gradient.to(piece.weights.dtype)

    def _ratio(self, piece: Piece) -> Tensor:
        """Return ``r`` of a piece, or ``p`` where the ratio is averaged, and count the clamped elements once."""
        shard, gamma = piece.shard, piece.shard.group["gamma"]
        ratio = gsnr.ratio_of_layer(*self._chunks(piece), self._means[piece.layer], piece.scratch)
        if self._counted is not None:
            # Floats, as torch vectorises no comparison to bool on a CPU.
            spare = torch.empty_like(ratio) if piece.scratch[1] is None else piece.scratch[1]
            low, high = torch.lt(ratio, gamma, out=spare).sum(), torch.gt(ratio, 1.0, out=spare).sum()
            self._counted.append((piece.layer, self._scalars(low, high)))
        ratio = gsnr.clamped_ratio(ratio, gamma)
        if not self._averages:
            return ratio
        average, begins = piece.state(AVERAGE), self._begins[piece.index]
        return gsnr.advance_average(average, ratio, shard.group["beta3"], shard.ratios, piece.first, begins)

    def scratch(self, like: Tensor) -> tuple[Any, Any]:
        """Return :attr:`Piece.scratch` of a piece."""
        if not self._in_cache:
            return None, None
        if self._memory.shape[1] < like.numel():
            self._memory = torch.empty(2, like.numel())
        first, second = self._memory[:, : like.numel()].view(2, *like.shape)
        return first, second

    def _scalars(self, *scalars: Tensor) -> list[Any]:
        """Return numbers on a CPU, where they are far cheaper; elsewhere the scalars, as numbers would cost a sync."""
        return [scalar.item() for scalar in scalars] if self._on_cpu else list(scalars)

    def _chunks(self, piece: Piece) -> tuple[Tensor, Tensor, float, float, int]:
        """Return the arguments of :func:`ds_vrgd.gsnr.raw_ratio` for a piece."""
        moments, eps = self.moments[piece.index], piece.shard.group["gsnr_eps"]
        return piece.of(moments.total), piece.of(moments.m2), self.chunks_of(piece.index), eps, moments.parts

    def _pieces(self) -> Iterator[Piece]:
        threads = torch.get_num_threads()
        for index, (shard, segments) in enumerate(zip(self.shards, self.table.segments, strict=True)):
            tensors = (shard.tensor, shard.grad, *map(shard.part, self.rule.state_keys(shard.group)))
            if not all(tensor.is_contiguous() for tensor in tensors):
                yield Piece(self, index, None, segments[0][2], 0)  # one whole layer in a shape of its own
                continue
            for start, numel, layer, first in segments:
                size = ELEMENTS_A_THREAD * threads if self._on_cpu else numel
                for offset in range(0, numel, size):
                    run = slice(start + offset, start + min(offset + size, numel))
                    yield Piece(self, index, run, layer, first + offset)

    def _count(self) -> None:
        if self._counted is not None:
            self.counts, self._counted = self._by_layer(self._counted, 2), None

    def _by_layer(self, found: Sequence[_Scalars], columns: int) -> list[Tensor]:
        """Add up the scalars of pieces by layer, in the order of the pieces."""
        device = self.table.numels.device
        sums = torch.zeros(columns, len(self.table.names), dtype=torch.float64, device=device)
        if found:
            layers, values = zip(*found, strict=True)
            rows = (
                torch.tensor(values, dtype=torch.float64) if self._on_cpu else torch.stack([*map(torch.stack, values)])
            )
            sums.index_add_(1, torch.tensor(layers, device=device), rows.double().t())
        return list(sums)


class KernelPasses(Passes):
    """The passes through the Triton kernels."""

    def __post_init__(self) -> None:
        """Cut the shards into blocks, and gather what the kernels read."""
        from ds_vrgd.kernels import update

        super().__post_init__()
        if self.table not in _blocks:
            _blocks[self.table] = BlockTable(self.table.segments, len(self.table.names), self.table.numels.device)
        self._columns, self._kernels = Columns(), update
        self._known: dict[Any, tuple[RatioNumbers, AdamNumbers | MomentumNumbers, int]] = {}
        self._launcher = update.Launcher(_blocks[self.table], [*map(self._call, range(len(self.shards)), self.shards)])

    def _call(self, index: int, shard: Shard) -> ShardCall:
        """Return what the kernels need of a shard."""
        state, average, total, m2, chunks, parts = shard.state, None, None, None, 0, 1
        step = int(state["step"]) + 1 if self.rule.counts_steps else 0
        ratios = shard.ratios + self._averages if self._averages or self._holds[index] else 0
        if self.moments:
            (total, m2, parts), chunks = self.moments[index], self.chunks_of(index)
        if ratios:
            average = local(self._begun[index]) if self._begins[index] else shard.part(AVERAGE)
        same = total is not None and total.data_ptr() == shard.grad.data_ptr()
        buffer, exp_avg, exp_avg_sq = (local(state[key]) if key in state else None for key in _STATES)
        tensors = Tensors(
            shard.tensor, None if same else shard.grad, total, m2,
            average, buffer, exp_avg, exp_avg_sq, shard.scale,
        )  # fmt: skip
        key = id(shard.group), step, ratios, chunks, parts, self._begins[index]
        if key not in self._known:
            self._known[key] = self._numbers(shard.group, *key[1:])
        return ShardCall(tensors, *self._known[key])

    def _numbers(
        self, group: dict[str, Any], step: int, ratios: int, chunks: int, parts: int, begins: bool
    ) -> tuple[RatioNumbers, AdamNumbers | MomentumNumbers, int]:
        """Return the numbers of a shard; ``ratios`` is 0 where no averaged ratio scales its gradient."""
        beta3 = group["beta3"] if ratios else 0.0
        ratio = RatioNumbers(
            float(chunks), float(parts), float(group["gsnr_eps"]), group["gamma"], beta3, 1.0 - beta3,
            1.0 / (1.0 - beta3**ratios) if ratios else 1.0, 1.0 - beta3 ** (ratios - 1) if begins else None,
        )  # fmt: skip
        return ratio, self.rule._numbers(group, step), gsnr.rounding_seed(ratios) if ratios else 0

    def ratio_sums(self) -> list[Tensor]:
        """Return the sums of :meth:`TorchPasses.ratio_sums`."""
        return self._sums("ratio_sums", 3)

    def normalize(self, means: Tensor) -> None:
        """Set the divisors of :meth:`TorchPasses.normalize`."""
        self._columns = Columns(means)

    def measure(self) -> list[Tensor]:
        """Do the first pass, :meth:`TorchPasses.measure`."""
        weights, others, *self.counts = self._sums(self.rule.kernels[0], 4 if self.moments else 2)
        return [weights, others]

    def update(self, trust: Tensor | None) -> None:
        """Do the last pass, :meth:`TorchPasses.update`."""
        if trust is None and self.moments:
            self.counts = self._sums(self.rule.kernels[-1], 2)
        else:
            columns = self._columns._replace(trust=None if trust is None else trust.float())
            self._launcher.launch(getattr(self._kernels, self.rule.kernels[-1]), columns, None)

    def _sums(self, kernel: str, count: int) -> list[Tensor]:
        return list(self._launcher.sums(getattr(self._kernels, kernel), self._columns, count))


def passes_over(
    rule: Rule, shards: Sequence[Shard], table: LayerTable, moments: Sequence[Moments], k: int
) -> TorchPasses | KernelPasses:
    """Return the passes over these shards, through kernels if all that they touch is fp32 on one CUDA device."""
    tensors = [tensor for shard in shards for tensor in (shard.tensor, shard.grad)]
    tensors += [shard.part(key) for shard in shards for key in rule.state_keys(shard.group)]
    tensors += [tensor for of_shard in moments for tensor in (of_shard.total, of_shard.m2)]
    return (KernelPasses if kernels.usable(*tensors) else TorchPasses)(rule, shards, table, moments, k)


def sum_of_squares(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the sum of the squares of a piece's values, a scalar, also where these leave fp32's range.

    ``out`` is memory like ``values`` for the squares; None for new memory.
    """
    if values.device.type != "cpu" or values.dtype != torch.float32:
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.square()
    # A norm in fp64 is five times slower on a CPU, and a dot product would lose a digit.
    squares = torch.mul(values, values, out=out).sum()
    if squares.item() < SMALL_SQUARES:
        squares = torch.mul(values, GROWTH, out=out).square_().sum().double() / GROWTH**2
    return squares
