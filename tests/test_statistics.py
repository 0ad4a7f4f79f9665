"""What the last step measured, against numbers worked out by hand and a problem whose covariance is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd.doctor.reference import normalized_ratio, raw_ratio
from ds_vrgd.optim import LAMB, VRLAMB, VRSGD, VROptimizer

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning")


def give(optimizer: VROptimizer, chunks: list[list[Tensor]], scale: float = 1.0) -> None:
    """One step whose chunk gradients are ``chunks``, one tensor a parameter in each; the loss is scaled, too."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for chunk in chunks:
        loss = sum((param * gradient).sum() for param, gradient in zip(params, chunk, strict=True))
        (scale / len(chunks) * loss).backward()  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()


def random_chunks(k: int, *shapes: tuple[int, ...]) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    means = [torch.randn(shape, generator=generator) for shape in shapes]
    return [[mean + torch.randn(mean.shape, generator=generator) for mean in means] for _ in range(k)]


def test_by_hand() -> None:
    # Chunks (1, 3) and (3, -1): means 2, 1; variances 1, 4; ratios 4, 1/4; their mean 17/8. Normalized: 32/17 is above
    # 1, 2/17 = 0.118 below gamma = 0.2. The second layer has ratios 4, 4: normalized 1, 1, which nothing clamps.
    optimizer = VRSGD([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))], lr=0.0, gamma=0.2)
    give(
        optimizer,
        [[torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0])], [torch.tensor([3.0, -1.0]), torch.tensor([3.0, 3.0])]],
    )
    stats = ds_vrgd.gsnr_stats(optimizer)
    assert stats.k == 2
    assert list(stats.layers) == ["param_0", "param_1"]
    assert stats.layers["param_0"] == ds_vrgd.LayerGSNR(mean_ratio=17 / 8, clamped_low=0.5, clamped_high=0.5)
    assert stats.layers["param_1"] == ds_vrgd.LayerGSNR(mean_ratio=4.0, clamped_low=0.0, clamped_high=0.0)
    # |G|^2 over both layers: 4 + 1 + 4 + 4 = 13; variance 1 + 4 + 1 + 1 = 7, unbiased 14; B = 5 * 14 / (13 - 14/2)
    assert ds_vrgd.noise_scale(optimizer, chunk_size=5) == pytest.approx(35 / 3, rel=1e-6)


@pytest.mark.parametrize("cls", [VRSGD, VRLAMB])  # the counts travel alone, or with the norms
def test_equals_the_reference(cls: type[VROptimizer]) -> None:
    shapes: dict[str, tuple[int, ...]] = {"one": (7, 5), "two": (13,)}
    optimizer = cls([(name, nn.Parameter(torch.ones(shape))) for name, shape in shapes.items()], lr=1e-3, gamma=0.3)
    chunks = random_chunks(9, *shapes.values())
    give(optimizer, chunks)
    stats = ds_vrgd.gsnr_stats(optimizer)
    assert stats.k == 9
    assert list(stats.layers) == list(shapes)
    for index, name in enumerate(shapes):
        layer = [chunk[index] for chunk in chunks]
        normalized = normalized_ratio(layer, 1e-6)
        found = stats.layers[name]
        assert found.mean_ratio == pytest.approx(float(raw_ratio(layer, 1e-6).mean()), rel=1e-5)
        assert found.clamped_low == pytest.approx(float((normalized < 0.3).double().mean()), abs=1e-12)
        assert found.clamped_high == pytest.approx(float((normalized > 1.0).double().mean()), abs=1e-12)
        assert 0 < found.clamped_low < 1
        assert 0 < found.clamped_high < 1


def test_only_the_last_step_counts() -> None:
    optimizer = VRSGD([nn.Parameter(torch.ones(3))], lr=0.0)
    give(optimizer, random_chunks(4, (3,)))
    give(optimizer, [[torch.full((3,), value)] for value in (1.0, 2.0, 3.0)])
    stats = ds_vrgd.gsnr_stats(optimizer)
    assert stats.k == 3
    assert len(stats.layers) == 1
    assert stats.layers["param_0"].mean_ratio == pytest.approx(6.0, rel=1e-6)  # 2^2 over a variance of 2/3
    # |G|^2 = 12 and 3 * 2/3 = 2, unbiased 3
    assert ds_vrgd.noise_scale(optimizer, 1) == pytest.approx(3 / (12 - 3 / 3), rel=1e-6)


