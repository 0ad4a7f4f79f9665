"""The dense float64 reference: the formulas of every optimizer of ds_vrgd, given the chunk gradients in a list.

It shares no code with ds_vrgd. A layer is one named parameter tensor, whole; equations are the VRGD paper's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

AVERAGED = ("VRAdam", "VRAdamW", "VRLAMB")  # these average r over steps; the others use r itself
DEFAULTS: dict[str, Any] = {
    "momentum": 0.9,
    "nesterov": False,
    "betas": (0.9, 0.999),
    "beta3": 0.9,
    "eps": 1e-8,
    "weight_decay": 0.0,
    "gamma": 0.1,
    "gsnr_eps": 1e-6,
    "trust_coefficient": 0.001,
    "trust_clip": None,
    "bias_correction": True,
    "adapt": True,
    "prenormalize": False,
}
DEFAULTS_OF: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("VRMomentum", "VRAdam", "VRLARS", "LARS")},
    **{name: {"eps": 1e-6} for name in ("VRLAMB", "LAMB")},
    "VRSGD": {"momentum": 0.0},
    "VRAdamW": {"weight_decay": 0.01},
}


def raw_ratio(chunks: Sequence[Tensor], gsnr_eps: float) -> Tensor:
    """Return r of eq. 2: gbar^2 / max(var, eps * gbar^2) per element, 0/0 = 0, with the 1/k variance of eq. 7.

    The least variance is 2^-126, the smallest normal number of fp32. A layer whose gbar^2 has a mean below it counts as
    one without gradient.
    """
    g = torch.stack([chunk.detach().double() for chunk in chunks])
    gbar = g.mean(dim=0)
    var = ((g - gbar) ** 2).mean(dim=0)
    ratio = gbar**2 / torch.maximum(var, gsnr_eps * gbar**2).clamp(min=2.0**-126)
    return ratio if (gbar**2).mean() >= 2.0**-126 else torch.zeros_like(ratio)


def normalized_ratio(chunks: Sequence[Tensor], gsnr_eps: float) -> Tensor:
    """Return r of eq. 8: divided by its mean over the layer. A layer whose r is 0 everywhere stays 0 (0/0 = 0)."""
    r = raw_ratio(chunks, gsnr_eps)
    return torch.where(r == 0, 0.0, r / r.mean())


def gsnr_ratio(chunks: Sequence[Tensor], gamma: float, gsnr_eps: float) -> Tensor:
    """Return r of eq. 9: the normalized r of one layer, clamped to [gamma, 1]."""
    return normalized_ratio(chunks, gsnr_eps).clamp(gamma, 1.0)


class DenseOptimizer:
    """VRSGD VRMomentum VRAdam VRAdamW VRLARS VRLAMB LARS LAMB on float64 copies of `params`.

    `groups` is a list of {"params": [names], **overrides} that names each parameter exactly once. gamma = 1 turns
    variance reduction off; LARS and LAMB always have gamma = 1. `lr` has no default.
    """

    def __init__(
        self, name: str, params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]] | None = None, **hyper: Any
    ) -> None:
        self.name = name
        self.params: dict[str, Tensor] = {n: p.detach().double().clone() for n, p in params.items()}
        self.state: dict[str, dict[str, Any]] = {n: {"step": 0} for n in params}  # Tensor | int
        self.last_ratio: dict[str, Tensor] = {}
        defaults = {**DEFAULTS, **DEFAULTS_OF[name], **hyper}
        self.groups = [{**defaults, **group} for group in groups or [{"params": list(params)}]]
        for group in self.groups:
            group.pop("gsnr_dtype", None)  # everything is fp64 here
            if set(group) != {"params", "lr", *DEFAULTS}:
                raise ValueError(f"unknown or missing: {sorted(set(group) ^ {'params', 'lr', *DEFAULTS})}")
            if name in ("LARS", "LAMB"):
                group["gamma"] = 1.0
        if sorted(n for group in self.groups for n in group["params"]) != sorted(params):
            raise ValueError("each parameter must be in exactly one group")

    def step(
        self, chunks: Sequence[Mapping[str, Tensor]], *, clip: float = 0.0, mean: Mapping[str, Tensor] | None = None
    ) -> None:
        """Take one step from k chunks; a name that a chunk (or `mean`) lacks is a zero gradient.

        One chunk has no variance: the step then takes the last phat, and leaves p and the count of its ratios as they
        are; without a phat (VRSGD, VRMomentum, VRLARS; no ratio yet) it takes r = gamma.
        `mean` replaces gbar; `clip` > 0 then limits its global norm, as DeepSpeed does. r sees neither.
        """
        layers = {n: [self._gradient(chunk, n) for chunk in chunks] for n in self.params}
        gbar = {n: torch.stack(layer).mean(dim=0) for n, layer in layers.items()}
        if mean is not None:
            gbar = {n: self._gradient(mean, n) for n in self.params}
        if clip > 0:
            scale = min(1.0, clip / (global_norm(gbar) + 1e-6))
            gbar = {n: scale * g for n, g in gbar.items()}
        norm = global_norm(gbar)

        for group in self.groups:
            for n in group["params"]:
                state = self.state[n]
                state["step"] += 1
                r = torch.full_like(gbar[n], group["gamma"])
                if len(chunks) > 1:
                    self.last_ratio[n] = r = gsnr_ratio(layers[n], group["gamma"], group["gsnr_eps"])
                g = gbar[n]
                if group["prenormalize"] and self.name in ("LAMB", "VRLAMB") and norm > 0:
                    g = g / norm
                if group["gamma"] < 1:
                    averaged = last_average if len(chunks) == 1 else average_ratio
                    g = (averaged(state, r, group) if self.name in AVERAGED else r) * g
                elif self.name in AVERAGED:
                    last_average(state, r, group)  # only counts, for a gamma that is below 1 in other steps
                self.params[n].copy_(self._updated(self.params[n], g, state, group))

    def _gradient(self, gradients: Mapping[str, Tensor], n: str) -> Tensor:
        return gradients[n].detach().double() if n in gradients else torch.zeros_like(self.params[n])

    def _updated(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> Tensor:
        """Return the new w of the unchanged base optimizer, given g = ghat."""
        lr, eps, decay = (float(group[key]) for key in ("lr", "eps", "weight_decay"))
        if self.name in ("VRSGD", "VRMomentum"):
            return w - lr * momentum(state, g + decay * w, group)
        if self.name == "VRAdam":
            m, v = debiased_moments(state, g + decay * w, group)
            return w - lr * m / (v.sqrt() + eps)
        if self.name == "VRAdamW":
            m, v = debiased_moments(state, g, group)
            return (1 - lr * decay) * w - lr * m / (v.sqrt() + eps)
        if self.name in ("LARS", "VRLARS"):
            denominator = g.norm() + decay * w.norm() + eps
            ratio = trust_ratio(group["trust_coefficient"] * w.norm(), denominator, w, g, group)
            return w - lr * momentum(state, ratio * (g + decay * w), group)
        m, v = debiased_moments(state, g, group)
        u = m / (v.sqrt() + eps) + decay * w
        return w - lr * trust_ratio(w.norm(), u.norm(), w, u, group) * u


def global_norm(gradients: Mapping[str, Tensor]) -> float:
    """Return the 2-norm of the whole model's gradient."""
    return float(torch.cat([g.flatten() for g in gradients.values()]).norm())


