"""What DeepSpeed does to the mean gradient before it hands it over: loss scale, accumulation, clipping.

The chunks' own mean, summed in fp32, is better than DeepSpeed's, which was reduced in the model's dtype; it only has
to be brought to the same scale. One quirk is not followed: on a step at which a dynamic loss scale grows,
DeepSpeed's ZeRO wrappers divide by the new scale a gradient that still bears the old one, and hand over half of it.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

Engine = Any

# DeepSpeed adds it to the norm before it divides by it.
CLIP_EPS = 1e-6


class GradientScale:
    """Loss scale and clipping of the window that is open.

    Args:
        engine: the engine, whose optimizer wrapper clips and unscales.

    Attributes:
        of_loss: the loss scale of the last backward pass.
    """

    def __init__(self, engine: Engine) -> None:
        self._wrapper = engine.optimizer
        self.of_loss = 1.0

    def note_micro_batch(self) -> None:
        """Remember the loss scale of this backward pass; it does not change inside a window, but may at its end."""
        self.of_loss = float(getattr(self._wrapper, "loss_scale", 1.0))

    def norm(self, device: torch.device) -> Tensor:
        """2-norm of the mean gradient over the whole model, without loss scale, before clipping: a scalar."""
        norm = torch.as_tensor(self._wrapper._global_grad_norm, device=device)
        if isinstance(self._wrapper, DeepSpeedZeroOptimizer_Stage3):
            # Stage 3 divides by the loss scale as it is after its update.
            norm = norm * (float(self._wrapper.loss_scale) / self.of_loss)
        return norm

    def clipping(self, device: torch.device) -> Tensor:
        """The factor, at most 1, by which DeepSpeed's ``gradient_clipping`` shrinks the gradient: a scalar."""
        clip = float(self._wrapper.clip_grad)
        if clip <= 0.0:
            return torch.ones((), device=device)
        return torch.clamp(clip / (self.norm(device) + CLIP_EPS), max=1.0)

    def of_total(self, device: torch.device) -> Tensor:
        """Factor from the sum over the window's micro-batches of the mean over the ranks to the step's gradient.

        Autograd hands out gradients multiplied by ``loss_scale / accumulation``, and the step wants their sum without
        the loss scale, clipped. A scalar.
        """
        return self.clipping(device) / self.of_loss
