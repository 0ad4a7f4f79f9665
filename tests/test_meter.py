"""The batch-size meter, against problems whose noise scale is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd import gsnr
from ds_vrgd.meter import RatioOfMeans
from ds_vrgd.optim import VRSGD
from tests.test_statistics import give, random_chunks

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only k:UserWarning")


def chi_square(freedom: int, trials: int, generator: torch.Generator) -> Tensor:
    return 2.0 * torch._standard_gamma(torch.full((trials,), freedom / 2.0, dtype=torch.float64), generator=generator)


@pytest.mark.parametrize(
    ("dimensions", "k", "batches", "steps", "decay"),
    [
        (20, 8, 1.0, 20, 1.0),
        (200, 8, 0.1, 50, 0.99),
        (200, 2, 0.25, 300, 0.98),
        (5, 8, 0.1, 50, 0.99),  # hardly ever bounded from above
        (200, 8, 1.0, 6, 0.99),  # few steps: Student's t, not a normal
    ],
)
def test_interval_covers_as_often_as_it_says(dimensions: int, k: int, batches: float, steps: int, decay: float) -> None:
    """4000 meters side by side watch a gradient of known |G|^2 and Sigma, whose batch is ``batches`` noise scales."""
    trials, trace, size = 4000, 3.0, 4
    right = k * size / batches
    generator = torch.Generator().manual_seed(17)
    signal = trace / right
    variance = trace / dimensions / size  # of one element of a chunk's mean
    means = RatioOfMeans(decay)
    for _ in range(steps):
        along = signal**0.5 + (variance / k) ** 0.5 * torch.randn(trials, generator=generator, dtype=torch.float64)
        across = variance / k * chi_square(dimensions - 1, trials, generator)
        spread = variance / k * chi_square(dimensions * (k - 1), trials, generator)
        means.add(*gsnr.noise_and_signal(along.square() + across, spread, k, size))
    value, low, high = means.intervals(0.95)
    # 95 % of 4000: three standard deviations are 1 %. Student's t and Fieller's set are exact for normal values alone.
    assert ((low <= right) & (right <= high)).double().mean() == pytest.approx(0.95, abs=0.02)
    assert ((low <= value) & (value <= high)).all()
    if dimensions > 5:
        assert value.median() == pytest.approx(right, rel=0.02)


def test_ratio_of_weighted_means_by_hand() -> None:
    # Weights 1/4, 1/2, 1: means (2/4 + 4/2 + 3) / (7/4) = 22/7 and (1/4 + 2/2 + 1) / (7/4) = 9/7
    means = RatioOfMeans(0.5)
    for top, bottom in ((2.0, 1.0), (4.0, 2.0), (3.0, 1.0)):
        means.add(torch.tensor([top]), torch.tensor([bottom]))
    value, low, high = means.intervals(0.95)[:, 0].tolist()
    assert value == pytest.approx(22 / 9, rel=1e-14)
    assert (low, high) == (0.0, math.inf)  # (7/4)^2 / (21/16) = 7/3 steps set no bounds


def test_mean_that_is_lost_in_the_noise_has_no_upper_bound() -> None:
    means = RatioOfMeans(1.0)
    for step in range(20):
        means.add(torch.tensor([3.0, 3.0]), torch.tensor([0.1 + (-1.0) ** step, -0.1 + (-1.0) ** step]))
    value, low, high = means.intervals(0.95).tolist()
    assert value == [pytest.approx(30.0), math.inf]
    assert high == [math.inf, math.inf]
    assert all(0.0 < bound < 30.0 for bound in low)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.tanh(self.hidden(x)))
        return logits


def test_per_sample_gradients() -> None:
    """The samples are drawn from 64 with replacement, so that G and tr(Sigma) are known from their own gradients."""
    torch.manual_seed(3)
    model = Net()
    x, y = torch.randn(64, 6), torch.randint(3, (64,))

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, params, (x.unsqueeze(0),))
        return nn.functional.cross_entropy(logits, y.unsqueeze(0))

    params = {name: param.detach() for name, param in model.named_parameters()}
    of_samples = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, x, y)
    traces = {name: float(grad.double().var(0, unbiased=False).sum()) for name, grad in of_samples.items()}
    squares = {name: float(grad.double().mean(0).square().sum()) for name, grad in of_samples.items()}

    optimizer = VRSGD(list(model.named_parameters()), lr=0.0)
    meter = ds_vrgd.NoiseScaleMeter(chunk_size=4, decay=1.0)
    for _ in range(300):
        for drawn in torch.randint(64, (8, 4)):
            (nn.functional.cross_entropy(model(x[drawn]), y[drawn]) / 8).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert meter.update(optimizer)
    found = meter.estimate()
    assert (found.steps, found.confidence, list(found.layers)) == (300, 0.95, list(traces))
    right = sum(traces.values()) / sum(squares.values())
    assert found.low <= right <= found.high
    assert found.high / found.low < 1.4
    assert sum(one.low <= traces[name] / squares[name] <= one.high for name, one in found.layers.items()) >= 3


def feed(meter: ds_vrgd.NoiseScaleMeter, optimizer: VRSGD, steps: Sequence[list[list[Tensor]]]) -> None:
    for chunks in steps:
        give(optimizer, chunks)
        assert meter.update(optimizer)


def random_steps(count: int, k: int, *shapes: tuple[int, ...]) -> list[list[list[Tensor]]]:
    generator = torch.Generator().manual_seed(7)
    return [
        [[0.5 + torch.randn(shape, generator=generator) for shape in shapes] for _ in range(k)] for _ in range(count)
    ]


def two_layers() -> VRSGD:
    return VRSGD([("a", nn.Parameter(torch.ones(9))), ("b", nn.Parameter(torch.ones(4)))], lr=0.0)


def test_a_step_counts_once_and_one_that_was_left_out_not_at_all() -> None:
    optimizer, meter = two_layers(), ds_vrgd.NoiseScaleMeter(chunk_size=2)
    assert not meter.update(optimizer)  # none yet
    feed(meter, optimizer, random_steps(5, 4, (9,), (4,)))
    before = meter.estimate()
    assert not meter.update(optimizer)
    bad = random_chunks(4, (9,), (4,))
    bad[1][0][3] = math.nan
    give(optimizer, bad)
    assert optimizer.overflow
    assert not meter.update(optimizer)
    assert meter.estimate() == before
    assert before.steps == 5


def test_state_goes_through_json_bit_for_bit() -> None:
    steps = random_steps(9, 4, (9,), (4,))
    straight, first = ds_vrgd.NoiseScaleMeter(chunk_size=2), ds_vrgd.NoiseScaleMeter(chunk_size=2)
    feed(straight, two_layers(), steps)
    feed(first, two_layers(), steps[:6])
    second = ds_vrgd.NoiseScaleMeter(chunk_size=2)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    feed(second, two_layers(), steps[6:])
    assert second.estimate() == straight.estimate()
    empty = ds_vrgd.NoiseScaleMeter()
    empty.load_state_dict(json.loads(json.dumps(empty.state_dict())))
    for wrong in ({}, {"steps": 3, "layers": ["a"], "sums": [[1.0]]}):
        with pytest.raises(ValueError, match="no state of a NoiseScaleMeter"):
            second.load_state_dict(wrong)


def test_layers_that_get_no_gradient_wait() -> None:
    """A layer's estimate is that of the steps in which it was measured, in whatever order the layers come."""
    steps = random_steps(8, 4, (9,), (4,))
    optimizer, meter = two_layers(), ds_vrgd.NoiseScaleMeter(chunk_size=2)
    alone, only_b = VRSGD([("b", nn.Parameter(torch.ones(4)))], lr=0.0), ds_vrgd.NoiseScaleMeter(chunk_size=2)
    feed(only_b, alone, [[chunk[1:] for chunk in step] for step in steps])
    a, b = optimizer.param_groups[0]["params"]
    for number, step in enumerate(steps):
        for chunk in step:
            loss = (b * chunk[1]).sum() / 4
            if number % 2:
                loss = loss + (a * chunk[0]).sum() / 4
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert meter.update(optimizer)
    found = meter.estimate()
    assert found.layers["b"] == only_b.estimate().layers["b"]
    assert found.layers["a"].low >= 0.0
    assert list(found.layers) == ["b", "a"]
    assert found.steps == 8