def test_noise_scale_of_a_known_covariance() -> None:
    # G = (1, 1, ..., 1) / 10 in 100 dimensions: |G|^2 = 1. A sample's gradient has covariance 0.64 on the diagonal, of
    # trace 64, so B = 64 samples. Chunks of 8 samples have covariance 0.08. The trace from 64 chunks in 100 dimensions
    # is good to sqrt(2 / 6300) = 2 %; |G|^2, to 2 |G| sqrt(0.08 / 64) = 7 %: three standard deviations are 22 %.
    generator = torch.Generator().manual_seed(11)
    chunks = [[0.1 + 0.08**0.5 * torch.randn(100, generator=generator)] for _ in range(64)]
    optimizer = VRSGD([nn.Parameter(torch.ones(100))], lr=0.0)
    give(optimizer, chunks)
    assert ds_vrgd.noise_scale(optimizer, chunk_size=8) == pytest.approx(64, rel=0.22)


@pytest.mark.parametrize("scale", [2.0**-10, 2.0**16])
def test_the_loss_scale_does_not_matter(scale: float) -> None:
    # powers of two move exponents only
    found = []
    for loss_scale in (1.0, scale):
        optimizer = VRSGD([nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(3))], lr=0.0)
        give(optimizer, random_chunks(8, (20,), (3,)), loss_scale)
        found.append((ds_vrgd.gsnr_stats(optimizer), ds_vrgd.noise_scale(optimizer, 2)))
    assert found[0] == found[1]


def test_layers_without_gsnr_are_left_out() -> None:
    groups: list[dict[str, Any]] = [
        {"params": [nn.Parameter(torch.ones(3))]},
        {"params": [nn.Parameter(torch.ones(2))]},
    ]
    chunks = random_chunks(4, (3,), (2,))
    alone = VRSGD([nn.Parameter(torch.ones(3))], lr=0.0)
    give(alone, [[chunk[0]] for chunk in chunks])
    both = VRSGD([groups[0], {**groups[1], "gamma": 1.0}], lr=0.0)
    give(both, chunks)
    assert ds_vrgd.gsnr_stats(both) == ds_vrgd.gsnr_stats(alone)
    assert ds_vrgd.noise_scale(both, 1) == ds_vrgd.noise_scale(alone, 1)


def test_the_optimizer_is_found_inside_wrappers() -> None:
    class Wrapper:
        def __init__(self, optimizer: Any) -> None:
            self.optimizer = optimizer

    optimizer = VRSGD([nn.Parameter(torch.ones(3))], lr=0.0)
    give(optimizer, random_chunks(4, (3,)))
    assert ds_vrgd.gsnr_stats(Wrapper(Wrapper(optimizer))) == ds_vrgd.gsnr_stats(optimizer)
    with pytest.raises(TypeError, match="Wrapper holds no optimizer of ds_vrgd"):
        ds_vrgd.gsnr_stats(Wrapper(torch.optim.SGD([nn.Parameter(torch.ones(1))])))


def test_nothing_measured() -> None:
    stepped = LAMB([nn.Parameter(torch.ones(3))])
    give(stepped, random_chunks(2, (3,)))
    for optimizer in (VRSGD([nn.Parameter(torch.ones(3))]), stepped):
        with pytest.raises(RuntimeError, match=r"has measured no GSNR: either it has not stepped yet, or gamma=1\.0"):
            ds_vrgd.gsnr_stats(optimizer)
        with pytest.raises(RuntimeError, match="has measured no GSNR"):
            ds_vrgd.noise_scale(optimizer, 4)


def test_the_size_of_a_chunk() -> None:
    optimizer = VRSGD([nn.Parameter(torch.ones(3))], lr=0.0)
    give(optimizer, random_chunks(4, (3,)))
    with pytest.raises(ValueError, match="chunk_size=None: give the samples of one micro-batch"):
        ds_vrgd.noise_scale(optimizer)
    for size in (0, -1, float("nan")):
        with pytest.raises(ValueError, match=f"chunk_size={size}"):
            ds_vrgd.noise_scale(optimizer, size)
    assert ds_vrgd.noise_scale(optimizer, 6) == pytest.approx(6 * ds_vrgd.noise_scale(optimizer, 1), rel=1e-6)
