"""The oracle against arithmetic done by hand and against torch.optim."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd.doctor import reference
from ds_vrgd.doctor.reference import DenseOptimizer, gsnr_ratio, normalized_ratio, raw_ratio

EPS = 1e-6
# Two chunks of a layer of two elements, used throughout:
#   element 0: 1, 3    gbar = 2, var = (1 + 1)/2 = 1, r = 4/1   = 4
#   element 1: 3, -1   gbar = 1, var = (4 + 4)/2 = 4, r = 1/4
#   mean r = 17/8, normalized r = 32/17, 2/17; clamped to [0.1, 1]: 1, 2/17
CHUNKS = [torch.tensor([1.0, 3.0]), torch.tensor([3.0, -1.0])]
NAMED = [{"w": chunk} for chunk in CHUNKS]
R = torch.tensor([1.0, 2 / 17], dtype=torch.float64)
GBAR = torch.tensor([2.0, 1.0], dtype=torch.float64)


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=1e-15)


def twice(*gradient: float) -> list[dict[str, Tensor]]:
    """Two chunks with the same gradient."""
    return [{"w": vector(*gradient)}] * 2


def random_chunks(k: int, *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(k)]


# --- equations 2, 8, 9


def test_ratio_by_hand() -> None:
    same(raw_ratio(CHUNKS, EPS), vector(4, 0.25))
    same(normalized_ratio(CHUNKS, EPS), vector(32 / 17, 2 / 17))
    same(gsnr_ratio(CHUNKS, 0.1, EPS), R)


def test_gamma_clamps() -> None:
    same(gsnr_ratio(CHUNKS, 0.2, EPS), vector(1, 0.2))
    same(gsnr_ratio(CHUNKS, 1.0, EPS), vector(1, 1))


def test_zero_over_zero_is_zero() -> None:
    # element 0 has no gradient at all, element 1 a zero mean with a variance, element 2 as above
    chunks = [vector(0, 1, 1), vector(0, -1, 3)]
    same(raw_ratio(chunks, EPS), vector(0, 0, 4))
    same(normalized_ratio(chunks, EPS), vector(0, 0, 3))  # 4 over a mean of 4/3
    same(gsnr_ratio(chunks, 0.1, EPS), vector(0.1, 0.1, 1))
    same(gsnr_ratio([torch.zeros(2)] * 2, 0.1, EPS), vector(0.1, 0.1))


def test_cap_is_one_over_eps() -> None:
    same(raw_ratio([vector(5, -0.5)] * 3, 1e-6), vector(1e6, 1e6))
    same(raw_ratio([vector(5, -0.5)] * 3, 0.01), vector(100, 100))


def test_low_precision_chunks_are_widened_first() -> None:
    # 256 and 258 are bf16 numbers, their mean 257 is not: gbar^2 / var = 257^2 / 1
    same(raw_ratio([torch.tensor([256.0]).bfloat16(), torch.tensor([258.0]).bfloat16()], EPS), vector(257.0**2))


def test_mean_over_the_layer_is_one_before_clamping() -> None:
    same(normalized_ratio(random_chunks(8, 7, 5), EPS).mean(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("scale", [2.0**-40, 3e-17, 65536.0, -1.0])
def test_ratio_does_not_depend_on_scale(scale: float) -> None:
    chunks = random_chunks(8, 7, 5)
    same(raw_ratio([scale * c for c in chunks], EPS), raw_ratio(chunks, EPS))


def test_below_the_squares_of_fp32() -> None:
    # 2^-63 squared is fp32's smallest normal number: the variance of element 0 is a quarter of it, and counts as it
    tiny = 2.0**-63
    same(raw_ratio([vector(1.5 * tiny, 1), vector(0.5 * tiny, 3)], EPS), vector(1, 4))
    # so does that of a layer; one whose mean square is smaller has no gradient
    same(raw_ratio([vector(1.5 * tiny, tiny), vector(0.5 * tiny, tiny)], EPS), vector(1, 1))
    same(raw_ratio([vector(1.5 * tiny, 0), vector(0.5 * tiny, 0)], EPS), vector(0, 0))


# --- gamma = 1 is the base optimizer

TORCH: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = [
    ("VRSGD", torch.optim.SGD, {"weight_decay": 0.1}, {}),
    ("VRMomentum", torch.optim.SGD, {"weight_decay": 0.1}, {"momentum": 0.9}),
    ("VRMomentum", torch.optim.SGD, {"momentum": 0.8, "nesterov": True}, {}),
    ("VRAdam", torch.optim.Adam, {"betas": (0.8, 0.99)}, {}),
    ("VRAdam", torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}, {}),
    ("VRAdamW", torch.optim.AdamW, {}, {}),
    ("VRAdamW", torch.optim.AdamW, {"weight_decay": 0.3, "eps": 1e-3}, {}),
]


@pytest.mark.parametrize(("name", "base", "hyper", "torch_only"), TORCH)
def test_gamma_one_equals_torch(
    name: str, base: type[torch.optim.Optimizer], hyper: dict[str, Any], torch_only: dict[str, Any]
) -> None:
    start = dict(zip("ab", random_chunks(2, 3, 4, seed=1), strict=True))
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in start.items()}
    torch_optimizer: Any = base(list(theirs.values()), lr=0.01, **hyper, **torch_only)  # type: ignore[call-arg]
    ours = DenseOptimizer(name, start, lr=0.01, gamma=1.0, **hyper)
    for step in range(5):
        chunks = [dict(zip("ab", c, strict=True)) for c in random_chunks(4, 2, 3, 4, seed=step)]
        for n, p in theirs.items():
            p.grad = torch.stack([c[n] for c in chunks]).mean(dim=0)
        torch_optimizer.step()
        ours.step(chunks)
    for n, p in theirs.items():
        same(ours.params[n], p.detach())
        assert not torch.equal(ours.params[n], start[n])


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
def test_vr_with_gamma_one_is_the_base(name: str) -> None:
    base = DenseOptimizer(name, {"w": vector(3, 4)}, lr=0.1, weight_decay=0.1)
    vr = DenseOptimizer(f"VR{name}", {"w": vector(3, 4)}, lr=0.1, weight_decay=0.1, gamma=1.0)
    reduced = DenseOptimizer(f"VR{name}", {"w": vector(3, 4)}, lr=0.1, weight_decay=0.1)
    for _ in range(3):
        for optimizer in (base, vr, reduced):
            optimizer.step(NAMED)
    assert torch.equal(base.params["w"], vr.params["w"])
    assert not torch.equal(base.params["w"], reduced.params["w"])
    assert "exp_avg_gsnr" not in vr.state["w"]


# --- where r enters


def test_vrsgd_and_momentum_by_hand() -> None:
    # ghat = r * gbar = [2, 2/17]; L2 decay is added to it: d = ghat + 0.5 * w
    sgd = DenseOptimizer("VRSGD", {"w": vector(1, 1)}, lr=0.1, weight_decay=0.5)
    sgd.step(NAMED)
    same(sgd.last_ratio["w"], R)
    same(sgd.params["w"], vector(1 - 0.1 * 2.5, 1 - 0.1 * (2 / 17 + 0.5)))
    # the buffer is ghat, then 1.9 ghat: w = -lr * (1 + 1.9) * ghat; nesterov steps 1.9, then 1 + 0.9 * 1.9
    for nesterov, total in ((False, 2.9), (True, 1.9 + 2.71)):
        optimizer = DenseOptimizer("VRMomentum", {"w": vector(0, 0)}, lr=0.1, nesterov=nesterov)
        optimizer.step(NAMED)
        optimizer.step(NAMED)
        same(optimizer.state["w"]["momentum_buffer"], 1.9 * vector(2, 2 / 17))
        same(optimizer.params["w"], -0.1 * total * vector(2, 2 / 17))


@pytest.mark.parametrize("name", ["VRAdam", "VRAdamW", "VRLAMB"])
def test_averaged_ratio_by_hand(name: str) -> None:
    # step 1: r = [1, 2/17], p = 0.2 r, phat = p / 0.2 = r
    # step 2, chunks swapped between the elements: r = [2/17, 1], p = 0.8 * 0.2 r1 + 0.2 r2, phat = p / 0.36
    optimizer = DenseOptimizer(name, {"w": vector(3, 4)}, lr=0.1, beta3=0.8, betas=(0.9, 0.99), weight_decay=0)
    state = optimizer.state["w"]
    optimizer.step(NAMED)
    same(state["exp_avg_gsnr"], 0.2 * R)
    m, v = 0.1 * R * GBAR, 0.01 * (R * GBAR) ** 2
    same(state["exp_avg"], m)
    same(state["exp_avg_sq"], v)
    optimizer.step([{"w": chunk["w"].flip(0)} for chunk in NAMED])
    p = 0.16 * R + 0.2 * R.flip(0)
    same(state["exp_avg_gsnr"], p)
    ghat = p / 0.36 * GBAR.flip(0)
    same(state["exp_avg"], 0.9 * m + 0.1 * ghat)
    same(state["exp_avg_sq"], 0.99 * v + 0.01 * ghat**2)
    assert state["step"] == 2
    assert set(state) == {"step", "exp_avg", "exp_avg_sq", "exp_avg_gsnr"}
    same(optimizer.last_ratio["w"], R.flip(0))  # before averaging


def test_adam_decays_outside_variance_reduction() -> None:
    # L2 joins ghat, unscaled by r: m = 0.1 * (r * gbar + 0.5 * w)
    optimizer = DenseOptimizer("VRAdam", {"w": vector(1, 2)}, lr=0.1, weight_decay=0.5)
    optimizer.step(NAMED)
    same(optimizer.state["w"]["exp_avg"], 0.1 * vector(2 + 0.5, 2 / 17 + 1))


# --- LARS and LAMB


def test_lars_by_hand() -> None:
    # |w| = 5, |g| = 2: ratio = 0.001 * 5 / (2 + 0.1 * 5 + 0) = 0.002; d = 0.002 * ([0, 2] + 0.1 * [3, 4])
    optimizer = DenseOptimizer("LARS", {"w": vector(3, 4)}, lr=10, weight_decay=0.1, eps=0)
    optimizer.step(twice(0, 2))
    same(optimizer.state["w"]["momentum_buffer"], vector(0.0006, 0.0048))
    same(optimizer.params["w"], vector(2.994, 3.952))
    # eps is in the denominator: 5 / (2 + 3) = 1, and without momentum there is no buffer
    optimizer = DenseOptimizer("LARS", {"w": vector(3, 4)}, lr=1, eps=3, momentum=0, trust_coefficient=1)
    optimizer.step(twice(0, 2))
    same(optimizer.params["w"], vector(3, 2))
    assert set(optimizer.state["w"]) == {"step"}


def test_lars_momentum_follows_the_ratio() -> None:
    # lr = 0 holds w still: d = [0.0006, 0.0048] at every step and the buffer is 1, 1.9, 2.71 times d
    optimizer = DenseOptimizer("LARS", {"w": vector(3, 4)}, lr=0, weight_decay=0.1, eps=0, nesterov=True)
    for _ in range(3):
        optimizer.step(twice(0, 2))
    same(optimizer.state["w"]["momentum_buffer"], 2.71 * vector(0.0006, 0.0048))
    # a learning rate of 1 then moves w by d + 0.9 * (0.9 * 2.71 + 1) d = 4.0951 d
    optimizer.groups[0]["lr"] = 1
    optimizer.step(twice(0, 2))
    same(optimizer.params["w"], vector(3 - 4.0951 * 0.0006, 4 - 4.0951 * 0.0048))


def test_vrlars_norm_is_of_ghat() -> None:
    # ghat = [2, 2/17], |w| = 5, ratio = 5 / |ghat|: the step has length 5
    optimizer = DenseOptimizer("VRLARS", {"w": vector(3, 4)}, lr=1, trust_coefficient=1, eps=0)
    optimizer.step(NAMED)
    ghat = vector(2, 2 / 17)
    same(optimizer.params["w"], vector(3, 4) - 5 * ghat / (4 + 4 / 289) ** 0.5)


def test_lars_zero_norm_ratio_is_one() -> None:
    optimizer = DenseOptimizer("LARS", {"w": vector(0, 0)}, lr=0.1)
    optimizer.step(twice(3, -4))
    same(optimizer.params["w"], vector(-0.3, 0.4))
    optimizer = DenseOptimizer("LARS", {"w": vector(3, 4)}, lr=0.1, weight_decay=0.5)
    optimizer.step(twice(0, 0))
    same(optimizer.params["w"], 0.95 * vector(3, 4))


def test_lamb_by_hand() -> None:
    # eps = 0: mhat / sqrt(vhat) = sign(g) = [1, -1]; u = [1, -1] + 0.5 * [6, 8] = [4, 3]; ratio = 10 / 5
    optimizer = DenseOptimizer("LAMB", {"w": vector(6, 8)}, lr=0.1, weight_decay=0.5, eps=0)
    optimizer.step(twice(7, -0.1))
    same(optimizer.params["w"], vector(6 - 0.1 * 2 * 4, 8 - 0.1 * 2 * 3))


def test_lamb_without_bias_correction() -> None:
    # m = 0.2 g, v = 0.01 g^2: u = 2 sign(g), corrected sign(g); adapt = False steps by lr * u
    hyper: dict[str, Any] = {"lr": 0.1, "eps": 0, "betas": (0.8, 0.99), "adapt": False}
    for correction, size in ((True, 1.0), (False, 2.0)):
        optimizer = DenseOptimizer("LAMB", {"w": vector(6, 8)}, bias_correction=correction, **hyper)
        optimizer.step(twice(7, -0.1))
        same(optimizer.params["w"], vector(6 - 0.1 * size, 8 + 0.1 * size))


def test_lamb_zero_norm_ratio_is_one() -> None:
    optimizer = DenseOptimizer("LAMB", {"w": vector(0, 0)}, lr=0.1, eps=0)
    optimizer.step(twice(7, -0.1))
    same(optimizer.params["w"], vector(-0.1, 0.1))
    optimizer = DenseOptimizer("LAMB", {"w": vector(6, 8)}, lr=0.1)
    optimizer.step(twice(0, 0))
    same(optimizer.params["w"], vector(6, 8))


def test_trust_clip() -> None:
    hyper: dict[str, Any] = {
        "lr": 0.1,
        "eps": 0,
        "weight_decay": 0.5,
    }  # the step of test_lamb_by_hand: ratio 2, u = [4, 3]
    for clip, ratio in (((0, 1.5), 1.5), ((2.5, 9), 2.5), ((0, 9), 2.0)):
        optimizer = DenseOptimizer("LAMB", {"w": vector(6, 8)}, trust_clip=clip, **hyper)
        optimizer.step(twice(7, -0.1))
        same(optimizer.params["w"], vector(6, 8) - 0.1 * ratio * vector(4, 3))
    # the 1 of a zero norm is clamped too; without adaptation nothing is
    for adapt, ratio in ((True, 2.5), (False, 1.0)):
        for name, gradient in (("LAMB", vector(1, -1)), ("LARS", vector(3, -4))):
            optimizer = DenseOptimizer(name, {"w": vector(0, 0)}, lr=0.1, eps=0, trust_clip=(2.5, 9), adapt=adapt)
            optimizer.step([{"w": gradient}] * 2)
            same(optimizer.params["w"], -0.1 * ratio * gradient)


def test_prenormalize() -> None:
    # gbar = 3 and 4 in two layers: global norm 5. m = 0.1 * gbar / 5
    optimizer = DenseOptimizer("LAMB", {"a": vector(1), "b": vector(1)}, lr=0.1, prenormalize=True)
    optimizer.step([{"a": vector(3), "b": vector(4)}] * 2)
    same(optimizer.state["a"]["exp_avg"], vector(0.06))
    same(optimizer.state["b"]["exp_avg"], vector(0.08))
    # the norm is of gbar = [2, 1], not of ghat: m = 0.1 * r * gbar / sqrt(5)
    optimizer = DenseOptimizer("VRLAMB", {"w": vector(3, 4)}, lr=0.1, prenormalize=True)
    optimizer.step(NAMED)
    same(optimizer.state["w"]["exp_avg"], 0.1 * R * GBAR / 5**0.5)
    optimizer.step([{}, {}])  # a zero norm divides nothing
    assert optimizer.params["w"].isfinite().all()


# --- what the engine does to the mean


def test_clip() -> None:
    # global norm 5, clip 1: gbar is scaled by 1 / (5 + 1e-6); clip 6 leaves it
    for clip, scale in ((1.0, 1 / 5.000001), (6.0, 1.0), (0.0, 1.0)):
        optimizer = DenseOptimizer("VRSGD", {"a": vector(0), "b": vector(0)}, lr=1, gamma=1)
        optimizer.step([{"a": vector(3), "b": vector(4)}] * 2, clip=clip)
        same(optimizer.params["a"], vector(-3 * scale))
        same(optimizer.params["b"], vector(-4 * scale))
    # r is of the unclipped chunks; gbar = [2, 1] has norm sqrt(5)
    optimizer = DenseOptimizer("VRSGD", {"w": vector(0, 0)}, lr=1)
    optimizer.step(NAMED, clip=1.0)
    same(optimizer.last_ratio["w"], R)
    same(optimizer.params["w"], -R * GBAR / (5**0.5 + 1e-6))


def test_mean_replaces_gbar_but_not_r() -> None:
    optimizer = DenseOptimizer("VRSGD", {"w": vector(0, 0)}, lr=1)
    optimizer.step(NAMED, mean={"w": torch.tensor([2.5, 1.5], dtype=torch.bfloat16)})
    same(optimizer.params["w"], -R * vector(2.5, 1.5))


def test_missing_gradient_is_zero() -> None:
    # chunks 2 and (absent) 0: gbar = 1, var = 1; one element, so r = 1 after eq. 8
    optimizer = DenseOptimizer("VRSGD", {"w": vector(0), "unused": vector(1)}, lr=1, weight_decay=0.5)
    optimizer.step([{"w": vector(2)}, {}])
    same(optimizer.params["w"], vector(-1))
    same(optimizer.params["unused"], vector(0.5))


# --- groups and arguments


def test_groups_override() -> None:
    other: dict[str, Any] = {"params": ["b"], "lr": 0.5, "gamma": 1.0, "weight_decay": 0.0}
    params = {"w": vector(1, 1), "b": vector(1, 1)}
    optimizer = DenseOptimizer("VRSGD", params, [{"params": ["w"]}, other], lr=0.1, weight_decay=0.5)
    optimizer.step([{"w": c, "b": c} for c in CHUNKS])
    same(optimizer.params["w"], vector(1 - 0.1 * 2.5, 1 - 0.1 * (2 / 17 + 0.5)))
    same(optimizer.params["b"], 1 - 0.5 * GBAR)


def test_params_are_float64_copies_updated_in_place() -> None:
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = DenseOptimizer("VRSGD", {"w": w}, lr=0.1)
    before = optimizer.params["w"]
    optimizer.step(NAMED)
    assert before is optimizer.params["w"]
    assert before.dtype == torch.float64
    same(w.detach().double(), vector(1, 1))


def test_defaults() -> None:
    def of(name: str, key: str) -> Any:
        return DenseOptimizer(name, {"w": vector(1)}, lr=1).groups[0][key]

    assert [of(n, "gamma") for n in ("VRSGD", "VRLAMB", "LARS", "LAMB")] == [0.1, 0.1, 1, 1]
    assert [of(n, "eps") for n in ("VRAdam", "VRAdamW", "LARS", "VRLARS")] == [1e-8] * 4
    assert [of(n, "eps") for n in ("LAMB", "VRLAMB")] == [1e-6] * 2
    assert [of(n, "momentum") for n in ("VRSGD", "VRMomentum", "LARS", "VRLARS")] == [0, 0.9, 0.9, 0.9]
    assert [of(n, "weight_decay") for n in ("VRAdam", "VRAdamW", "VRLAMB")] == [0, 0.01, 0]


def test_bad_arguments() -> None:
    w = {"w": vector(1)}
    with pytest.raises(ValueError, match="gama"):
        DenseOptimizer("VRSGD", w, lr=1, gama=0.1)
    with pytest.raises(ValueError, match="lr"):
        DenseOptimizer("VRSGD", w)
    with pytest.raises(ValueError, match="exactly one group"):
        DenseOptimizer("VRSGD", w, [{"params": ["w"]}, {"params": ["w"]}], lr=1)
    with pytest.raises(KeyError):
        DenseOptimizer("SGD", w, lr=1)


def test_oracle_imports_nothing_of_the_package() -> None:
    assert not re.search(r"^\s*(from|import) (ds_vrgd|deepspeed)", inspect.getsource(reference), re.MULTILINE)


# --- one chunk


@pytest.mark.parametrize("name", ["VRAdam", "VRAdamW", "VRLAMB"])
def test_one_chunk_takes_the_last_averaged_ratio(name: str) -> None:
    # steps 1 and 3 are those of test_averaged_ratio_by_hand; step 2 has one chunk, g = [4, 2], and no ratio
    optimizer = DenseOptimizer(name, {"w": vector(3, 4)}, lr=0.1, beta3=0.8, betas=(0.9, 0.99), weight_decay=0)
    state = optimizer.state["w"]
    optimizer.step(NAMED)
    optimizer.step([{"w": vector(4, 2)}])
    same(state["exp_avg_gsnr"], 0.2 * R)  # as it was, and phat = r
    same(state["exp_avg"], 0.09 * R * GBAR + 0.1 * R * vector(4, 2))
    assert (state["step"], state["gsnr_step"]) == (2, 1)
    m = state["exp_avg"]
    optimizer.step([{"w": chunk["w"].flip(0)} for chunk in NAMED])
    p = 0.16 * R + 0.2 * R.flip(0)
    same(state["exp_avg_gsnr"], p)
    same(state["exp_avg"], 0.9 * m + 0.1 * (p / 0.36) * GBAR.flip(0))  # of two ratios, in three steps
    assert (state["step"], state["gsnr_step"]) == (3, 2)


@pytest.mark.parametrize("name", ["VRSGD", "VRAdam"])
def test_one_chunk_without_an_earlier_ratio_takes_gamma(name: str) -> None:
    # m = 0.1 * 0.3 * g; SGD moves by lr * 0.3 * g
    optimizer = DenseOptimizer(name, {"w": vector(0, 0)}, lr=1, gamma=0.3)
    optimizer.step([{"w": vector(4, -2)}])
    if name == "VRSGD":
        same(optimizer.params["w"], -0.3 * vector(4, -2))
        return
    same(optimizer.state["w"]["exp_avg"], 0.03 * vector(4, -2))
    assert set(optimizer.state["w"]) == {"step", "exp_avg", "exp_avg_sq", "gsnr_step"}
    assert optimizer.state["w"]["gsnr_step"] == 0
    optimizer.step(NAMED)  # the first ratio is phat itself
    ratio = optimizer.last_ratio["w"]
    same(optimizer.state["w"]["exp_avg_gsnr"], 0.1 * ratio)
    same(optimizer.state["w"]["exp_avg"], 0.027 * vector(4, -2) + 0.1 * ratio * GBAR)