def test_batches_of_several_sizes_are_averaged_in_one_unit() -> None:
    """Half of the steps have twice the chunks: the noise scale is that of a sample, so all of them measure the same."""
    meter = ds_vrgd.NoiseScaleMeter(chunk_size=1, decay=1.0)
    optimizer = VRSGD([nn.Parameter(torch.ones(400))], lr=0.0)
    feed(meter, optimizer, random_steps(15, 4, (400,)))
    first = meter.estimate().value
    feed(meter, optimizer, random_steps(15, 8, (400,)))
    assert first == pytest.approx(4.0, rel=0.1)  # variance 1 over 0.5^2, in every element
    assert meter.estimate().value == pytest.approx(4.0, rel=0.1)


def test_arguments() -> None:
    for name, value in (("decay", 0.0), ("decay", 1.1), ("confidence", 1.0), ("chunk_size", 0.0)):
        with pytest.raises(ValueError, match=f"{name}={value}"):
            ds_vrgd.NoiseScaleMeter(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="has counted no step: call update"):
        ds_vrgd.NoiseScaleMeter().estimate()
    optimizer = two_layers()
    give(optimizer, random_chunks(4, (9,), (4,)))
    with pytest.raises(ValueError, match="chunk_size=None"):
        ds_vrgd.NoiseScaleMeter().update(optimizer)
