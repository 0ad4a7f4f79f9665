from __future__ import annotations

import pytest
import torch

from benchmarks.bert import NETWORKS
from benchmarks.cpu_update import CONTENDERS, alternate
from benchmarks.shards import layers_of, shard_layout


@pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")
@pytest.mark.parametrize("name", [name for name in CONTENDERS if "compile" not in name])
def test_a_contender_updates_the_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Parameter] = []

    class Noted(torch.nn.Parameter):
        def __init__(self, *args: object, **kwargs: object) -> None:
            made.append(self)

    layout = shard_layout(layers_of(NETWORKS["tiny"]), 0, 1)
    monkeypatch.setattr(torch.nn, "Parameter", Noted)
    step = CONTENDERS[name](layout)
    before = made[0].detach().clone()
    step()
    assert made[0].shape == (layout.numel,)
    assert not torch.equal(made[0], before)


def test_they_take_turns_and_the_first_turn_does_not_count() -> None:
    turns: list[str] = []
    own, beside = alternate(lambda: turns.append("own"), lambda: turns.append("beside"), 3)
    assert turns == ["own", "beside"] * 4
    assert own.count == beside.count == 3
