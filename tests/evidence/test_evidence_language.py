"""The plan compares equals, the controls change what they say, and a run is the same every time."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ds_vrgd
from evidence import language, language_model
from evidence.controls import CONSTANT, CONTROLS, IDENTITY, Control, controlled
from evidence.experiment import Row, Rows, called_for, sweep
from evidence.language import Setting, Task
from evidence.language_model import Text
from evidence.language_report import (
    BETA1,
    REPORTED,
    TUNING,
    best_point,
    comparisons,
    draw,
    mean_and_error,
    paired,
    tables,
)
from tests.evidence.counting import LENGTH, MASK, PIECES

# Below k = 8 the optimizers warn.
TINY = Setting("toy", "speeches", "causal", LENGTH, 128, 32, 8, "VRAdamW", 1e-2, 0.9, 0, held_out=16)
ROOT = Path(__file__).resolve().parents[2]
DIFFERENCE = r"\d\.\d{3} ± \d\.\d{3}"
TWINS = ("VRAdamW", "VRLAMB", "VRMomentum")


# -- the plan ---------------------------------------------------------------------------------------------------------


def completed(loss: Callable[[Setting], float]) -> list[Row]:
    """The rows of the whole full size, where a run's loss is known."""
    rows: list[Row] = []
    while True:
        done = {dataclasses.astuple(Setting(**_fields(row))) for row in rows}
        wanted = dict.fromkeys([*language.follow_up("full", rows), *language.settings("full")])
        missing = [one for one in wanted if dataclasses.astuple(one) not in done]
        if not missing:
            return rows
        rows += [_row(one, loss(one)) for one in missing]


def _fields(row: Row) -> dict[str, Any]:
    return {field.name: row[field.name] for field in dataclasses.fields(Setting)}


def _row(setting: Setting, final: float) -> Row:
    curve = [[28, final + 1.0, None, None, None], [56, final, None, None, None]]
    return {**dataclasses.asdict(setting), "curve": curve, "final": final, "entropy": 6.9, "updates": 56}


def of_task(rows: list[Row], task: Task) -> list[Row]:
    wanted = {"objective": task.objective, "batch": task.batch, "k": task.k, "model": task.model}
    return [row for row in rows if row.items() >= wanted.items()]


def is_original(row: Row) -> bool:
    return (row["control"], row["beta2"], row["warmup"], row["clipping"]) == ("none", 0.999, 0.15, None)


def valley(setting: Setting) -> float:
    """The best is at beta1 0.8 and between two rates for AdamW; its twin wants another rate than the base."""
    base = setting.optimizer.removeprefix("VR")
    best_rate = language.RATES[base] * (1.4 if base == setting.optimizer else 5.0)
    away = 0.1 * math.log2(setting.rate / best_rate) ** 2 + 0.2 * abs(setting.beta1 - 0.8)
    lead = {"none": 0.05, "permuted": 0.07}.get(setting.control, 0.0) if base != setting.optimizer else 0.0
    return 6.4 + away - lead + 0.01 * setting.seed


@pytest.fixture(scope="module")
def full() -> list[Row]:
    return completed(valley)


def test_the_plan_gives_all_optimizers_the_same_beta1_and_each_pair_one_start() -> None:
    for size in ("small", "full"):
        plan = language.settings(size)
        for base in language.RATES:
            originals = [one for one in plan if is_original(dataclasses.asdict(one))]
            grids = [
                {dataclasses.replace(one, optimizer="") for one in originals if one.optimizer == name}
                for name in (base, f"VR{base}")
            ]
            assert grids[0] == grids[1] != set()
        betas = [{one.beta1 for one in plan if one.optimizer == name} for name in (*TWINS, *language.RATES)]
        assert betas == [betas[0]] * 6
        assert all(one.examples % one.batch == one.batch % one.k == 0 for one in plan)
    assert {(one.batch, one.k) for one in language.TASKS} >= {(1024, 32), (16384, 32), (2048, 64)}


