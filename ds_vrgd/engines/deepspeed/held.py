"""The gradient that DeepSpeed holds between backward and step: is it of this window, and at which scale?

DeepSpeed reuses buffers from window to window. At ZeRO-3 and with CPU offload it adds a micro-batch to the buffer
unless the micro-batch is the window's first, and steps with the buffer whether or not a gradient was written. A
parameter that took no part in the first or the last micro-batch then trains on an earlier window's gradient. So the
buffers are cleared with every window, and completed before every step. At stage 1 with ``overlap_comm`` it does not
reduce such a gradient, if the last micro-batch brought none.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from torch import Tensor

#: Stage 3 keeps its gradient partitions under this name.
PARTITIONS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"

# DeepSpeed adds it to the norm before it divides by it.
CLIP_EPS = 1e-6


def reuses_buffers(wrapper: Any) -> bool:
    """Return whether gradients of one window can be left in the buffers of the next."""
    return isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3) or offloads(wrapper)


def offloads(wrapper: Any) -> bool:
    """Return whether an optimizer wrapper moves the gradients to the CPU."""
    return bool(getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False))


def clear(wrapper: Any) -> None:
    """Make DeepSpeed forget the gradients of the micro-batches so far."""
    type(wrapper).zero_grad(wrapper)  # its own method, without those who follow calls of it
    if offloads(wrapper):
        get_accelerator().synchronize()  # gradients may be on their way to the CPU
    shards: list[Tensor] = []
    if isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3):
        wrapper.grad_partitions_flat_buffer.zero_()
        shards = wrapper.fp32_partitioned_groups_flat
    elif isinstance(wrapper, DeepSpeedZeroOptimizer):
        wrapper.all_grad_tensors = dict.fromkeys(wrapper.all_grad_tensors)
        averaged = [gradient for group in wrapper.averaged_gradients.values() for gradient in group or ()]
        for gradient in averaged + (list(wrapper.accumulated_grads_in_cpu.values()) if wrapper.cpu_offload else []):
            gradient.zero_()
        wrapper.local_overflow = False  # of offload, which would skip the window that a gradient was dropped from
        shards = wrapper.single_partition_of_fp32_groups
    if offloads(wrapper):
        wrapper.norm_for_param_grads = {}
        for shard in shards:
            if shard.grad is not None:
                shard.grad.zero_()


def complete(wrapper: Any) -> None:
    """Make CPU offload count the parameters that took no part in the last micro-batch; call it at its boundary.

    DeepSpeed copies the sum of a parameter to the CPU, and counts its norm, when a gradient of the last micro-batch
    arrives. The sum of a parameter that had no gradient in this window is zero.
    """
    stage_3 = isinstance(wrapper, DeepSpeedZeroOptimizer_Stage3)
    for param in itertools.chain(*(wrapper.fp16_groups if stage_3 else wrapper.params_in_partition)):
        number = wrapper.get_param_id(param)
        if not param.requires_grad or number in wrapper.norm_for_param_grads:
            continue
        if stage_3:
            group, start, _ = wrapper.grad_position[number]
            shard, total = wrapper.fp32_partitioned_groups_flat[group], getattr(wrapper, PARTITIONS)[param.ds_id]
        else:
            group, first, start, numel = wrapper.grad_position[number]
            shard, sums = wrapper.single_partition_of_fp32_groups[group], wrapper.averaged_gradients.get(group)
            if isinstance(sums, GradPartitionBufferGroup):  # sums of another dtype than the weights stay on the device
                total = sums.flat_partition.narrow(0, start, numel)
            elif number in wrapper.accumulated_grads_in_cpu:
                total = wrapper.accumulated_grads_in_cpu[number].view(-1).narrow(0, first, numel)
            else:
                continue
        wrapper.norm_for_param_grads[number] = total.float().norm(2).to(get_accelerator().current_device_name())
        shard.grad.view(-1).narrow(0, start, total.numel()).copy_(total)


def reduces_in_hooks_alone(wrapper: Any) -> bool:
    """Return whether an optimizer wrapper's reduction may leave out gradients, which :func:`reduce_rest` reduces."""
    if not isinstance(wrapper, DeepSpeedZeroOptimizer):
        return False
    return bool(wrapper.overlap_comm and not wrapper.partition_gradients)


def reduce_rest(wrapper: Any) -> None:
    """Reduce what the last backward pass has left at stage 1 with ``overlap_comm``; call it before the reduction ends.

    DeepSpeed's hooks reduce there what that pass brings. The gradient of a parameter that took part in earlier
    micro-batches alone would stay that of one rank, and so would all that a second pass of a micro-batch adds.
    """
    wrapper.setup_buckets()
    waiting = {number for bucket in wrapper.ipg_buckets.values() for *_, number in bucket.params}
    for index, params in enumerate(wrapper.bit16_groups):
        for param in params:
            number = wrapper.get_param_id(param)
            if wrapper.params_already_reduced[number] or number in waiting:
                continue
            if wrapper.get_gradient_for_reduction(param) is not None:
                wrapper.reduce_ready_partitions_and_remove_grads(param, index)


class GradientScale:
    """Loss scale and clipping of the window that is open: what DeepSpeed does to the mean gradient.

    The chunks' own mean, summed in fp32, is better than DeepSpeed's, which was reduced in the model's dtype. It only
    has to be brought to the same scale. One quirk is not followed: on a step at which a dynamic loss scale grows,
    DeepSpeed's ZeRO wrappers divide a gradient that still bears the old scale by the new one.

    Attributes:
        of_loss: the loss scale of the last backward pass. It does not change inside a window, but may at its end.
    """

    def __init__(self, engine: Any) -> None:
        self._wrapper = engine.optimizer
        self.of_loss = 1.0

    def record_loss_scale(self) -> None:
        """Record the loss scale of this backward pass."""
        self.of_loss = self._now()

    def _now(self) -> float:
        return float(getattr(self._wrapper, "loss_scale", 1.0))

    def norm(self, device: torch.device) -> Tensor:
        """Return the 2-norm of the whole model's mean gradient, without loss scale, before clipping: a scalar."""
        norm = torch.as_tensor(self._wrapper._global_grad_norm, device=device)
        if isinstance(self._wrapper, DeepSpeedZeroOptimizer_Stage3):
            # Stage 3 divides by the loss scale as it is after its update.
            norm = norm * (self._now() / self.of_loss)
        return norm

    def clipping(self, device: torch.device, divided_by: float | None = None) -> Tensor:
        """Return the factor, at most 1, by which ``gradient_clipping`` shrinks the gradient: a scalar.

        ``divided_by`` is the loss scale that was taken out of the norm; None for the right one.
        """
        clip, wrong = float(self._wrapper.clip_grad), self.of_loss / (divided_by or self.of_loss)
        if clip <= 0.0:
            return torch.ones((), device=device)
        return torch.clamp(clip / (self.norm(device) * wrong + CLIP_EPS), max=1.0)

    def handed(self, device: torch.device) -> Tensor:
        """Return the factor that DeepSpeed itself has applied, its growing loss scale included: a scalar."""
        return self.clipping(device, self._now()) / self._now()

    def of_total(self, device: torch.device) -> Tensor:
        """Return the factor from the sum over the window's micro-batches of the mean over the ranks to the gradient.

        Autograd hands out gradients multiplied by ``loss_scale / accumulation``, and the step needs their sum without
        the loss scale, clipped. A scalar.
        """
        return self.clipping(device) / self.of_loss
