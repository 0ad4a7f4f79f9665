"""A packed batch holds what the padded one does, and the network computes on it what it computes on the padded one."""

from __future__ import annotations

import copy
import functools
import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForPreTraining, BertConfig

from ds_vrgd_recipes.bert.attention import packed_attention
from ds_vrgd_recipes.bert.examples import IGNORED_LABEL, Batch, ExampleBuilder, SpecialIds
from ds_vrgd_recipes.bert.model import PretrainingModel
from ds_vrgd_recipes.bert.packing import pack
from ds_vrgd_recipes.bert.prepared import PreparedData

LENGTHS = (5, 17, 1, 32)
STARTS = torch.tensor([0, 5, 22, 23, 55], dtype=torch.int32)


def small(data: PreparedData, dropout: float) -> BertConfig:
    return BertConfig(
        vocab_size=len(data.tokenizer),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )


@pytest.fixture(scope="module")
def batch(data: PreparedData) -> Batch:
    builder = ExampleBuilder(data.train, data.chunks["train", 32], 32, SpecialIds.of(data.tokenizer))
    return builder.batch(list(range(8)), [(index,) for index in range(8)])


def test_packed_holds_what_padded_does(batch: Batch) -> None:
    packed = pack(batch)
    assert (batch["attention_mask"] == 0).any()  # or there would be nothing to leave out
    spans = list(itertools.pairwise(packed["starts"].tolist()))
    assert [end - begin for begin, end in spans] == batch["attention_mask"].sum(1).tolist()
    labels = torch.full_like(packed["input_ids"], IGNORED_LABEL)
    labels[packed["masked_positions"]] = packed["labels"]
    for example, (begin, end) in enumerate(spans):
        length = end - begin
        assert packed["position_ids"][begin:end].tolist() == list(range(length))
        assert torch.equal(packed["input_ids"][begin:end], batch["input_ids"][example, :length])
        assert torch.equal(packed["token_type_ids"][begin:end], batch["token_type_ids"][example, :length])
        assert torch.equal(labels[begin:end], batch["labels"][example, :length])


def attention_of_one(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
        ),
    ],
)
def test_every_example_attends_to_itself_alone(device: str) -> None:
    torch.manual_seed(0)
    dtype, bound = (torch.float64, 1e-12) if device == "cpu" else (torch.bfloat16, 2e-2)
    exact = [torch.randn(55, 2, 16, dtype=torch.float64) for _ in range(4)]
    wanted_inputs = [tensor.clone().requires_grad_() for tensor in exact[:3]]
    wanted = torch.cat(
        [attention_of_one(*parts) for parts in zip(*(t.split(LENGTHS) for t in wanted_inputs), strict=True)]
    )
    inputs = [tensor.to(device, dtype).transpose(0, 1)[None].requires_grad_() for tensor in exact[:3]]
    found, _ = packed_attention(
        torch.nn.Module(), *inputs, None, dropout=0.0, scaling=0.3, starts=STARTS.to(device), longest=40
    )
    torch.testing.assert_close(found[0].cpu().double(), wanted.detach(), rtol=bound, atol=bound)
    wanted_grads = torch.autograd.grad(wanted, wanted_inputs, exact[3])
    grads = torch.autograd.grad(found[0], inputs, exact[3].to(device, dtype))
    for grad, wanted_grad in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(grad[0].transpose(0, 1).cpu().double(), wanted_grad, rtol=bound, atol=2 * bound)


def test_gradients_are_those_of_the_padded_model(batch: Batch, data: PreparedData) -> None:
    torch.manual_seed(0)
    config = small(data, dropout=0.0)
    model = PretrainingModel(config).double()
    padded = AutoModelForPreTraining.from_config(copy.deepcopy(config), attn_implementation="eager").double()
    padded.load_state_dict(model.network.state_dict())
    sum(model(**pack(batch), longest=32)).backward()
    padded(**batch).loss.backward()
    for (name, param), other in zip(model.network.named_parameters(), padded.parameters(), strict=True):
        torch.testing.assert_close(
            # The loss is taken from logits in fp32.
            param.grad,
            other.grad,
            rtol=2e-6,
            atol=1e-7,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_activation_checkpointing_changes_no_gradient(batch: Batch, data: PreparedData) -> None:
    """With dropout: what is computed twice draws the same numbers twice."""
    config = small(data, dropout=0.1)
    grads = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = PretrainingModel(copy.deepcopy(config), activation_checkpointing=checkpointing).train()
        calls = []
        model.network.bert.encoder.layer[0].attention.register_forward_hook(lambda *_, calls=calls: calls.append(0))
        sum(model(**pack(batch), longest=32)).backward()
        assert len(calls) == 1 + checkpointing
        grads.append([param.grad for param in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.slow
def test_compiled_layers_have_the_same_losses_and_gradients(
    batch: Batch, data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In training and evaluation, with other numbers of tokens too; traced, without generating code."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch.manual_seed(0)
    plain = PretrainingModel(small(data, dropout=0.0))
    compiled = copy.deepcopy(plain)
    compiled.compile_layers()
    graphs = counters["stats"]["unique_graphs"]
    for rows in (8, 3, 5):
        part = {name: tensor[:rows] for name, tensor in batch.items()}
        with torch.no_grad():
            wanted, found = (sum(model.eval()(**pack(part), longest=32)) for model in (plain, compiled))
        assert torch.equal(wanted, found)
        grads = []
        for model in (plain, compiled):
            model.train().zero_grad()
            sum(model(**pack(part), longest=32)).backward()
            grads.append([param.grad for param in model.parameters()])
        for wanted, found in zip(*grads, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    # Embeddings, one layer for all, head and loss, each with and without gradients; for any number of tokens.
    assert counters["stats"]["unique_graphs"] - graphs == 8
