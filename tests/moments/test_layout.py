"""The layers in a shard, the table of several shards, and sums over the ranks that layers are cut over."""

import pytest
import torch

from ds_vrgd.moments import Layer, LayerTable, Ranks, Segment, ShardLayout

# Twelve elements: 2 of padding, 3 of layer "b", 1 of padding, 4 of layer "a", 2 of padding; layer "c" is elsewhere.
LAYERS = (Layer("a", 10), Layer("b", 3), Layer("c", 7))
LAYOUT = ShardLayout(LAYERS, (Segment(1, 2, 3), Segment(0, 6, 4)), 12)


@pytest.mark.parametrize(
    ("segments", "numel", "message"),
    [
        ((Segment(0, 0, 3), Segment(1, 2, 2)), 9, "overlaps"),
        ((Segment(0, 4, 3), Segment(1, 0, 2)), 9, "overlaps"),
        ((Segment(0, -1, 3),), 9, "overlaps"),
        ((Segment(0, 0, 0),), 9, "overlaps"),
        ((Segment(3, 0, 1),), 9, "names no layer"),
        ((Segment(-1, 0, 1),), 9, "names no layer"),
        ((Segment(0, 5, 4),), 8, "end at 9, after the last of the shard's 8 elements"),
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
    assert table.segments == [[(2, 3, 1, 0), (6, 4, 0, 0)], [(0, 2, 3, 0)], []]


def test_layers_that_every_rank_holds_whole_need_no_communication() -> None:
    table = LayerTable([LAYOUT], torch.device("cpu"))
    columns = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    assert Ranks().sum([(table, column) for column in columns]) == columns


@pytest.fixture
def reduced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float]]]:
    """Record each all-reduce: a group has as many ranks as letters in its name, and all hold the same values."""
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
