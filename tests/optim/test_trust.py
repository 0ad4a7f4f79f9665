"""Trust ratios of many layers at once: each layer by its own norms and by what its param group says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vrgd.optim import LAMB, LARS

# What may differ between groups; how many parameters, and of which sizes.
GROUPS: tuple[tuple[dict[str, Any], tuple[int, ...]], ...] = (
    ({"lr": 0.1}, (3, 5000, 7)),
    ({"lr": 0.2, "adapt": False}, (4,)),
    ({"lr": 0.3, "trust_clip": (0.5, 0.6), "weight_decay": 0.1}, (2, 6)),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # in kernels, and not
@pytest.mark.parametrize("optimizer", [LAMB, LARS])
def test_many_layers_are_updated_as_each_would_be_alone(optimizer: type[Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [[torch.randn(size, generator=generator, dtype=dtype) for size in sizes] for _, sizes in GROUPS]
    grads = [[torch.randn(size, generator=generator, dtype=dtype) for size in sizes] for _, sizes in GROUPS]

    def trained(chosen: list[tuple[int, int]]) -> list[torch.Tensor]:
        params = {place: start[place[0]][place[1]].clone().requires_grad_() for place in chosen}
        groups = [
            {"params": [param for place, param in params.items() if place[0] == number]} | options
            for number, (options, _) in enumerate(GROUPS)
        ]
        made = optimizer([group for group in groups if group["params"]])
        for (number, place), param in params.items():
            param.grad = grads[number][place].clone()
        made.step()
        return [param.detach() for param in params.values()]

    places = [(number, place) for number, (_, sizes) in enumerate(GROUPS) for place in range(len(sizes))]
    together = trained(places)
    for place, found in zip(places, together, strict=True):
        assert torch.equal(found, *trained([place])), place