def test_a_twin_and_its_base_have_equal_grids_when_all_is_done(full: list[Row]) -> None:
    for task, base in [(one, base) for one in language.TASKS for base in one.bases]:
        originals = [row for row in of_task(full, task) if is_original(row) and row["seed"] in TUNING]
        tried = [
            {(row["beta1"], row["rate"], row["seed"]) for row in originals if row["optimizer"] == name}
            for name in (base, f"VR{base}")
        ]
        assert tried[0] == tried[1]
        assert {beta1 for beta1, *_ in tried[0]} == set(task.betas)


def test_what_is_reported_was_not_tuned_on_and_is_the_best_of_the_grid(full: list[Row]) -> None:
    assert not set(TUNING) & set(REPORTED)
    for task in language.TASKS:
        rows = of_task(full, task)
        groups = comparisons(rows, "AdamW")
        clipped = ["AdamW, clipping 1", "VRAdamW, clipping 1"]
        if "AdamW" in task.controlled:
            at_default, of_clipped, tuned, of_tuned_and_clipped = groups
            for of in (of_clipped, of_tuned_and_clipped, tuned[2:]):
                assert [arm.label for arm in of[:2]] == clipped
                assert {arm.beta1 for arm in of} == {BETA1 if of is of_clipped else 0.8}
                controls = {f"VRAdamW, {name}, clipping 1" for name in task.controls if of is of_clipped}
                assert {arm.label for arm in of[2:]} == controls
            assert [arm.label for arm in tuned[:2]] == ["AdamW", "VRAdamW"]
        else:
            at_default, tuned = groups
            assert [arm.label for arm in tuned] == ["AdamW", "VRAdamW"]
        assert {arm.beta1 for arm in at_default} == {BETA1}
        assert {arm.beta1 for arm in tuned} == {0.8}
        assert all(set(arm.rows) == set(REPORTED) for arm in (*at_default, *tuned))
        assert tuned[0].rate == 2e-3 * math.sqrt(2.0), "a half step"
        assert tuned[1].rate == pytest.approx(2e-3 * 4.0 * math.sqrt(2.0)), "5 is nearer to 5.7 than to 4"
        labels = {arm.label for arm in at_default[2:]}
        wanted = {f"VRAdamW, {name}" for name in task.controls} | {
            "AdamW, warm-up 0.35",
            "AdamW, beta2 0.98",
            *clipped,
        }
        assert labels == (wanted if "AdamW" in task.controlled else set())


def test_a_control_starts_where_its_twin_ended_and_is_tuned_as_well(full: list[Row]) -> None:
    at_first_task = of_task(full, language.TASKS[0])
    twin = [row for row in at_first_task if row["optimizer"] == "VRAdamW" and row["control"] == "none"]
    for name in CONTROLS:
        of_twin = [row for row in at_first_task if row["optimizer"] == "VRAdamW" and row["clipping"] is None]
        rows = [row for row in of_twin if row["control"] == name]
        assert {row["beta1"] for row in rows} == {BETA1}
        point = best_point(twin, (BETA1,))
        assert best_point(rows, (BETA1,)) == point
        tried = sorted({row["rate"] / point[1] for row in rows})
        assert tried == pytest.approx([0.5, math.sqrt(0.5), 1.0, math.sqrt(2.0), 2.0])


def test_the_report_finds_every_row_of_a_sweep_again(full: list[Row], tmp_path: Path) -> None:
    kept = {"environments": [], "rows": [{"size": "full", **row} for row in full]}
    (tmp_path / "language.json").write_text(json.dumps(kept))
    rows = Rows(tmp_path / "language.json")
    assert len(rows.of("full", called_for(language.EXPERIMENT, "full", rows))) == len(full) > 1000


def test_no_reported_seed_is_called_for_before_the_tuning_has_ended() -> None:
    starts = [_row(one, valley(one)) for one in language.settings("full")]
    assert {one.seed for one in language.follow_up("full", starts)} == {TUNING[0]}
    assert language.follow_up("small", [_row(one, 1.0) for one in language.settings("small")]) == []


# -- the statistics ---------------------------------------------------------------------------------------------------


