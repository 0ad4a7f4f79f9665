"""Statistics of the last step, by hand; the noise scale and its meter, on problems whose noise scale is known."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_vrgd
from ds_vrgd import gsnr
from ds_vrgd.doctor.reference import normalized_ratio, raw_ratio
from ds_vrgd.moments import Layer, LayerTable, ShardLayout
from ds_vrgd.noise import RatioOfMeans, gradient_noise
from ds_vrgd.optim import LAMB, VRLAMB, VRSGD, LayerStatistics, VROptimizer

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


@pytest.mark.parametrize(
    ("k", "low", "high"), [(8, 0.280, 0.275), (16, 0.261, 0.299), (32, 0.254, 0.309), (128, 0.249, 0.315)]
)
def test_shares_clamped_by_noise_are_those_of_a_simulation(k: int, low: float, high: float) -> None:
    assert ds_vrgd.clamped_by_noise(k, 0.1) == pytest.approx((low, high), abs=1e-3)


@pytest.mark.parametrize("k", [4, 5, 8, 33, 1000])
@pytest.mark.parametrize("gamma", [0.05, 0.5])
def test_shares_clamped_by_noise_are_integrals_of_students_density(k: int, gamma: float) -> None:
    def within(bound: float) -> float:
        t = torch.linspace(0.0, math.sqrt(bound * (k - 1) / (k - 3)), 20001, dtype=torch.float64)
        return 2.0 * float(torch.trapezoid(torch.distributions.StudentT(t.new_tensor(k - 1.0)).log_prob(t).exp(), t))

    assert ds_vrgd.clamped_by_noise(k, gamma) == pytest.approx((within(gamma), 1.0 - within(1.0)), abs=1e-8)


@pytest.mark.parametrize(("k", "gamma"), [(1, 0.1), (2, 0.1), (3, 0.1), (8, 1.0)])
def test_without_a_mean_or_without_gsnr_noise_has_no_shares(k: int, gamma: float) -> None:
    assert ds_vrgd.clamped_by_noise(k, gamma) is None


def test_pure_noise_has_the_shares_of_its_layers_gamma() -> None:
    # a share of 100,000 elements has a standard deviation of 0.0015, with that of the layer's mean
    generator = torch.Generator().manual_seed(3)
    chunks = [[torch.randn(100_000, generator=generator) for _ in range(2)] for _ in range(8)]
    gammas = {"one": 0.1, "two": 0.3}
    params = {name: nn.Parameter(torch.ones(100_000)) for name in gammas}
    optimizer = VRSGD([{"params": [(name, params[name])], "gamma": gammas[name]} for name in gammas], lr=0.0)
    give(optimizer, chunks)
    stats = ds_vrgd.gsnr_stats(optimizer)
    for name, layer in stats.layers.items():
        noise = (layer.noise_low, layer.noise_high)
        assert noise == ds_vrgd.clamped_by_noise(8, gammas[name])
        assert (layer.clamped_low, layer.clamped_high) == pytest.approx(noise, abs=0.006)
        assert layer.mean_ratio == pytest.approx(1 / 5, rel=0.03)
    lows = [ds_vrgd.clamped_by_noise(8, gamma)[0] for gamma in gammas.values()]  # type: ignore[index]
    assert stats.means().noise_low == pytest.approx(sum(lows) / 2)


def test_an_experts_noise_is_of_its_own_chunks() -> None:
    layout = ShardLayout((Layer("expert", 3, share=2), Layer("dense", 3)), (), 0)
    column = torch.ones(2)
    gamma = torch.tensor([0.1, 0.1], dtype=torch.float64)
    part = LayerStatistics(LayerTable([layout], torch.device("cpu")), 16, gamma, column, column, column, column, column)
    optimizer = VRSGD([nn.Parameter(torch.ones(3))], lr=0.0)
    optimizer.layer_statistics = [part]
    layers = ds_vrgd.gsnr_stats(optimizer).layers
    for name, k in (("expert", 8), ("dense", 16)):
        assert (layers[name].noise_low, layers[name].noise_high) == ds_vrgd.clamped_by_noise(k, 0.1)


@pytest.mark.parametrize(("k", "numel", "bias"), [(5, 64, 0.017), (8, 64, 0.006), (8, 16, 0.028)])
def test_bias_of_small_layers(k: int, numel: int, bias: float) -> None:
    # The standard deviation of the mean over 20,000 layers is below 0.001.
    chunks = torch.randn(k, 20_000, numel, generator=torch.Generator().manual_seed(4))
    raw = gsnr.raw_ratio(chunks.mean(0), (chunks - chunks.mean(0)).square().sum(0), k, 1e-6)
    ratio = gsnr.normalized_ratio(raw, raw.mean(1, keepdim=True))
    found = [float((ratio < 0.1).double().mean()), float((ratio > 1.0).double().mean())]
    noise = ds_vrgd.clamped_by_noise(k, 0.1)
    assert noise is not None
    worst = max(abs(share - of_noise) for share, of_noise in zip(found, noise, strict=True))
    assert worst == pytest.approx(bias, abs=0.003)


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


@pytest.mark.parametrize("cls", [VRSGD, VRLAMB])
@pytest.mark.parametrize("groups", [1, 2])
def test_layers_without_elements_are_left_out(cls: type[VROptimizer], groups: int) -> None:
    # an empty first layer, and an empty one in a group of its own or at the end
    chunks = random_chunks(4, (3,), (2, 2))
    alone = cls([("one", nn.Parameter(torch.ones(3))), ("two", nn.Parameter(torch.ones(2, 2)))], lr=0.1)
    give(alone, chunks)
    empty, full, last = ("none", torch.empty(0, 5)), [("one", torch.ones(3)), ("two", torch.ones(2, 2))], torch.empty(0)
    named = [(name, nn.Parameter(values)) for name, values in (empty, *full, ("last", last))]
    both = cls([{"params": named}] if groups == 1 else [{"params": named[:-1]}, {"params": named[-1:]}], lr=0.1)
    give(both, [[torch.empty(0, 5), *chunk, torch.empty(0)] for chunk in chunks])
    assert ds_vrgd.gsnr_stats(both) == ds_vrgd.gsnr_stats(alone)
    assert ds_vrgd.gsnr_stats(both).means() == ds_vrgd.gsnr_stats(alone).means()
    assert ds_vrgd.noise_scale(both, 2) == ds_vrgd.noise_scale(alone, 2)
    noises = [gradient_noise(optimizer, 2) for optimizer in (both, alone)]
    assert noises[0].names == noises[1].names == ("one", "two")
    assert torch.equal(noises[0].trace, noises[1].trace)
    assert torch.equal(noises[0].signal, noises[1].signal)
    meters = [ds_vrgd.NoiseScaleMeter(chunk_size=2) for _ in range(2)]
    for meter, optimizer in zip(meters, (both, alone), strict=True):
        assert meter.update(optimizer)
    assert meters[0].state_dict()["layers"] == meters[1].state_dict()["layers"]
    weights = [[p for group in o.param_groups for p in group["params"] if p.numel()] for o in (both, alone)]
    assert all(torch.equal(*pair) for pair in zip(*weights, strict=True))


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


# -- the meter


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
        with pytest.raises(ValueError, match="not a state of a NoiseScaleMeter"):
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
