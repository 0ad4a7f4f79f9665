"""Sums over layers and values laid over shards, with padding that must never be read."""

import pytest
import torch

from ds_vrgd.moments import SUM_DTYPE, Layer, LayerTable, Ranks, Segment, ShardLayout

NAN = float("nan")
# Twelve elements: 2 of padding, 3 of layer "b", 1 of padding, 4 of layer "a", 2 of padding; layer "c" lives elsewhere.
LAYERS = (Layer("a", 10), Layer("b", 3), Layer("c", 7))
LAYOUT = ShardLayout(LAYERS, (Segment(1, 2, 3), Segment(0, 6, 4)), 12)
FLAT = torch.tensor([NAN, NAN, 1.0, 2.0, 3.0, NAN, 1.0, -1.0, 2.0, 0.5, NAN, NAN])


def test_sums_never_read_padding() -> None:
    # a: 1 + 1 + 2 + 0.5; b: 1 + 2 + 3; c: nothing here
    assert LAYOUT.sums(FLAT, 1).tolist() == [4.5, 6.0, 0.0]
    # a: 1 + 1 + 4 + 0.25; b: 1 + 4 + 9
    torch.testing.assert_close(
        LAYOUT.sums(FLAT, 2), torch.tensor([6.25, 14.0, 0.0], dtype=SUM_DTYPE), rtol=1e-15, atol=0
    )


def test_sums_are_wide() -> None:
    # in fp32 2**24 + 1 + 1 is 2**24
    flat = torch.tensor([2.0**24, 1.0, 1.0])
    assert ShardLayout.whole("w", 3).sums(flat, 1).item() == 2**24 + 2
    assert ShardLayout.whole("w", 2).sums(torch.tensor([2.0**100, 2.0**100]), 2).item() == pytest.approx(2.0**201)


def test_spread_by_hand() -> None:
    values = torch.tensor([5.0, 6.0, 7.0])
    assert LAYOUT.spread(values).tolist() == [1, 1, 6, 6, 6, 1, 5, 5, 5, 5, 1, 1]
    assert LAYOUT.spread(values, padding=0.0).tolist() == [0, 0, 6, 6, 6, 0, 5, 5, 5, 5, 0, 0]
    assert LAYOUT.spread(values.double()).dtype == torch.float64


def test_one_whole_layer_is_a_scalar() -> None:
    layout = ShardLayout.whole("w", 4)
    assert layout.spread(torch.tensor([3.0])).tolist() == [3.0]  # broadcastable, nothing is allocated
    assert layout.sums(torch.tensor([1.0, 2.0, 3.0, 4.0]), 1).tolist() == [10.0]


def test_one_layer_with_padding() -> None:
    layout = ShardLayout((Layer("w", 5),), (Segment(0, 0, 2),), 3)
    assert layout.spread(torch.tensor([3.0])).tolist() == [3.0, 3.0, 1.0]
    assert layout.sums(torch.tensor([1.0, 2.0, NAN]), 1).tolist() == [3.0]


def test_shards_that_hold_nothing() -> None:
    only_padding = ShardLayout(LAYERS, (), 2)
    assert only_padding.sums(torch.tensor([NAN, NAN]), 2).tolist() == [0.0, 0.0, 0.0]
    assert only_padding.spread(torch.tensor([5.0, 6.0, 7.0])).tolist() == [1.0, 1.0]
    empty = ShardLayout(LAYERS, (), 0)
    assert empty.sums(torch.empty(0), 1).tolist() == [0.0, 0.0, 0.0]
    assert empty.spread(torch.tensor([5.0, 6.0, 7.0])).tolist() == []
    no_element = ShardLayout.whole("w", 0)
    assert no_element.sums(torch.empty(0), 1).tolist() == [0.0]
    assert no_element.spread(torch.tensor([5.0])).tolist() == []


@pytest.mark.parametrize(
    ("segments", "numel", "message"),
    [
        ((Segment(0, 0, 3), Segment(1, 2, 2)), 9, "overlaps"),
        ((Segment(0, 4, 3), Segment(1, 0, 2)), 9, "overlaps"),
        ((Segment(0, -1, 3),), 9, "overlaps"),
        ((Segment(0, 0, 0),), 9, "overlaps"),
        ((Segment(3, 0, 1),), 9, "names no layer"),
        ((Segment(-1, 0, 1),), 9, "names no layer"),
        ((Segment(0, 5, 4),), 8, "end at 9, behind the shard's 8 elements"),
        ((Segment(0, 0, 2), Segment(0, 2, 2)), 9, "two segments"),
    ],
)
def test_impossible_layouts_are_refused(segments: tuple[Segment, ...], numel: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardLayout(LAYERS, segments, numel)


def test_table_puts_shards_side_by_side() -> None:
    other = ShardLayout((Layer("d", 2),), (Segment(0, 0, 2),), 2)
    empty = ShardLayout((Layer("e", 4),), (), 0)
    table = LayerTable([LAYOUT, other, empty], torch.device("cpu"))
    assert table.names == ["a", "b", "c", "d", "e"]
    assert table.numels.tolist() == [10, 3, 7, 2, 4]
    sums = table.sums([FLAT, torch.tensor([3.0, 4.0]), torch.empty(0)], 2)
    torch.testing.assert_close(sums, torch.tensor([6.25, 14.0, 0.0, 25.0, 0.0], dtype=SUM_DTYPE), rtol=1e-15, atol=0)
    assert [part.tolist() for part in table.split(torch.arange(5.0))] == [[0, 1, 2], [3], [4]]
    with pytest.raises(ValueError, match="zip"):
        table.sums([FLAT], 1)


def test_layers_that_every_rank_holds_whole_need_no_talk() -> None:
    table = LayerTable([LAYOUT], torch.device("cpu"))
    columns = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    assert Ranks().sum([(table, column) for column in columns]) == columns


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float]]]:
    """What was all-reduced over which group, of as many ranks as its name is long, which all hold the same."""
    calls: list[tuple[str, list[float]]] = []

    def all_reduce(values: torch.Tensor, group: str) -> None:
        calls.append((group, values.tolist()))
        values.mul_(len(group))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return calls


def cut(*groups: tuple[str, ...]) -> LayerTable:
    layers = tuple(Layer(str(place), 1, cuts) for place, cuts in enumerate(groups))
    return LayerTable([ShardLayout(layers, (), 0)], torch.device("cpu"))


def test_layers_cut_over_one_group_are_summed_in_one_all_reduce(reduced: list[tuple[str, list[float]]]) -> None:
    table, other = cut(("dp",), ("dp",)), cut(("dp",))
    one, two, three = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.tensor([5.0])
    totals = Ranks().sum([(table, one), (table, two), (other, three)])
    assert [total.tolist() for total in totals] == [[2.0, 4.0], [6.0, 8.0], [10.0]]
    assert reduced == [("dp", [1.0, 2.0, 3.0, 4.0, 5.0])]
    assert one.tolist() == [1.0, 2.0]


def test_each_layer_is_summed_over_its_own_groups(reduced: list[tuple[str, list[float]]]) -> None:
    table, other = cut(("dp",), ("dp", "tpp"), (), ("exper",)), cut(("tpp",), ())
    one, two = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
    totals = Ranks().sum([(table, one), (other, two)])
    assert [total.tolist() for total in totals] == [[2.0, 12.0, 3.0, 20.0], [15.0, 6.0]]
    assert reduced == [("dp", [1.0, 2.0]), ("tpp", [4.0, 5.0]), ("exper", [4.0])]
    assert (one.tolist(), two.tolist()) == ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0])
