"""The passes through torch: shards in pieces, also where they are as odd as ZeRO hands them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vrgd import kernels
from ds_vrgd.moments import Layer, LayerTable, Moments, ShardLayout
from ds_vrgd.optim import OPTIMIZERS, passes
from ds_vrgd.optim.observer import Shard
from tests.optim.one_shard import NUMEL, OPTIONS, STARTS, run_of, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


@pytest.mark.parametrize(
    ("name", "arguments"), OPTIONS, ids=lambda value: value if isinstance(value, str) else "_".join(value)
)
@pytest.mark.parametrize(("k", "parts", "apart"), [(2, 1, True), (9, 3, False)])
def test_follows_the_reference(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any], k: int, parts: int, apart: bool
) -> None:
    monkeypatch.setattr(passes, "ELEMENTS_A_THREAD", 300)  # so that the larger layers are in several pieces
    found, reference, optimizer = trained(name, k, parts, apart, torch.device("cpu"), **arguments)
    at_most = {"rtol": 1e-2, "atol": 1e-3} if "gsnr_dtype" in arguments else {"rtol": 2e-5, "atol": 2e-6}
    inside = torch.zeros(NUMEL, dtype=torch.bool)
    for layer, expected in reference.params.items():
        torch.testing.assert_close(found[run_of(layer)].double(), expected, **at_most)
        inside[run_of(layer)] = True
    assert found[~inside].isnan().all(), "padding was written"
    for layer, last in reference.last_ratio.items() if optimizer.layer_statistics else ():
        statistics = optimizer.layer_statistics[-1]
        at_floor = (last == 0.1).double().mean().item()
        assert statistics.clamped_low[list(STARTS).index(layer)].item() == pytest.approx(at_floor, abs=2e-3)
    again, _, _ = trained(name, k, parts, apart, torch.device("cpu"), **arguments)
    assert torch.equal(again[inside], found[inside]), "two runs differ"


@pytest.mark.parametrize("name", ["VRAdam", "VRAdamW", "VRLAMB", "VRMomentum"])
def test_where_the_pieces_end_changes_no_more_than_rounding(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    whole, _, _ = trained(name, 4, 1, False, torch.device("cpu"))
    monkeypatch.setattr(passes, "ELEMENTS_A_THREAD", 77)
    cut, _, _ = trained(name, 4, 1, False, torch.device("cpu"))
    for layer in STARTS:
        torch.testing.assert_close(cut[run_of(layer)], whole[run_of(layer)], rtol=1e-6, atol=1e-7)


def one_layer(total: torch.Tensor, m2: torch.Tensor, parts: int) -> passes.TorchPasses:
    weights = torch.nn.Parameter(torch.ones_like(total))
    optimizer = OPTIMIZERS["VRLARS"]([weights], lr=0.1)
    shard = Shard(optimizer.param_groups[0], weights, total, {"momentum_buffer": torch.zeros_like(total)})
    table = LayerTable([ShardLayout.of("layer", total)], total.device)
    return passes.TorchPasses(optimizer, [shard], table, [Moments(total, m2, parts)], 8)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ratio_is_that_of_the_definition_also_where_it_is_none(dtype: torch.dtype, parts: int) -> None:
    # No gradient; no variance; a variance below the floor; one that overflows the quotient; two whose squares underflow
    # in part and in whole; an ordinary one.
    total = torch.tensor([0.0, 2.0, 2.0, 1e-3, 3e-19, 1e-21, 2.0], dtype=dtype)
    m2 = torch.tensor([0.0, 0.0, 1e-9, 1e-44, 1e-44, 0.0, 8.0], dtype=dtype)
    found = torch.cat(one_layer(total, m2, parts).ratio_sums())
    mean = total.double() / parts
    floor = torch.maximum(m2.double() / 8, 1e-6 * mean.square()).clamp(min=2.0**-126)
    expected = torch.stack([(mean.square() / floor).sum(), mean.square().sum(), m2.double().sum()])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-16, 1e-21, 1e-25, 0.0, 1e-38])
def test_norms_whose_squares_leave_the_range_of_fp32(size: float, dtype: torch.dtype) -> None:
    values = (torch.randn(5000, generator=torch.Generator().manual_seed(1)) * size).to(dtype)
    found = passes.sum_of_squares(values)
    torch.testing.assert_close(found.double(), values.double().square().sum(), rtol=1e-6, atol=0)


def test_what_the_kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.zeros(4)
    assert not kernels.usable(a, a), "they are on the CPU"
    chosen = [one_layer(a, a, 1)]
    shards, table = chosen[0].shards, LayerTable([ShardLayout.part(Layer("layer", 4), 4)], a.device)
    optimizer = OPTIMIZERS["VRLARS"]([torch.zeros(4)], lr=0.1)
    for usable, expected in ((False, passes.TorchPasses), (True, passes.KernelPasses)):
        monkeypatch.setattr(kernels, "usable", lambda *tensors, usable=usable: usable)
        found = passes.passes_over(optimizer, shards, table, [Moments(a, a)], 8)
        assert isinstance(found, expected)


def test_weights_of_a_shape_of_their_own_are_updated_as_others_are() -> None:
    """Channels last, as convolutions may have them: no view of the piece is flat."""
    results = []
    for form in (torch.contiguous_format, torch.channels_last):
        weights = torch.nn.Parameter(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)))
        weights.data = weights.data.to(memory_format=form)
        optimizer = OPTIMIZERS["VRLAMB"]([weights], lr=0.1, gsnr_dtype="bfloat16")
        for step in range(3):
            optimizer.zero_grad()
            for chunk in range(8):
                factor = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(8 * step + chunk))
                (weights * factor).sum().backward()
            optimizer.step()
        results.append((weights.detach(), optimizer.state[weights]["exp_avg_gsnr"]))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=1e-7)
    assert (results[1][1] == results[0][1]).float().mean() > 0.99


@pytest.mark.parametrize("name", ["VRAdamW", "VRLAMB", "VRMomentum", "VRLARS"])
def test_no_compiler_is_needed(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    found, reference, _ = trained(name, 4, 1, False, torch.device("cpu"))
    for layer, expected in reference.params.items():
        torch.testing.assert_close(found[run_of(layer)].double(), expected, rtol=2e-5, atol=2e-6)
