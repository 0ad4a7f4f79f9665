"""Parameters in two groups, by what large-batch recipes leave out of weight decay and trust ratio."""

from __future__ import annotations

from typing import Any

import torch


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, and vectors (biases, norms) without weight decay and without a trust ratio.

    What LAMB's recipes for BERT and LARS' for ResNets leave out of both. ``adapt`` is a group option of ds_vrgd's
    optimizers; others ignore it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if _dimensions(parameter) > 1]},
        {
            "params": [parameter for parameter in trained if _dimensions(parameter) <= 1],
            "weight_decay": 0.0,
            "adapt": False,
        },
    ]


def _dimensions(parameter: torch.nn.Parameter) -> int:
    # Under ZeRO-3's zero.Init a parameter is an empty tensor that keeps its shape aside.
    return len(getattr(parameter, "ds_shape", parameter.shape))
