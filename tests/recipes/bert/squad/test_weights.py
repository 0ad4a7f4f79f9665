"""The same weights from the saved model and from the checkpoint, at every ZeRO stage; and what is neither."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from transformers import BertForPreTraining, BertForQuestionAnswering, GPT2Config

from ds_vrgd_recipes.bert.model import bert_config
from ds_vrgd_recipes.bert.pretrain import save_model
from ds_vrgd_recipes.bert.squad.weights import load_weights
from ds_vrgd_recipes.bert.vocabulary import vocabulary_sha256
from ds_vrgd_recipes.run import checkpoint
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import fingerprint
from ds_vrgd_recipes.run.groups import parameter_groups
from ds_vrgd_recipes.run.manifest import write_manifest
from ds_vrgd_recipes.run.ranks import Ranks
from tests.recipes.bert.squad.cases import MODEL, small_tokenizer
from tests.support.ranks import run_on_ranks

# name -> (ZeRO stage, bf16, dtype of gradient accumulation: with fp32 DeepSpeed has another optimizer wrapper)
ENGINES = {
    "zero0": (0, False, None),
    "zero0-bf16": (0, True, None),
    "zero1-bf16-fp32": (1, True, "fp32"),
    "zero1": (1, True, None),
    "zero2": (2, False, None),
    "zero3": (3, True, None),
}


class Network(torch.nn.Module):
    """BERT where ``bert.model.PretrainingModel`` has it, under a loss that reaches every weight."""

    def __init__(self, pieces: int) -> None:
        super().__init__()
        self.network = BertForPreTraining(bert_config(MODEL, pieces))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        output = self.network(input_ids)
        return output.prediction_logits.float().square().mean() + output.seq_relationship_logits.float().square().mean()


def save_all(rank: int, folder: Path) -> None:
    """One update, a checkpoint and a saved model, from every engine."""
    tokenizer = small_tokenizer()
    ranks = Ranks()
    for name, (stage, bf16, accumulation) in ENGINES.items():
        torch.manual_seed(1)
        model = Network(len(tokenizer))
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": accumulation},
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "VRLAMB", "params": {"lr": 0.01}},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameter_groups(model), config=config)
        engine.backward(engine(torch.arange(5, 15)[None] + 7 * rank))
        engine.step()
        description = {"model": MODEL.model_dump(), "vocabulary_sha256": vocabulary_sha256(tokenizer), "ranks": 2}
        checkpoint.save(engine, ranks, folder / name, 1, description, keep=1)
        save_model(engine, tokenizer, folder / name)
        if rank == 0:
            tokenizer.save_pretrained(str(folder / name / "data" / "tokenizer"))


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    run_on_ranks(2, save_all, folder)
    return folder


@pytest.mark.parametrize("name", ENGINES)
def test_saved_model_and_checkpoint_hold_the_same(outputs: Path, name: str) -> None:
    _, bf16, _ = ENGINES[name]
    from_model = load_weights(outputs / name, None)
    from_checkpoint = load_weights(outputs / name / "checkpoints" / "step-000001", None)
    assert from_model.origin == str(outputs / name / "model")
    assert from_checkpoint.origin.endswith("checkpoints/step-000001 (after 1 updates)")
    # What BertForPreTraining and BertForQuestionAnswering share: the encoder without its pooler.
    whole = BertForPreTraining.from_pretrained(outputs / name / "model", dtype=torch.float32).state_dict()
    encoder = {key for key in whole if key.startswith("bert.") and "pooler" not in key}
    assert set(from_model.state) == set(from_checkpoint.state) == encoder
    finer = 0
    for key in encoder:
        saved, master = from_model.state[key], from_checkpoint.state[key]
        assert saved.dtype == master.dtype == torch.float32
        assert torch.equal(saved, whole[key])
        assert torch.equal(saved, master.bfloat16().float() if bf16 else master), key
        finer += int((saved != master).sum())
    # ZeRO's checkpoint of a run in bf16 gives the fp32 masters.
    assert bool(finer) == (name in ("zero1", "zero3"))
    start = BertForPreTraining(from_model.config)  # other random weights: something was trained and loaded
    assert not torch.equal(
        start.bert.embeddings.word_embeddings.weight, from_model.state["bert.embeddings.word_embeddings.weight"]
    )


def test_seeds_choose_the_head_alone_or_all(outputs: Path) -> None:
    weights = load_weights(outputs / "zero2", None)
    assert not weights.has_head
    one, again, other = (weights.model(seed).state_dict() for seed in (1, 1, 2))
    differing = {key for key in one if not torch.equal(one[key], other[key])}
    assert differing == {"qa_outputs.weight"}  # its bias starts at 0
    assert all(torch.equal(one[key], again[key]) for key in one)
    scratch = weights.without_state()
    one, other = (scratch.model(seed).state_dict() for seed in (1, 2))
    assert not torch.equal(
        one["bert.embeddings.word_embeddings.weight"], other["bert.embeddings.word_embeddings.weight"]
    )


def test_a_fine_tuned_model_keeps_its_head(outputs: Path, tmp_path: Path) -> None:
    weights = load_weights(outputs / "zero2", None)
    model = weights.model(3)
    model.save_pretrained(tmp_path)
    weights.tokenizer.save_pretrained(tmp_path)
    again = load_weights(tmp_path, None)
    assert again.has_head
    loaded = again.model(4).state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items())


def test_what_cannot_be_loaded(outputs: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere is neither a saved model .* nor a checkpoint"):
        load_weights(tmp_path / "nowhere", None)
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(InputError, match="is a gpt2, not a BERT"):
        load_weights(tmp_path / "gpt2", None)
    copied = tmp_path / "copied"
    shutil.copytree(outputs / "zero1" / "checkpoints", copied / "checkpoints")
    with pytest.raises(InputError, match=r"--tokenizer: .*data/tokenizer holds no tokenizer"):
        load_weights(copied, None)
    other = small_tokenizer()
    other.add_tokens(["wordy"])
    other.save_pretrained(str(tmp_path / "other"))
    with pytest.raises(InputError, match="was trained with another vocabulary"):
        load_weights(copied, tmp_path / "other")
    shards = sorted((copied / "checkpoints" / "step-000001").glob("*_optim_states.pt"))
    shards[0].write_bytes(b"cut")
    with pytest.raises(InputError, match=rf"is damaged: {shards[0].name} has 3 bytes"):
        load_weights(copied, None)


def test_a_model_without_an_encoder_or_with_too_few_pieces(outputs: Path, tmp_path: Path) -> None:
    weights = load_weights(outputs / "zero2", None)
    model = weights.model(1)
    state = {key: value for key, value in model.state_dict().items() if "layer.1." not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    weights.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"lacks 16 of the \d+ weights of its BERT.*bert\.encoder\.layer\.1\."):
        load_weights(tmp_path, None)
    large = small_tokenizer()
    large.add_tokens([f"word{number}" for number in range(50)])
    large.save_pretrained(str(tmp_path / "large"))
    with pytest.raises(InputError, match=r"--tokenizer has \d+ pieces and the model .* has \d+"):
        load_weights(outputs / "zero2", tmp_path / "large")
    assert BertForQuestionAnswering.from_pretrained(outputs / "zero2" / "model").config.vocab_size < len(large)


def write_marker(marker: str) -> None:
    """What a pickle of another author might run."""
    Path(marker).touch()


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return write_marker, (str(self.marker),)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("zero0", "mp_rank_00_model_states.pt"),
        ("zero1-bf16-fp32", "mp_rank_00_model_states.pt"),
        ("zero2", "mp_rank_00_model_states.pt"),
        ("zero2", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("zero3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("zero3", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_pickle_in_a_checkpoint_is_named_and_not_run(outputs: Path, tmp_path: Path, name: str, file: str) -> None:
    shutil.copytree(outputs / name / "checkpoints", tmp_path / "checkpoints")
    folder, marker = tmp_path / "checkpoints" / "step-000001", tmp_path / "ran"
    torch.save(torch.load(folder / file, weights_only=False) | {"more": Evil(marker)}, folder / file)
    with pytest.raises(InputError, match=f"is damaged: {file}"):
        load_weights(folder, outputs / name / "data" / "tokenizer")
    files = {path.name: fingerprint(path) for path in folder.glob("*") if path.name != "manifest.json"}
    write_manifest(folder, files)  # as whoever altered the file can do
    with pytest.raises(InputError, match=f"{file} names .*write_marker"):
        load_weights(folder, outputs / name / "data" / "tokenizer")
    assert not marker.exists()
    torch.load(folder / file, weights_only=False)
    assert marker.exists()


def test_a_pickle_in_a_saved_model_is_not_run(outputs: Path, tmp_path: Path) -> None:
    shutil.copytree(outputs / "zero2" / "model", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save({"bert.embeddings": Evil(tmp_path / "ran")}, tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_weights(tmp_path, None)
    assert not (tmp_path / "ran").exists()
