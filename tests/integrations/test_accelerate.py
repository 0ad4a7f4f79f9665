"""Accelerate: the weights follow the reference, and no other optimizer takes our place unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integrations.cases import ACCELERATED

pytestmark = pytest.mark.slow

OF_WEIGHTS = 8e-7

Outcome = Callable[..., Any]


@pytest.mark.parametrize("name", [*ACCELERATED, "ZeRO-2, offloaded"])
def test_training_follows_the_reference(outcome: Outcome, name: str) -> None:
    result = outcome("accelerated", name)
    assert not isinstance(result, str), result
    error, moved, k, optimizer = result
    assert (k, optimizer) == (6, "VRLAMB")
    assert moved > 5e-3, "the steps are too small to tell anything"
    assert error <= OF_WEIGHTS


def test_swap_under_offload_is_an_error_with_the_way_out(outcome: Outcome) -> None:
    message = outcome("refused", "replaced by Accelerate")
    assert "RuntimeError: VRLAMB was made for these parameters, but the engine was given DeepSpeedCPUAdam" in message
    assert '"zero_force_ds_cpu_optimizer": false' in message


def test_instance_that_the_trainer_drops_is_an_error_with_the_way_out(outcome: Outcome) -> None:
    message = outcome("refused", "dropped by the Trainer")
    assert "RuntimeError: VRLAMB was made for these parameters, but the engine was given AdamW" in message
    assert "pass optimizer_cls_and_kwargs=(ds_vrgd.VRLAMB, {...})" in message


@pytest.mark.parametrize("mixin", [True, False])
def test_two_optimizers_named_are_an_error(outcome: Outcome, mixin: bool) -> None:
    message = outcome("refused", f"named twice, {mixin=}")
    assert '"optimizer" section (VRAdamW) makes the Trainer ignore optimizer_cls_and_kwargs (VRLAMB)' in message