def test_differences_are_paired_by_seed() -> None:
    """By hand: -1, -2 and -3 have the mean -2 and the standard deviation 1; seed 9 has no partner."""
    base = {seed: {"final": 5.0 + seed} for seed in (2, 3, 4)}
    twin = {seed: {"final": 5.0 + seed - difference} for seed, difference in ((2, 1.0), (4, 3.0), (3, 2.0), (9, 7.0))}
    assert sorted(paired(twin, base)) == [-3.0, -2.0, -1.0]
    mean, error = mean_and_error(paired(twin, base))
    assert (mean, error) == pytest.approx((-2.0, 1.0 / math.sqrt(3.0)))
    assert math.isnan(mean_and_error([1.0])[1])


def test_the_table_has_loss_difference_error_and_seeds(full: list[Row]) -> None:
    """A control's seeds differ by an alternating 0.01, so that its difference has an error."""
    changed = [
        {**row, "final": row["final"] + 0.01 * (-1) ** row["seed"] * (row["control"] == "permuted")} for row in full
    ]
    text = "\n".join(tables(changed))
    first = of_task(changed, language.TASKS[0])
    arms = {arm.label: arm for arm in comparisons(first, "AdamW")[0]}
    values = paired(arms["VRAdamW, permuted"].rows, arms["AdamW"].rows)
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(5)
    assert error == pytest.approx(0.01 * math.sqrt(1.2 / 5))
    loss = statistics.fmean(row["final"] for row in arms["VRAdamW, permuted"].rows.values())
    rate = arms["VRAdamW, permuted"].rate
    line = f"| VRAdamW, permuted | 0.9 | {rate:.3g} | {loss:.3f} | {mean:+.3f} ± {error:.3f} | 5 of 5 |"
    assert line in text
    assert "Unigram entropy 6.900" in text
    assert "plateau)" in "\n".join(tables([{**row, "entropy": 6.0} for row in full]))


def test_what_has_no_reported_seed_is_named_and_a_part_can_be_drawn(full: list[Row]) -> None:
    from matplotlib.figure import Figure

    first = of_task(full, language.TASKS[0])
    part = [row for row in first if row["control"] != "previous" or row["seed"] in TUNING]
    assert "Without a reported seed so far: VRAdamW, previous (beta1 0.9)" in "\n".join(tables(part))
    nothing = [row for row in first if row["seed"] in TUNING]
    assert "No base has a reported seed so far." in tables(nothing)
    for rows, axes in ((part, 6), (nothing, 0)):
        figure = Figure()
        draw(figure, rows)
        assert len(figure.axes) == axes


def test_the_docs_quote_the_differences_of_the_table() -> None:
    """The independent experiment's differences, which CHOOSING.md quotes too, are in no table."""
    pages = [ROOT / name for name in ("docs/MEASUREMENTS.md", "docs/CHOOSING.md", "README.md")]
    texts = [page.read_text(encoding="utf-8") for page in pages]
    _, table, _ = re.split("<!-- evidence language: (?:begin|end) -->", texts[0])
    elsewhere = re.compile(r"^- \*\*[^*]*, measured elsewhere\*\*.*?(?=^- )", re.MULTILINE | re.DOTALL)
    quoted = [re.findall(DIFFERENCE, elsewhere.sub("", text)) for text in texts]
    assert all(len(of) > 5 for of in quoted)
    assert {one for of in quoted for one in of} <= set(re.findall(DIFFERENCE, table))


# -- the controls -----------------------------------------------------------------------------------------------------


def layer(values: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 1.0)) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 4), torch.tensor(values).view(2, 4)


def test_the_permuted_ratio_has_the_same_numbers_elsewhere() -> None:
    param, ratio = layer()
    for name in ("permuted", "permuted once"):
        control = Control(name, seed=1)
        first, second = control(param, ratio, 1.0), control(param, ratio, 1.0)
        for found in (first, second):
            assert found.shape == ratio.shape
            assert torch.equal(found.flatten().sort().values, ratio.flatten().sort().values)
            assert not torch.equal(found, ratio)
        assert torch.equal(first, second) == (name == "permuted once")
    assert torch.equal(ratio, layer()[1]), "the optimizer's own average is not changed"


