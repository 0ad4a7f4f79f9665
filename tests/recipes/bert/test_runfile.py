"""Every wrong setting is named with its value and a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ds_vrgd_recipes.bert.runfile import Phase, RunFile, load_run_file
from ds_vrgd_recipes.run.errors import InputError
from tests.recipes.bert.cases import run_settings

CONFIGS = Path(__file__).parents[3] / "configs"


def refused(tmp_path: Path, settings: Any) -> str:
    """The message with which a run file of these settings is refused."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with pytest.raises(InputError) as error:
        load_run_file(path)
    return str(error.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_run_files_load_and_have_eight_chunks(path: Path) -> None:
    run = load_run_file(path)
    for phase in run.phases:
        assert phase.global_batch // phase.micro_batch >= 8  # k, whatever the number of ranks


def test_paper_row_64k_32k() -> None:
    """VRGD paper, table 1: 8,599 steps; 90 % at length 128 and 10 % at 512; Mixed-batch 64k/32k."""
    run = load_run_file(CONFIGS / "bert-large/64k-32k.yaml")
    assert sum(run.phase_steps) == 8599
    assert run.phase_steps[1] / 8599 == pytest.approx(0.1, abs=0.01)
    assert [(phase.sequence_length, phase.global_batch) for phase in run.phases] == [(128, 65536), (512, 32768)]
    assert run.model.max_position_embeddings == 512


def test_unknown_keys_are_named_where_they_stand(tmp_path: Path) -> None:
    settings = run_settings(tmp_path, warmup=3)
    settings["phases"][1]["epochs"] = 2
    settings["corpus"]["glob"] = "*.md"
    message = refused(tmp_path, settings)
    assert "warmup=3: unknown key" in message
    assert "phases.1.epochs=2: unknown key" in message
    assert "corpus.glob='*.md': unknown key" in message


def test_several_corpora_and_prepared_data_alone(tmp_path: Path) -> None:
    settings = run_settings(tmp_path)
    one = RunFile.model_validate(settings)
    both = [settings["corpus"], {"source": "datasets", "name": "books", "rows_per_document": 64}]
    several = RunFile.model_validate(settings | {"corpus": both})
    assert one.data_settings is not None
    assert several.data_settings is not None
    assert [corpus.source for corpus in one.data_settings.corpus] == ["folder"]
    assert [corpus.source for corpus in several.data_settings.corpus] == ["folder", "datasets"]
    assert "corpus.1.rows=2: unknown key" in refused(tmp_path, settings | {"corpus": [both[0], both[1] | {"rows": 2}]})
    assert "corpus: missing; give corpus and vocabulary" in refused(tmp_path, _without(settings, "corpus"))
    assert "vocabulary: missing; give corpus and vocab" in refused(tmp_path, _without(settings, "vocabulary"))
    assert "corpus: missing; give corpus and vocabulary, or prepared_data" in refused(
        tmp_path, _without(settings, "corpus", "vocabulary")
    )
    ready = _without(settings, "corpus", "vocabulary") | {"prepared_data": "data"}
    assert "held_out_every: prepared_data=data was prepared with a value of its own" in refused(tmp_path, ready)
    assert RunFile.model_validate(_without(ready, "held_out_every")).data_settings is None


def _without(settings: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def test_sequence_longer_than_the_position_table(tmp_path: Path) -> None:
    settings = run_settings(tmp_path)
    settings["phases"][1]["sequence_length"] = 513
    message = refused(tmp_path, settings)
    assert "phase 2 has sequence_length=513" in message
    assert "max_position_embeddings=512" in message


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"steps": 0}, "phases.0.steps=0: input should be greater than 0"),
        ({"lr": "fast"}, "phases.0.lr='fast'"),
        ({"warmup_steps": 2}, "warmup_ratio=0.25 and warmup_steps=2: give exactly one"),
        ({"warmup_ratio": None}, "warmup_ratio=None and warmup_steps=None: give exactly one"),
        ({"warmup_ratio": None, "warmup_steps": 5}, "warmup_steps=5 is more than steps=4"),
    ],
)
def test_wrong_phase_values(tmp_path: Path, change: dict[str, Any], expected: str) -> None:
    settings = run_settings(tmp_path)
    settings["phases"][0] |= change
    assert expected in refused(tmp_path, settings)


def test_wrong_sections(tmp_path: Path) -> None:
    settings = run_settings(tmp_path, vocabulary={"size": 256, "folder": "x"})
    settings["model"]["num_attention_heads"] = 3
    del settings["checkpoint_every"]
    message = refused(tmp_path, settings)
    assert "size=256, folder=x and name=None: give exactly one" in message
    assert "hidden_size=16 is not a multiple of num_attention_heads=3" in message
    assert "checkpoint_every: missing" in message
    assert "corpus" in refused(tmp_path, run_settings(tmp_path, corpus={"source": "web"}))


def test_files_that_are_no_run_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_run_file(tmp_path / "absent.yaml")
    assert "holds no settings" in refused(tmp_path, [])
    (tmp_path / "broken.yaml").write_text("a: [1", encoding="utf-8")
    with pytest.raises(InputError, match="is not a YAML file"):
        load_run_file(tmp_path / "broken.yaml")


def test_global_batch_must_be_shared_out_evenly(run: RunFile) -> None:
    phase = run.phases[0]
    assert [phase.accumulation_steps(ranks) for ranks in (1, 2, 4, 8)] == [8, 4, 2, 1]  # 16 / (2 x ranks)
    with pytest.raises(InputError, match=r"global_batch=16 .* micro_batch=2 x ranks=3 = 6; use global_batch 12 or 18"):
        phase.accumulation_steps(3)
    with pytest.raises(InputError, match="use global_batch 32,"):
        phase.accumulation_steps(16)


def test_learning_rate_of_a_phase(run: RunFile) -> None:
    # 4 steps, a quarter of them warm-up: the first is at the peak, then 2e-2 * (1 - i/3)
    assert [run.phases[0].lr_at(step) for step in range(4)] == pytest.approx([0.02, 0.02, 0.02 * 2 / 3, 0.02 / 3])
    longer = Phase.model_validate(run.phases[0].model_dump() | {"warmup_ratio": 0.5, "decay_power": 2})
    # two steps up: 0.01, 0.02; then 0.02 * (1 - i/2)^2
    assert [longer.lr_at(step) for step in range(4)] == pytest.approx([0.01, 0.02, 0.02, 0.005])
