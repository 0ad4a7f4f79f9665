"""The picture of a run, of whatever it has logged so far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_vrgd_cli import main
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.log import History, noise_means, noise_scale_of, noise_scales, read_history
from ds_vrgd_recipes.run.plot import COLOURS, _clamped, plot
from tests.recipes.run.logs import NAMES, NOISE, layers, updates, write

NAMED = {"step": 1, "layer_names": NAMES}
EVALUATED = {"step": 40, "held_out_masked_lm_loss": 2.0, "unigram_entropy": 2.2, "held_out_accuracy": 0.4}


def without_gsnr(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "gsnr"} for record in records]


def with_ranks(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    numbers: dict[str, Any] = {name: [1.0, 0.9, 1.1, 0.5] for name in ("norm", "cosine", "deviation")}
    told = {"ranks": [0, 1, 2, 3], **numbers, "events": ["step 7, rank 3: scaled"]}
    return [{**record, "ranks": told} for record in records]


def test_watched_ranks_have_panels_with_the_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kw: drawn.append(figure))
    *watched, skipped = with_ranks(without_gsnr(updates(11, 500.0)))
    skipped["ranks"] = {"events": skipped["ranks"]["events"]}
    plot(write(tmp_path, *watched, skipped))
    *_, norms, cosines, elements = drawn[0].axes
    assert norms.get_title().startswith("norm of each rank")
    assert cosines.get_title().startswith("cosine of each rank")
    assert elements.get_title().startswith("largest deviation of one element")
    assert [text.get_text() for text in norms.get_legend().get_texts()] == [f"rank {rank}" for rank in range(4)]
    assert list(norms.lines[3].get_ydata()) == [0.5] * 10  # type: ignore[arg-type]
    assert len(norms.lines) == 4 + 11  # the ranks, and an event in each update


@pytest.mark.parametrize(
    ("records", "panels"),
    [
        ([*updates(40, 500.0), NAMED, *map(layers, range(1, 40, 2)), EVALUATED], 7),
        (updates(40, 500.0), 6),
        (without_gsnr(updates(40, 500.0)), 3),  # LAMB
        ([*updates(1, 500.0), NAMED, layers(1)], 7),
        (updates(3, 500.0, seed=2), 6),
    ],
    ids=["all", "no layers yet", "no GSNR", "one update", "no upper bound"],
)
def test_picture_has_a_panel_for_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[dict[str, Any]], panels: int
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (drawn.append(figure), save(figure, *args, **kw))
    )
    pictures = plot(write(tmp_path, *records))
    assert pictures == [tmp_path / name for name in ("training.png", "layers.png")[: 1 + panels // 7]]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    own = ["loss (nats)", "sequences per second", "learning rate", "noise scale (samples)"]
    own += ["fraction of elements that is clamped", "mean raw GSNR"]
    assert [axis.get_title() for axis in drawn[0].axes if axis.get_title()] == own[:panels]
    width, height = drawn[0].get_size_inches() * 110
    assert width <= 1440  # a window on a laptop
    assert height <= 900
    title = drawn[0].get_suptitle()
    assert title.startswith(f"{tmp_path.name} · ")
    assert title.endswith(f"{len([each for each in records if 'loss' in each])} updates")
    if panels > 3:
        assert "k 8 · batch 64" in title
        legend = [text.get_text() for text in drawn[0].axes[3].get_legend().get_texts()]
        assert legend == ["mean over some 200 updates", "95% interval", "global batch"]
    if panels == 7:
        assert drawn[1].axes[0].get_title().startswith("GSNR by layer: ")


@pytest.mark.parametrize("older", [0, 3, 8])  # updates of a release that did not log the shares of noise
def test_shares_of_noise_are_dashed_in_the_colour_of_the_measured(older: int) -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    records = [*updates(older, 500.0), *updates(8 - older, 500.0, first=1 + older, clamped=NOISE)]
    _clamped(axis, History(records, [], []))
    drawn = [(line.get_linestyle(), line.get_color(), line.get_label(), line.get_ydata()) for line in axis.get_lines()]
    low, high = [(*line[:3], list(line[3])) for line in drawn if line[0] == "-"]
    assert low == ("-", COLOURS[0], "to gamma", 8 * [0.2])
    assert high == ("-", COLOURS[1], "to 1", 8 * [0.1])
    dashed = [(line[1], line[2], list(line[3])) for line in drawn if line[0] == "--"]
    of_noise = [
        (COLOURS[0], "to gamma, pure noise", (8 - older) * [NOISE["noise_low"]]),
        (COLOURS[1], "to 1, pure noise", (8 - older) * [NOISE["noise_high"]]),
    ]
    assert dashed == (of_noise if older < 8 else [])


def test_noise_scale_is_drawn_as_it_was_known_by_then() -> None:
    records = updates(50, 500.0)
    found = noise_scales(records, 0.9, 5)
    assert [step for step, _ in found] == [10, 20, 30, 40, 50]
    assert found[2][1] == noise_scale_of(noise_means(records[:30], 0.9))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "run", *updates(5, 500.0))
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # being written
    assert main(["plot", str(folder), "--output", str(tmp_path / "run.svg")]) == 0
    assert capsys.readouterr().out.endswith(f"{tmp_path / 'run.svg'}\n")
    assert "<svg" in (tmp_path / "run.svg").read_text()[:400]
    assert 'style="fill: #ffffff' not in (tmp_path / "run.svg").read_text()  # dark pages
    other = write(tmp_path / "other", *without_gsnr(updates(5, 500.0)), {"step": 5, "held_out_loss": 2.0})
    assert main(["plot", str(folder), str(other), "--output", str(tmp_path / "both.svg")]) == 0
    texts = (tmp_path / "both.svg").read_text()
    assert all(f"<!-- {name} ·" in texts for name in ("run", "other"))
    for output, message in (("run.xyz", "Format 'xyz' is not supported"), ("no/folder.png", "No such file")):
        assert main(["plot", str(folder), "--output", str(tmp_path / output)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"log.jsonl is missing; give the output folder of a run"),
        ("", "holds no update yet"),
        ('{"step": 1, "layer_names": []}\n', "holds no update yet"),
        ("step 1\n", "is not the log of a run"),
        ("[1]\n", "is not the log of a run"),
    ],
)
def test_what_is_no_log_is_said(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        read_history(tmp_path)
