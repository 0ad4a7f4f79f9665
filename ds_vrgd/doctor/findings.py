"""What the doctor found, and whether it is exact."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Norm-wise, |theta - theta_ref| / |theta_ref|: of fp32 weights, and of fp32 masters given half-precision chunks.
OF_WEIGHTS = 8e-7
#: |theta - theta_ref| / |theta_ref - theta_0|, where DeepSpeed's rounding of the mean, or of the average, is inherited.
OF_DISTANCE = 5e-3
#: Weights that moved less than this, of their norm, tell little: an update wrong by one part in a thousand would hide.
VISIBLE = 1e-3
#: How far a chunk gradient may be from a plain model's, of its norm, by what both compute in: DeepSpeed's own backward
#: passes (the linear layers of stage 3) sum in another order, and stage 3 gathers autocast weights in half precision.
ROUNDING = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


@dataclass
class Findings:
    """Of one run; whole on rank 0.

    Attributes:
        stage, dtype: of the engine, and of the model's weights in it.
        wrapper: DeepSpeed's class around the optimizer.
        mode, why: fused, observe or off, and what decided on it.
        ranks, micro_batches: of a step; k is their product.
        clip: DeepSpeed's limit of the gradient's norm; 0 for none.
        layers, reduced, trusted: layers found, with GSNR, with a trust ratio (None: the optimizer has none).
        steps, skipped: taken, and left out because a gradient was not finite.
        raised: further steps, whose learning rate was raised until the weights moved visibly; among ``steps``.
        error: of the weights after the last step, norm-wise.
        moved: the reference's way from the first weights, of its norm.
        worst: the layer with the largest part in the error, and that part, in the units of ``error``.
        apart: largest difference between a chunk gradient of the engine and of the plain model, of its norm.
        rounding: what that may be, given the dtype that both compute in.
        repeats: whether the plain model gave the same gradients for the same batch twice.
        follows: whether the model's weights are the rounded masters.
        coarse: why the error is held to :data:`OF_DISTANCE` of the way; None if to :data:`OF_WEIGHTS`.
        state: bytes of optimizer state for each element of this rank's shards, by state key.
        moments: bytes of moments for each element of the shards: before a step, and between steps.
        buffers: bytes of exchange buffers on this rank.
        sent: bytes that this rank sends for moments, in a micro-batch and once more a step.
    """

    stage: int
    dtype: str
    wrapper: str
    mode: str
    why: str
    ranks: int
    micro_batches: int
    clip: float
    layers: int
    reduced: int
    trusted: int | None
    steps: int = 0
    skipped: int = 0
    raised: int = 0
    error: float = float("nan")
    moved: float = float("nan")
    worst: tuple[str, float] = ("", float("nan"))
    apart: float = 0.0
    rounding: float = 0.0
    repeats: bool = False
    follows: bool = False
    coarse: str | None = None
    state: dict[str, float] = field(default_factory=dict)
    moments: tuple[float, float] = (0.0, 0.0)
    buffers: int = 0
    sent: tuple[int, int] = (0, 0)

    @property
    def tolerance(self) -> float:
        """What ``error`` may be at most."""
        return OF_WEIGHTS if self.coarse is None else OF_DISTANCE * self.moved

    @property
    def faults(self) -> list[str]:
        """Why this is not exact; empty if it is."""
        found = []
        if not self.moved >= VISIBLE:  # no number is not visible either
            found.append(f"the weights moved by {self.moved:.1e} of their norm, too little to tell anything")
        if not self.error <= self.tolerance:
            found.append(f"the error {self.error:.1e} is above {self.tolerance:.1e}, most of it in {self.worst[0]}")
        if not self.apart <= self.rounding:
            found.append(f"the engine's gradient of a chunk is not the plain model's: they are {self.apart:.1e} apart")
            if not self.repeats:
                found.append("nor does the plain model give the same gradient twice for the same batch and seed")
        if not self.follows:
            found.append("the model's weights are not the optimizer's, rounded")
        return found
