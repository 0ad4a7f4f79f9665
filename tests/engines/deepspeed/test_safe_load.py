"""Pickles that name a program, in every file of a checkpoint and wherever one is read: none is run, and all are named.

Each would create a file when it is read. So does the control: a plain ``torch.load(weights_only=False)``.
"""

from __future__ import annotations

import argparse
import builtins
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ds_vrgd.engines.deepspeed import CheckpointError, read_plain
from ds_vrgd_cli import main
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.errors import InputError
from tests.support.model import make_model
from tests.support.ranks import run_on_ranks
from tests.support.resuming import moving_config, train
from tests.support.trajectory import Case, build

WORLD = 2
STATE = {
    "numpy": numpy.random.RandomState(3).get_state(),
    "arguments": argparse.Namespace(lr=numpy.float32(0.5), dtype=torch.bfloat16),
    "seen": {1, 2},
}
CASES = {
    "0": Case("VRLAMB", 0, "fp32", 1),
    "1": Case("VRAdamW", 1, "bf16", 1, "fp32"),
    "2": Case("LAMB", 2, "fp32", 1),
    "3": Case("VRLAMB", 3, "bf16", 1),
}


class Evil:
    """An object that creates the file ``marker`` when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return builtins.open, (str(self.marker), "w")


@dataclass
class Own:
    """A user's own class in a client state."""

    value: int


def in_client_state(path: Path, marker: Path) -> None:
    content = torch.load(path, weights_only=False)
    torch.save(content | {"client": [{"deep": Evil(marker)}]}, path)


def in_place_of_all(path: Path, marker: Path) -> None:
    torch.save(Evil(marker), path)


def in_newer_protocol(path: Path, marker: Path) -> None:
    torch.save({"module": Evil(marker)}, path, pickle_protocol=4)


def in_older_format(path: Path, marker: Path) -> None:
    torch.save({"module": Evil(marker)}, path, _use_new_zipfile_serialization=False)


MODEL = "mp_rank_00_model_states.pt"
#: stage -> file, how it is altered, and further arguments of load_checkpoint.
ALTERED: list[tuple[str, str, Callable[[Path, Path], None], dict[str, Any]]] = [
    ("0", MODEL, in_client_state, {}),
    ("0", MODEL, in_place_of_all, {"load_module_only": True}),
    ("0", MODEL, in_newer_protocol, {}),
    ("0", MODEL, in_older_format, {}),
    ("1", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", in_client_state, {}),
    ("2", MODEL, in_client_state, {"load_optimizer_states": False}),
    ("2", "zero_pp_rank_1_mp_rank_00_optim_states.pt", in_client_state, {}),
    ("3", f"zero_pp_rank_1_{MODEL}", in_client_state, {}),
    ("3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", in_client_state, {}),
    # Read by another function of DeepSpeed's, on all ranks.
    ("3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", in_client_state, {"load_optimizer_states": False}),
]
UNIVERSAL = [MODEL, "zero/optimizer_state.pt", "rest.pt", "zero/up.weight/exp_avg.pt"]


def save_all(rank: int, folder: Path) -> None:
    for stage, case in CASES.items():
        engine = build(case, WORLD, moving_config(case, WORLD))
        train(engine, case, rank, WORLD, range(1))
        engine.save_checkpoint(str(folder / stage), tag="it", client_state=STATE)
        engine.destroy()


def load_all(rank: int, folder: Path) -> dict[str, Any]:
    """Return the error of each load on this rank."""
    said: dict[str, Any] = {}
    for stage, case in CASES.items():
        engine = build(case, WORLD, moving_config(case, WORLD))
        for index, (of, _, _, arguments) in enumerate(ALTERED):
            if of == stage:
                said[f"{index}"] = error_of(engine, folder / f"altered{index}", **arguments)
        _, client_state = engine.load_checkpoint(str(folder / stage), tag="it")
        said[f"good {stage}"] = {key: client_state[key] for key in STATE}
        engine.destroy()
    case = CASES["2"]
    engine = build(case, WORLD, moving_config(case, WORLD, checkpoint={"load_universal": True}))
    for index in range(len(UNIVERSAL)):
        said[f"universal {index}"] = error_of(engine, folder / f"universal{index}")
    engine.load_checkpoint(str(folder / "universal"), tag="it")
    engine.destroy()
    return said | {"baseline": of_baseline(folder)}


def of_baseline(folder: Path) -> str:
    """Return the recipes' error for an engine with an optimizer that is not ours."""
    import deepspeed

    model = make_model()
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    params = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    try:
        checkpoint.load(engine, checkpoint.Resumption(folder / "altered0", "it", 1, WORLD))
    except InputError as error:
        return str(error)
    return ""


def error_of(engine: Any, folder: Path, **arguments: Any) -> str:
    try:
        engine.load_checkpoint(str(folder), tag="it", **arguments)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil")
    run_on_ranks(WORLD, save_all, folder)
    for index, (stage, name, alter, _) in enumerate(ALTERED):
        shutil.copytree(folder / stage, folder / f"altered{index}")
        alter(folder / f"altered{index}" / "it" / name, folder / f"ran{index}")
    assert main(["to-universal", str(folder / "2"), str(folder / "universal"), "--tag", "it"]) == 0
    for index, name in enumerate(UNIVERSAL):
        shutil.copytree(folder / "universal", folder / f"universal{index}")
        in_client_state(folder / f"universal{index}" / "it" / name, folder / f"ran-universal{index}")
    return folder


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, Any]]:
    return run_on_ranks(WORLD, load_all, folder)