def test_the_resampled_ratio_is_of_the_layer_and_repeats_some() -> None:
    param, ratio = torch.zeros(1000), torch.rand(1000)
    found = Control("resampled", seed=1)(param, ratio, 1.0)
    assert torch.isin(found, ratio).all()
    assert 600 < len(found.unique()) < 660, "1 - 1/e of them"


def test_means_and_constants_have_no_spread() -> None:
    param, ratio = layer()
    mean = Control("layer mean", 0)(param, ratio, 1.0)
    assert mean.shape == ratio.shape
    assert torch.equal(mean, torch.full_like(ratio, float(ratio.mean())))
    debias = 1.0 - 0.9**3
    torch.testing.assert_close(Control("constant", 0)(param, ratio, debias) / debias, torch.full((2, 4), CONSTANT))


def test_the_previous_ratio_is_that_of_the_step_before_with_its_own_debiasing() -> None:
    control, (param, ratio), other = Control("previous", 0), layer(), torch.zeros(2, 4)
    memory = ratio.clone()
    torch.testing.assert_close(control(param, memory, 0.1), ratio)
    memory.fill_(0.9)  # the optimizer uses the memory again
    torch.testing.assert_close(control(param, memory, 0.19) / 0.19, ratio / 0.1)
    torch.testing.assert_close(control(other, ratio, 0.19), ratio)


