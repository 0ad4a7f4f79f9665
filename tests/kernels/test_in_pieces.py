"""The kernels of the CPU: shards in pieces, also where they are as odd as ZeRO hands them out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_vrgd import gsnr, kernels

pytest.importorskip("triton")  # the tests of its kernels have the shard

from ds_vrgd.kernels import on_cpu
from tests.kernels.test_shards import NUMEL, OPTIONS, STARTS, run_of, trained

pytestmark = pytest.mark.filterwarnings("ignore:.*estimates the GSNR from only")


@pytest.mark.parametrize(
    ("name", "arguments"), OPTIONS, ids=lambda value: value if isinstance(value, str) else "_".join(value)
)
@pytest.mark.parametrize(("k", "parts", "apart"), [(2, 1, True), (9, 3, False)])
def test_follows_the_reference(
    monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any], k: int, parts: int, apart: bool
) -> None:
    monkeypatch.setattr(on_cpu, "ELEMENTS_A_THREAD", 300)  # so that the larger layers are in several pieces
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
    monkeypatch.setattr(on_cpu, "ELEMENTS_A_THREAD", 77)
    cut, _, _ = trained(name, 4, 1, False, torch.device("cpu"))
    for layer in STARTS:
        torch.testing.assert_close(cut[run_of(layer)], whole[run_of(layer)], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("first", [0, 12345, 2**31 + 7])
@pytest.mark.parametrize("step", [1, 2, 41])
def test_rounding_has_the_bits_of_the_definition(first: int, step: int) -> None:
    values = torch.rand(4099, generator=torch.Generator().manual_seed(step))
    seed = gsnr.rounding_seed(step)
    rounded = on_cpu._stochastic_bf16(values, first, seed)
    places = torch.arange(first, first + len(values))
    assert torch.equal(rounded.to(torch.bfloat16), gsnr.round_stochastically(values, places, seed))
    assert torch.equal(rounded.to(torch.bfloat16).float(), rounded), "not yet rounded"


def test_the_ratio_is_that_of_the_definition_also_where_it_is_none() -> None:
    from ds_vrgd.kernels.blocks import BlockTable
    from ds_vrgd.kernels.records import Source

    # No gradient; no variance; a variance below the floor; one that overflows the quotient; an ordinary one.
    total = torch.tensor([0.0, 2.0, 2.0, 1e-3, 2.0])
    m2 = torch.tensor([0.0, 0.0, 1e-9, 1e-44, 8.0])
    table = BlockTable([[(0, 5, 0, 0)]], 1, total.device)
    for parts in (1, 4):
        partials = on_cpu.empty_partials(table, 3)
        on_cpu.ratio_sums(table, 0, Source(None, None, total, m2, k=8.0, parts=parts, gsnr_eps=1e-6), partials)
        mean = total.double() / parts
        raw = gsnr.raw_ratio(mean, m2.double(), 8, 1e-6)
        expected = torch.stack([raw.sum(), mean.square().sum(), m2.double().sum()])
        torch.testing.assert_close(partials[:, 0], expected, rtol=1e-6, atol=0)


def test_what_they_serve() -> None:
    a = torch.zeros(4)
    assert kernels.serving(a, a) is on_cpu
    assert kernels.serving(a, a.double()) is None
    assert kernels.serving(a, torch.zeros(4, 2).t()) is None