def average_ratio(state: dict[str, Any], r: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return p = beta3 p + (1 - beta3) r, debiased; earlier steps without a p count as if they had seen this r."""
    beta3: float = group["beta3"]
    if "gsnr_step" in state:
        state["gsnr_step"] += 1
    ratios: int = state.get("gsnr_step", state["step"])
    before = torch.zeros_like(r)
    for _ in range(ratios - 1):
        before = beta3 * before + (1 - beta3) * r
    p: Tensor = beta3 * state.get("exp_avg_gsnr", before) + (1 - beta3) * r
    state["exp_avg_gsnr"] = p
    return p / float(1 - beta3**ratios)


def last_average(state: dict[str, Any], gamma: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return the phat of the last step that had a ratio, or `gamma` if none had; count a step that has none."""
    ratios: int = state.setdefault("gsnr_step", state["step"] - 1)
    return state["exp_avg_gsnr"] / float(1 - group["beta3"] ** ratios) if "exp_avg_gsnr" in state else gamma


def momentum(state: dict[str, Any], d: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return torch.optim.SGD's direction: the buffer starts as the first d, without dampening."""
    mu: float = group["momentum"]
    if mu == 0:
        return d
    buf: Tensor = mu * state.get("momentum_buffer", torch.zeros_like(d)) + d
    state["momentum_buffer"] = buf
    return d + mu * buf if group["nesterov"] else buf


def debiased_moments(state: dict[str, Any], g: Tensor, group: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return Adam's m and v, divided by 1 - beta^t unless bias_correction is off."""
    beta1, beta2 = group["betas"]
    state["exp_avg"] = m = beta1 * state.get("exp_avg", torch.zeros_like(g)) + (1 - beta1) * g
    state["exp_avg_sq"] = v = beta2 * state.get("exp_avg_sq", torch.zeros_like(g)) + (1 - beta2) * g**2
    if not group["bias_correction"]:
        return m, v
    return m / (1 - beta1 ** state["step"]), v / (1 - beta2 ** state["step"])


def trust_ratio(over: Tensor, under: Tensor, w: Tensor, u: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return over / under, 1 where w or u has no norm, then clamped to trust_clip; 1 without adaptation."""
    one = torch.ones_like(over)
    if not group["adapt"]:
        return one
    ratio = over / under if w.norm() > 0 and u.norm() > 0 else one
    return ratio if group["trust_clip"] is None else ratio.clamp(*group["trust_clip"])
