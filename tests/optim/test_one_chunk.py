"""A window of one chunk among others, as at the end of an epoch: the step uses the last ratio."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch

import ds_vrgd
from ds_vrgd.optim import OPTIMIZERS
from tests.optim.training import BOUND, Training

pytestmark = pytest.mark.filterwarnings("ignore:.*(the GSNR from only k|this window has one chunk):UserWarning")

VR = [name for name, cls in OPTIMIZERS.items() if cls.reduces_variance]
AVERAGED = ("VRAdam", "VRAdamW", "VRLAMB")
#: Micro-batches of each window: the last of an epoch is short, or the first, which no ratio precedes.
WINDOWS = {"last": (4, 4, 1, 4, 1, 4), "first": (1, 4, 4, 1, 4)}


def follow(training: Training, accumulations: tuple[int, ...], first: int = 0) -> None:
    for step, accumulation in enumerate(accumulations, start=first):
        training.accumulation = accumulation
        training.step(step, clip=0.05)


@pytest.mark.parametrize("which", WINDOWS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_windows_of_one_chunk_follow_the_reference(name: str, which: str) -> None:
    training = Training(name)
    follow(training, WINDOWS[which])
    assert training.moved() > 1e-3
    assert training.error() <= BOUND


@pytest.mark.parametrize("first", [0.2, 1.0])
@pytest.mark.parametrize("name", AVERAGED)
def test_a_step_at_gamma_1_brings_no_ratio_to_the_average(name: str, first: float) -> None:
    training = Training(name, gamma=0.2)
    for step, gamma in enumerate((first, 0.2, 0.2, 1.0, 0.2)):
        for group in (*training.optimizer.param_groups, *training.reference.groups):
            group["gamma"] = gamma
        training.step(step)
    assert training.error() <= BOUND
    states, ratios = training.optimizer.state.values(), 4 - (first == 1.0)
    assert {(float(state["step"]), state["gsnr_step"]) for state in states} == {(5.0, ratios)}
    for state in states:  # so that phat is a mean of ratios, none of which is below gamma
        assert float(state["exp_avg_gsnr"].min()) / (1 - 0.9**ratios) >= 0.2 * (1 - 1e-6)


def test_options_of_vrlamb_do_not_matter() -> None:
    training = Training("VRLAMB", prenormalize=True, beta3=0.5, gamma=0.5, bias_correction=False)
    follow(training, WINDOWS["first"])
    assert training.error() <= BOUND


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_average_keeps_its_bits_and_its_count(dtype: str) -> None:
    training = Training("VRLAMB", gsnr_dtype=dtype)
    follow(training, (4, 4))
    states = training.optimizer.state.values()
    assert not any("gsnr_step" in state for state in states)
    before = [state["exp_avg_gsnr"].clone() for state in states]
    follow(training, (1,), first=2)
    assert all(torch.equal(old, state["exp_avg_gsnr"]) for old, state in zip(before, states, strict=True))
    assert {(float(state["step"]), state["gsnr_step"]) for state in states} == {(3.0, 2)}
    follow(training, (4,), first=3)
    assert not any(torch.equal(old, state["exp_avg_gsnr"]) for old, state in zip(before, states, strict=True))
    assert {(float(state["step"]), state["gsnr_step"]) for state in states} == {(4.0, 3)}


@pytest.mark.parametrize("windows", [(4, 1, 4, 1, 4, 4), (1, 4, 4, 4, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", VR)
def test_a_resume_between_is_bitwise(name: str, dtype: torch.dtype, windows: tuple[int, ...]) -> None:
    # the resumed run begins with the short window: no window in its process has had a ratio
    straight, resumed = (Training(name) for _ in range(2))
    for training in (straight, resumed):
        training.model.to(dtype)
        for step, accumulation in enumerate(windows):
            if training is resumed and step in (1, 2, 3, 4):
                saved = pickle.loads(pickle.dumps(training.optimizer.state_dict()))
                training.optimizer = OPTIMIZERS[name](training.optimizer.param_groups, lr=1e-9)
                training.optimizer.load_state_dict(saved)
            training.accumulation = accumulation
            training.backward(step)
            training.optimizer.step()
            training.optimizer.zero_grad()
    for one, two in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)
    counts = {state.get("gsnr_step") for state in resumed.optimizer.state.values()}
    assert counts == ({sum(count > 1 for count in windows)} if name in AVERAGED else {None})


@pytest.mark.parametrize("name", AVERAGED)
def test_a_resume_before_the_first_ratio_is_bitwise(name: str) -> None:
    straight, resumed = (Training(name) for _ in range(2))
    for training in (straight, resumed):
        follow(training, (1,))
        if training is resumed:
            training.optimizer.load_state_dict(pickle.loads(pickle.dumps(training.optimizer.state_dict())))
        follow(training, (4, 4), first=1)
    for one, two in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, two)


def test_a_base_checkpoint_may_be_continued_by_such_a_window() -> None:
    base, training = Training("LAMB"), Training("VRLAMB")
    follow(base, (4, 4))
    training.model.load_state_dict(base.model.state_dict())
    with pytest.warns(UserWarning, match="begins anew"):
        training.optimizer.load_state_dict(base.optimizer.state_dict())
    training.reference.state = base.reference.state
    training.reference.params = base.reference.params
    follow(training, (1,), first=2)
    training.optimizer.load_state_dict(pickle.loads(pickle.dumps(training.optimizer.state_dict())))
    follow(training, (4, 4), first=3)
    assert training.error() <= BOUND
    assert {state["gsnr_step"] for state in training.optimizer.state.values()} == {4}


def messages(name: str, accumulations: tuple[int, ...]) -> tuple[list[warnings.WarningMessage], Any]:
    training = Training(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        follow(training, accumulations)
    return [w for w in caught if "one chunk" in str(w.message)], training.optimizer


@pytest.mark.parametrize(
    ("name", "windows", "ratio"),
    [
        ("VRLAMB", (4, 1, 4, 1), "the averaged ratio"),
        ("VRLAMB", (1, 4, 1), "r = gamma"),  # no window before the first has had a ratio
        ("VRMomentum", (4, 1, 4, 1), "r = gamma"),
    ],
)
def test_it_is_reported_once(name: str, windows: tuple[int, ...], ratio: str) -> None:
    (told,), optimizer = messages(name, windows)
    assert str(told.message).startswith(f"{name}: this window has one chunk, which has no variance")
    assert f"the step uses {ratio}" in str(told.message)
    assert not optimizer.layer_statistics
    with pytest.raises(RuntimeError, match=r"has measured no GSNR: .* its last window had one chunk"):
        ds_vrgd.gsnr_stats(optimizer)


@pytest.mark.parametrize("name", VR)
def test_one_chunk_in_every_window_is_an_error_at_the_second(name: str) -> None:
    training = Training(name)
    follow(training, (1,))
    before = training.model.tokens.weight.clone()
    with pytest.raises(RuntimeError, match=rf"{name} saw k = 1 chunk .* at least 2 .*accumulation_steps.*gamma=1\.0"):
        follow(training, (1,), first=1)
    assert torch.equal(training.model.tokens.weight, before)
