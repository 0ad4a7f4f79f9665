"""The adapter of Megatron-Core: buckets feed the moments, and the gradient of a step is what is in ``.grad``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_vrgd.engines.megatron.exchange import BucketExchange
from ds_vrgd.engines.megatron.refusals import require_one_gamma
from ds_vrgd.engines.patches import Patches
from ds_vrgd.engines.stages import StageStatistics
from ds_vrgd.moments import SUM_DTYPE, Comparison, Layer, Moments, Segment, ShardLayout, gathered, weakly
from ds_vrgd.optim import LayerStatistics, VROptimizer, checks, world
from ds_vrgd.optim.gradient import GradientObserver
from ds_vrgd.optim.observer import Observer


@dataclass(frozen=True)
class Part:
    """The parameter that one of the optimizer's tensors is a part of, and its bucket."""

    param: Tensor  # the model's
    first: int  # the index of the tensor's first element in it, flattened
    bucket: Any  # the bucket with its gradient
    run: slice  # where the tensor's gradient is in what this rank has of the bucket


class MegatronObserver(GradientObserver):
    """The observer of the bucket groups of a model, for the optimizer inside one of Megatron-Core's.

    Args:
        wrapper: Megatron-Core's optimizer, with one of ours inside.
        model_chunks: its model, in DistributedDataParallel.
        names: of all trained parameters, in the order of the buffers, on all data-parallel ranks alike.
        parts: by tensor of the optimizer, in the order of its param groups.
    """

    def __init__(
        self,
        wrapper: Any,
        model_chunks: Sequence[Any],
        names: Mapping[Tensor, str],
        parts: Mapping[Tensor, Part],
    ) -> None:
        super().__init__()
        self._wrapper, self._parts, self._params = wrapper, dict(parts), dict(names)
        first, optimizer = model_chunks[0], wrapper.optimizer
        observed, watches = optimizer.param_groups[0]["gamma"] < 1.0, optimizer.watch is not None
        is_half = any(buffer.grad_dtype.itemsize < 4 for chunk in model_chunks for buffer in chunk.buffers)
        exact_mean = optimizer.sums_layers and is_half and not first.config.calculate_per_token_loss
        # Whether the exchange takes the place of Megatron-Core's reduction.
        reduces = first.dp_cp_group.size() > 1 and (observed or exact_mean or watches)
        self._data, self._tensor, self._pipeline = first.dp_cp_group, first.tp_group, first.pp_group
        order, is_sharded = [part.param for part in parts.values()], bool(first.ddp_config.use_distributed_optimizer)
        self._group_of: dict[str, int] = {}
        if is_sharded:
            self._group_of = _groups_of(optimizer.param_groups, self._parts, names, self._data)
            order = _in_order_of_groups(names, self._group_of)
        self._layouts = self._laid_out(order, is_sharded=is_sharded)
        groups = [group for chunk in model_chunks for group in chunk.bucket_groups] if reduces else []
        if watches:
            ranks = dist.get_process_group_ranks(self._data)
            self.comparison = Comparison(list(names.values()), ranks, self._data, len(ranks))
        layers = {param: index for index, param in enumerate(names)}
        self._exchanges = [
            BucketExchange(group, self._norms, observed=observed, comparison=self.comparison, layers=layers)
            for group in groups
        ]
        self._of = {param: exchange for exchange in self._exchanges for param in exchange.params}
        self._loss_scale: Tensor | None = None
        self._patches = Patches()
        for chunk in model_chunks if reduces else ():
            self._patches.follow(chunk, "zero_grad_buffer", before=weakly(self.drop))  # a reduction still writes to it
        self._stages: StageStatistics | None = None
        self._completed: list[LayerStatistics] | None = None  # the statistics of the last step that had any
        if observed and self._pipeline.size() > 1:
            device = next(iter(self._parts)).device
            self._stages = StageStatistics([self._layer(param, False) for param in order], self._pipeline, device)

    # -- layers -------------------------------------------------------------------------------------------------------

    def _layer(self, param: Any, is_sharded: bool) -> Layer:
        """Return the layer of a parameter: cut over the data-parallel ranks, the tensor-parallel ones, or both."""
        split = bool(getattr(param, "tensor_model_parallel", False)) and self._tensor.size() > 1
        cuts = [(is_sharded and self._data.size() > 1, self._data), (split, self._tensor)]
        numel = param.numel() * (self._tensor.size() if split else 1)
        return Layer(self._params[param], numel, tuple(group for is_cut, group in cuts if is_cut))

    def _laid_out(self, order: Sequence[Tensor], *, is_sharded: bool) -> dict[Tensor, ShardLayout]:
        """Return the layouts. With all their layers in turn, every rank has the layers of ``order``.

        A rank has no tensor of a parameter whose elements are all on others: the layout of the tensor before names it.
        """
        tensors = {part.param: tensor for tensor, part in self._parts.items()}
        here = [index for index, param in enumerate(order) if param in tensors]
        layers = [self._layer(param, is_sharded) for param in order]
        found = {}
        for own, start, end in zip(here, [0, *here[1:]], [*here[1:], len(order)], strict=True):
            tensor = tensors[order[own]]
            first = self._parts[tensor].first
            if layers[own].numel > order[own].numel():  # cut over tensor-parallel ranks, too
                first += self._tensor.rank() * order[own].numel()
            segment = Segment(own - start, 0, tensor.numel(), first)
            found[tensor] = ShardLayout(tuple(layers[start:end]), (segment,), tensor.numel())
        assert list(found) == list(self._parts), "the optimizer has its tensors in another order on this rank"
        return found

    def _name_of(self, param: Tensor) -> str:
        return self._params[param]

    def whole(self) -> dict[str, Tensor]:
        """Return a distributed optimizer's whole fp32 weights on the CPU; a collective of the data-parallel ranks."""
        found = {param: torch.zeros(param.numel(), device=param.device) for param in self._params}
        for tensor, part in self._parts.items():
            found[part.param][part.first : part.first + tensor.numel()] = tensor.detach()
        for flat in found.values():
            dist.all_reduce(flat, group=self._data)
        return {self._params[param]: flat.view(param.shape).cpu() for param, flat in found.items()}

    # -- what Megatron-Core's optimizer reports -----------------------------------------------------------------------

    def note_loss_scale(self) -> None:
        """Remember the scale of the gradients, before they are unscaled and the scale changes."""
        scaler = getattr(self._wrapper, "grad_scaler", None)  # in fp32 there is none
        self._loss_scale = scaler.scale.clone() if scaler else None

    def restore_means(self) -> None:
        """Put the chunks' mean in fp32 into ``.grad`` where Megatron-Core has rounded it to half precision.

        Where the buffer holds anything but the rounded mean, somebody has edited it, and the edited value stays.
        """
        for tensor, part in self._parts.items():
            if self._is_summed_later(part.param):
                continue
            exchange, dtype = self._of.get(part.param), part.bucket.grad_data.dtype
            if exchange is not None and exchange.reduced and dtype.itemsize < 4 and tensor.grad is not None:
                mean = exchange.moments(part.bucket, part.run).total
                held = tensor.grad.view(-1)
                tensor.grad = torch.where(held == mean.to(dtype).float(), mean, held).view_as(tensor)

    def _is_summed_later(self, param: Any) -> bool:
        """Return whether Megatron-Core sums the reduced gradient over copies of a weight, which must stay alike."""
        marks = ("sequence_parallel", "average_gradients_across_tp_domain")
        norms = ("q_layernorm", "k_layernorm")
        over_tensor_ranks = any(getattr(param, mark, False) for mark in marks) or any(
            norm in self._params[param] for norm in norms
        )
        over_stages = getattr(param, "shared_embedding", False) or getattr(param, "pipeline_parallel", False)
        return (over_tensor_ranks and self._tensor.size() > 1) or (over_stages and self._pipeline.size() > 1)

    # -- what the optimizer asks for in step() ------------------------------------------------------------------------

    def agree(self, optimizer: torch.optim.Optimizer) -> None:
        """Require, once, that the data-parallel ranks train the same. A collective of all ranks."""
        if not self._ranks_agree and world.group() is not None:
            params = checks.table_of_params([(name, param) for param, name in self._params.items()])
            replicas = dist.get_process_group_ranks(self._data)
            checks.require_agreement(checks.table_of_arguments(optimizer) | params, replicas=replicas)
        self._ranks_agree = True

    def require_whole_layers(self, optimizer: str, groups: Sequence[dict[str, Any]]) -> None:
        """Require that GSNR is on in all param groups or in none: gamma may have changed since the last step."""
        require_one_gamma(optimizer, self._wrapper.optimizer.param_groups)

    def announce(self, optimizer: str, k: int) -> None:
        """Report k, buckets, layers and parameters of the first rank."""
        numels = [layer.numel for layout in self._layouts.values() for layer in layout.layers]
        world.announce(
            f"{optimizer}: k = {k} data-parallel ranks, each with the sum of its micro-batches; Megatron-Core, the "
            f"exchange in place of its reduction; {len(self._exchanges)} bucket groups, {len(numels)} layers, "
            f"{sum(numels):,} parameters" + (" on this stage" if self._pipeline.size() > 1 else "")
        )

    def finish(self) -> int:
        """Return the number of data-parallel ranks, each of which has one chunk; 0 if nothing was reduced.

        Raises:
            RuntimeError: a part of the model was not reduced, or too early, or another optimizer was built over it.
        """
        if any(exchange.is_detached for exchange in self._exchanges):
            raise RuntimeError(
                f"{type(self._wrapper.optimizer).__name__}: another optimizer has been built over this model since, "
                "and sees its chunks. Use that one"
            )
        missing = [exchange for exchange in self._exchanges if not exchange.reduced]
        if missing and len(missing) < len(self._exchanges):
            raise RuntimeError(
                f"the gradients of {len(missing)} of {len(self._exchanges)} bucket groups were not reduced in this "
                f"window, '{self._params[missing[0].params[0]]}' among them. Call finalize_model_grads (or "
                "finish_grad_sync of every model chunk) before step()"
            )
        if any(exchange.is_late for exchange in self._exchanges):
            raise RuntimeError(
                "a backward pass has added gradients to their mean over the ranks, which was formed before. Run all "
                "micro-batches of a window but the last inside no_sync() of the model, or set overlap_grad_reduce=False"
            )
        return 0 if missing else self._data.size()

    def moments(self, tensor: Tensor) -> Moments:
        """Return the moments of one of the optimizer's tensors, flat."""
        part = self._parts[tensor]
        return self._of[part.param].moments(part.bucket, part.run)

    def unit(self, k: int) -> float:
        """Return what undoes the loss scale: a chunk is the gradient of the mean loss of its rank's samples."""
        return 1.0 if self._loss_scale is None else 1.0 / float(self._loss_scale)

    def grad_norm(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the 2-norm of the gradient of the whole model, of which Megatron-Core knows the copies."""
        wrapper = self._wrapper
        select = getattr(wrapper, "_filter_grads_for_norm", None)  # 0.16.1 has no groups with a norm of their own
        grads = select(wrapper.get_parameters()) if select else wrapper.get_main_grads_for_grad_norm()
        norms = [torch.linalg.vector_norm(grad, dtype=SUM_DTYPE) for grad in grads]
        square = torch.stack([torch.zeros((), dtype=SUM_DTYPE, device=tensors[0].device), *norms]).square().sum()
        dist.all_reduce(square, group=wrapper.get_grad_stats_parallel_group())
        return square.sqrt()

    clip = Observer.clip  # Megatron-Core has no gradients in the optimizer's tensors before its own step

    def complete_statistics(self) -> None:
        """Bring the statistics of a step to what all ranks report. A collective of the stages of a pipeline, if any.

        A layer of which this rank has nothing was given the gamma of the tensor whose layout names it.
        """
        optimizer: VROptimizer = self._wrapper.optimizer
        groups, measured = optimizer.param_groups, optimizer.layer_statistics is not self._completed
        for part in optimizer.layer_statistics if measured and self._group_of else ():
            gammas = [groups[self._group_of[name]]["gamma"] for name in part.table.names]
            part.gamma = torch.tensor(gammas, dtype=torch.float64, device="cpu")
        if self._stages is not None and not optimizer.overflow:
            optimizer.layer_statistics = self._stages.merge(optimizer.layer_statistics)
        self._completed = optimizer.layer_statistics

    def after_step(self) -> None:
        """End the window with the step."""
        super().after_step()
        for exchange in self._exchanges:
            exchange.reset()

    def detach(self) -> None:
        """Give every bucket group its own communication back, and the model its ``zero_grad_buffer``."""
        self._patches.undo()
        for exchange in self._exchanges:
            exchange.detach()


def _groups_of(
    groups: Sequence[dict[str, Any]], parts: Mapping[Tensor, Part], names: Mapping[Tensor, str], ranks: Any
) -> dict[str, int]:
    """Return the index of every parameter's group. A collective: a rank knows that of those it has a part of."""
    mine = {names[parts[tensor].param]: index for index, group in enumerate(groups) for tensor in group["params"]}
    return {name: index for of_rank in gathered(mine, ranks) for name, index in of_rank.items()}


def _in_order_of_groups(names: Mapping[Tensor, str], group_of: Mapping[str, int]) -> list[Tensor]:
    """Return all trained parameters in the order in which the optimizers of all ranks have them.

    It is that of the param groups; in each of them fp32 parameters come first, and then the order is that of the
    buffers.
    """
    return sorted(names, key=lambda param: (group_of[names[param]], param.dtype != torch.float32))