@pytest.mark.parametrize("k", [32, 64])
def test_the_constant_is_the_mean_factor_of_noise(k: int) -> None:
    """Gradients without signal, by VRMomentum itself: the step is the factor times the gradient."""
    weight = torch.nn.Parameter(torch.zeros(100_000, dtype=torch.float64))
    optimizer = ds_vrgd.VRMomentum([weight], lr=1.0, momentum=0.0, weight_decay=0.0)
    chunks = torch.randn(k, 100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for chunk in chunks:
        (weight @ chunk / k).backward()
    optimizer.step()
    factor = -weight.detach() / chunks.mean(0)
    assert float(factor.mean()) == pytest.approx(CONSTANT, abs=0.01)


def test_an_unknown_control_is_named() -> None:
    with pytest.raises(ValueError, match="control='shuffled' is unknown; choose from identity, permuted"):
        Control("shuffled", 0)


def run(setting: Setting, text: Text, control: str = "none") -> Row:
    return language.train(dataclasses.replace(setting, control=control), text)


@pytest.mark.parametrize("twin", TWINS)
def test_with_the_identity_a_run_is_the_twins_bit_for_bit_and_with_a_control_it_is_not(text: Text, twin: str) -> None:
    setting = dataclasses.replace(TINY, optimizer=twin)
    own = run(setting, text)
    assert run(setting, text, IDENTITY) == own
    for name in ("permuted", "previous"):
        assert run(setting, text, name)["final"] != own["final"]


def test_a_constant_factor_is_the_base_at_the_constants_share_of_the_rate(text: Text) -> None:
    """The value matters for Momentum; in Adam the factor cancels, apart from eps."""
    momentum = dataclasses.replace(TINY, optimizer="VRMomentum", rate=0.2)
    base = dataclasses.replace(momentum, optimizer="Momentum", rate=0.2 * CONSTANT)
    assert run(momentum, text, "constant")["final"] == pytest.approx(run(base, text)["final"], abs=1e-5)
    adam = dataclasses.replace(TINY, optimizer="AdamW")
    assert run(TINY, text, "constant")["final"] == pytest.approx(run(adam, text)["final"], abs=1e-3)


def test_a_control_ends_with_its_context_also_after_an_error() -> None:
    from ds_vrgd.optim import optimizer

    own = optimizer.passes_over

    def broken() -> None:
        with controlled(Control("permuted", 0)):
            assert optimizer.passes_over is not own
            raise RuntimeError

    with pytest.raises(RuntimeError):
        broken()
    assert optimizer.passes_over is own


# -- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_learns_from_the_context_and_repeats_bit_for_bit(text: Text) -> None:
    setting = dataclasses.replace(TINY, examples=512, batch=16)
    row = language.train(setting, text)
    assert row["final"] < row["entropy"] == pytest.approx(math.log(PIECES - 1))
    assert row["updates"] == 32
    assert len(row["curve"]) == 20
    assert row["curve"][-1][:2] == [32, row["final"]]
    assert language.train(setting, text) == row
    assert language.train(dataclasses.replace(setting, seed=1), text)["final"] != row["final"]


def test_a_masked_model_learns_what_is_masked(text: Text) -> None:
    """Every token is 7: who learns that has a loss of 0, who ignores it one of log 24."""
    sevens = dataclasses.replace(text, train=torch.full((512, LENGTH), 7), held_out=torch.full((16, LENGTH), 7))
    row = language.train(dataclasses.replace(TINY, objective="masked", examples=512, batch=16), sevens)
    assert row["final"] < 0.3 < math.log(PIECES) < row["curve"][0][1] + 1.0


def test_a_causal_model_does_not_see_what_it_predicts(text: Text) -> None:
    torch.manual_seed(0)
    changed = text.held_out.clone()
    changed[:, -1] = MASK
    for causal in (True, False):
        model = language_model.LanguageModel("toy", PIECES, LENGTH, causal=causal)
        labels = text.held_out.roll(-1, 1)
        labels[:, -2:] = language_model.IGNORED_LABEL  # the last token is seen from no place that counts
        with torch.no_grad():
            losses = [float(model(ids, labels)) for ids in (text.held_out, changed)]
        assert (losses[0] == losses[1]) == causal


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_graph_accumulates_what_the_model_itself_does(text: Text) -> None:
    on_gpu = Text(text.train.cuda(), text.held_out.cuda(), text.unigram.cuda(), MASK)
    examples = language_model.inputs_and_labels(on_gpu.train, "masked", MASK, 0)
    found = []
    for sizes in ([], [16]):
        model = language_model.make_model("small", on_gpu, "masked", 0, sizes)
        losses = [float(language_model.accumulate(model, examples, first, 64, 4)) for first in (0, 64)]
        norms = [float(param.grad.norm()) for param in model.parameters()]  # type: ignore[union-attr]
        found.append([*losses, language_model.held_out_loss(model, examples, 16), *norms])
    assert found[1] == pytest.approx(found[0], rel=0.02)


def test_masked_examples_hide_what_is_asked_and_nothing_else(text: Text) -> None:
    ids, labels = language_model.inputs_and_labels(text.train, "masked", MASK, seed=3)
    asked = labels != language_model.IGNORED_LABEL
    assert float(asked.float().mean()) == pytest.approx(0.15, abs=0.02)
    assert torch.equal(labels[asked], text.train[asked])
    assert torch.equal(ids, torch.where(asked, MASK, text.train))


def test_too_few_sequences_are_named(text: Text) -> None:
    with pytest.raises(ValueError, match="examples=1024, but the text has 512 sequences of 8 tokens: lower examples"):
        language.train(dataclasses.replace(TINY, examples=1024), text)


def test_a_sweep_resumes_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Text) -> None:
    plan = [dataclasses.replace(TINY, seed=seed) for seed in range(3)]
    experiment = dataclasses.replace(
        language.EXPERIMENT, settings=lambda size: plan, prepare=lambda settings: None, measure=partial(_counted, text)
    )
    monkeypatch.setattr(language, "EXPERIMENT", experiment)
    environment = {"versions": {}}
    _counted.calls = []  # type: ignore[attr-defined]
    rows = Rows(tmp_path / "language.json")
    rows.add({"size": "small", **dataclasses.asdict(plan[1]), "final": 1.0, "seconds": 0.0}, environment)
    assert sweep("language", "small", rows, environment) == []
    assert [one.seed for one in _counted.calls] == [0, 2]  # type: ignore[attr-defined]
    assert sweep("language", "small", Rows(tmp_path / "language.json"), environment) == []
    assert len(_counted.calls) == 2  # type: ignore[attr-defined]


def _counted(text: Text, setting: Setting) -> Row:
    _counted.calls.append(setting)  # type: ignore[attr-defined]
    return language.train(setting, text)
