"""Parameters in two groups: large-batch recipes leave vectors out of weight decay and trust ratio."""

from __future__ import annotations

from typing import Any

import torch

#: The options of the two groups of :func:`parameter_groups`.
GROUP_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"weight_decay": 0.0, "adapt": False})


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups: matrices, and vectors (biases, norms) without weight decay and without a trust ratio.

    LAMB's recipes for BERT and LARS' for ResNets do so. ``adapt`` is a group option of ds_vrgd's optimizers; others
    ignore it.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = [_dimensions(parameter) <= 1 for parameter in trained]
    return [
        {
            "params": [parameter for parameter, is_vector in zip(trained, vectors, strict=True) if is_vector == own],
            **options,
        }
        for own, options in zip((False, True), GROUP_OPTIONS, strict=True)
    ]


def _dimensions(parameter: torch.nn.Parameter) -> int:
    # Under ZeRO-3's zero.Init a parameter is an empty tensor; ``ds_shape`` is its shape.
    return len(getattr(parameter, "ds_shape", parameter.shape))