def test_the_pickles_are_evil(folder: Path) -> None:
    path = folder / "control.pt"
    in_place_of_all(path, folder / "control-ran")
    torch.load(path, weights_only=False)
    assert (folder / "control-ran").exists()


@pytest.mark.parametrize("index", range(len(ALTERED)))
def test_resume_runs_nothing_and_every_rank_names_the_file(
    folder: Path, said: list[dict[str, Any]], index: int
) -> None:
    _, name, alter, _ = ALTERED[index]
    for answer in said:
        assert f"{folder / f'altered{index}' / 'it' / name} " in answer[str(index)]
        wanted = "no file of tensors" if alter is in_newer_protocol else "names io.open"
        assert wanted in answer[str(index)]
    assert not (folder / f"ran{index}").exists()


@pytest.mark.parametrize("index", range(len(UNIVERSAL)))
def test_a_converted_checkpoint_runs_nothing(folder: Path, said: list[dict[str, Any]], index: int) -> None:
    for answer in said:
        assert UNIVERSAL[index] in answer[f"universal {index}"]
        assert "names io.open" in answer[f"universal {index}"]
    assert not (folder / f"ran-universal{index}").exists()


def test_a_baseline_runs_nothing(folder: Path, said: list[dict[str, Any]]) -> None:
    assert all(answer["baseline"].startswith("--resume: rank 0: ") for answer in said)
    assert all("names io.open" in answer["baseline"] for answer in said)
    assert not (folder / "ran0").exists()


@pytest.mark.parametrize("stage", CASES)
def test_plain_client_state_comes_back(said: list[dict[str, Any]], stage: str) -> None:
    for answer in said:
        found = answer[f"good {stage}"]
        assert numpy.array_equal(found["numpy"][1], STATE["numpy"][1])  # type: ignore[index]
        assert found["arguments"] == STATE["arguments"]
        assert found["seen"] == STATE["seen"]


@pytest.mark.parametrize("index", [index for index, (stage, *_) in enumerate(ALTERED) if stage != "0"])
def test_to_universal_runs_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], index: int
) -> None:
    altered = folder / f"altered{index}"
    assert main(["to-universal", str(altered), str(tmp_path / "output"), "--tag", "it"]) == 2
    assert f"{altered / 'it' / ALTERED[index][1]} names io.open" in capsys.readouterr().err
    assert not (folder / f"ran{index}").exists()
    assert not list((tmp_path / "output").glob("*"))


def test_own_classes_are_allowed_by_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"own": Own(3)}, tmp_path / "own.pt")
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # for other programs: it opens nothing here
    with pytest.raises(CheckpointError, match=r"own.pt names .*Own.*add_safe_globals\(\[.*Own"):
        read_plain(tmp_path / "own.pt")
    with torch.serialization.safe_globals([Own]):
        assert read_plain(tmp_path / "own.pt") == {"own": Own(3)}
