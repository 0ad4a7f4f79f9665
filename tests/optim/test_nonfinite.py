"""Plain PyTorch: a NaN or an infinity in a chunk is named, and its window is left out or raised."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_vrgd import gsnr_stats
from ds_vrgd.optim import OPTIMIZERS, VRLAMB, VRSGD
from tests.optim.test_windows import REDUCING, Regression, reference_of, run_window, same

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")
NAN, INF = float("nan"), float("inf")


def copies(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [value for of_param in optimizer.state.values() for value in of_param.values()]
    return [t.detach().clone() for group in optimizer.param_groups for t in group["params"]] + [
        t.clone() for t in state
    ]


def spoiled_window(model: Regression, factor: float, window: range, at: int) -> None:
    for index, micro_batch in enumerate(window):
        (model.loss(micro_batch) * (factor if index == at else 1.0)).backward()


@pytest.mark.parametrize("name", REDUCING)
@pytest.mark.parametrize(("policy", "factor"), [("skip", NAN), ("error", INF)])
def test_the_window_is_left_out_whole(name: str, policy: str, factor: float, caplog: pytest.LogCaptureFixture) -> None:
    model = Regression()
    optimizer = OPTIMIZERS[name](model.named_parameters(), lr=0.1, nonfinite=policy)
    reference = reference_of(optimizer, model)
    run_window(model, optimizer, range(3), reference)
    assert not optimizer.overflow
    before = copies(optimizer)
    spoiled_window(model, factor, range(3, 8), at=3)
    where = r"rank 0, micro-batch 4 of the window: (NaN|inf) in 'b', (NaN|inf) in 'a'"
    if policy == "error":
        with pytest.raises(FloatingPointError, match=where):
            optimizer.step()
    else:
        with caplog.at_level(logging.WARNING, "ds_vrgd"):
            optimizer.step()
        (line,) = caplog.messages
        assert line.startswith(f"{name} skips a step whose gradient is not finite: rank 0, micro-batch 4")
    assert optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(before, copies(optimizer), strict=True))
    optimizer.zero_grad()
    run_window(model, optimizer, range(8, 11), reference)
    assert not optimizer.overflow
    assert gsnr_stats(optimizer).k == 3
    same(model, reference)


def test_only_the_layer_that_has_it_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Regression()
    optimizer = VRLAMB(model.named_parameters(), lr=0.1)
    # an edit after the backward passes: the chunks are finite, and what is in .grad is not
    for micro_batch in range(3):
        model.loss(micro_batch).backward()
    model.a.grad.fill_(INF)  # type: ignore[union-attr]
    optimizer.step()
    assert "every observed chunk is finite" in caplog.text
    caplog.clear()
    optimizer.zero_grad()
    for micro_batch in range(3):
        loss = model.loss(micro_batch) + (model.a.sum() * INF if micro_batch == 2 else 0.0)
        loss.backward()
    optimizer.step()
    assert "micro-batch 3 of the window: inf in 'a'" in caplog.text
    assert "'b'" not in caplog.text


def test_a_group_without_gsnr_is_looked_at_too() -> None:
    model = Regression()
    optimizer = VRSGD([{"params": [model.a]}, {"params": [model.b], "gamma": 1.0}], lr=0.1)
    for micro_batch in range(3):
        model.loss(micro_batch).backward()
    model.b.grad[0, 0] = NAN  # type: ignore[index]
    before = copies(optimizer)
    optimizer.step()
    assert optimizer.overflow
    assert all(torch.equal(a, b) for a, b in zip(before, copies(optimizer), strict=True))


def test_gamma_one_does_what_the_base_optimizer_does() -> None:
    # nothing is observed there, and nothing is checked
    model, other = Regression(), Regression()
    ours, theirs = VRSGD(model.parameters(), lr=0.1, gamma=1.0), torch.optim.SGD(other.parameters(), lr=0.1)
    for of, optimizer in ((model, ours), (other, theirs)):
        (of.loss(0) * NAN).backward()
        optimizer.step()
    assert torch.equal(model.a.isnan(), other.a.isnan())
    assert model.a.isnan().all()


def test_chunks_that_the_program_threw_away_are_not_counted() -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.5, nonfinite="error")
    reference = reference_of(optimizer, model)
    (model.loss(50) * NAN).backward()
    model.zero_grad()  # behind the optimizer's back
    run_window(model, optimizer, range(3), reference)
    same(model, reference)


def test_finite_chunks_whose_sum_overflows() -> None:
    model = Regression(torch.float16)
    optimizer = VRSGD(model.parameters(), lr=0.1, nonfinite="error")
    for _ in range(3):
        (model.a.sum() * 3e4 + model.b.sum()).backward()
    with pytest.raises(FloatingPointError, match="every observed chunk is finite"):
        optimizer.step()


def test_pickles_and_copies_keep_the_policy() -> None:
    optimizer: Any = copy.deepcopy(VRSGD(Regression().parameters(), lr=0.1, nonfinite="error"))
    assert optimizer.nonfinite == "error"


def test_chunks_of_a_longer_window_are_named_briefly(caplog: pytest.LogCaptureFixture) -> None:
    model = Regression()
    optimizer = VRSGD(model.parameters(), lr=0.1)
    for micro_batch in range(10):
        (model.loss(micro_batch) * NAN).backward()
    optimizer.step()
    assert caplog.text.count("micro-batch") == 8
    assert "2 more chunks" in caplog.text
    assert torch.isfinite(model.a).all()
