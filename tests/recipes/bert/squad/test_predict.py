"""The best spans against a search through all of them; answers verbatim; n-best over several windows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ds_vrgd_recipes.bert.squad.data import read_squad
from ds_vrgd_recipes.bert.squad.predict import answers, best_spans
from ds_vrgd_recipes.bert.squad.windows import WindowSize, tokenise
from tests.recipes.bert.squad.cases import small_tokenizer, write

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_answer_tokens", [1, 3, 20])
def test_best_spans_are_those_of_a_full_search(max_answer_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    start, end = torch.randn(3, 12, generator=generator), torch.randn(3, 12, generator=generator)
    may_start, may_end = torch.rand(3, 12, generator=generator) < 0.6, torch.rand(3, 12, generator=generator) < 0.6
    n_best = 7
    scores, starts, ends = best_spans(start, end, may_start, may_end, n_best, max_answer_tokens)
    for row in range(3):
        every = [
            (float(start[row, i] + end[row, j]), i, j)
            for i in range(12)
            for j in range(i, min(12, i + max_answer_tokens))
            if may_start[row, i] and may_end[row, j]
        ]
        expected = sorted(every, reverse=True)[:n_best]
        found = [
            (score, i, j)
            for score, i, j in zip(scores[row].tolist(), starts[row].tolist(), ends[row].tolist(), strict=True)
            if score != -torch.inf
        ]
        assert [(i, j) for _, i, j in found] == [(i, j) for _, i, j in expected]
        assert [score for score, _, _ in found] == pytest.approx([score for score, _, _ in expected])


class Scripted(torch.nn.Module):
    """Logits by token: so much for a start or an end at this piece, plus a hundredth of the place in the window."""

    def __init__(self, starts: dict[int, float], ends: dict[int, float]) -> None:
        super().__init__()
        self.starts, self.ends = torch.full((999,), -5.0), torch.full((999,), -5.0)
        for logits, wanted in ((self.starts, starts), (self.ends, ends)):
            for piece, value in wanted.items():
                logits[piece] = value

    def forward(self, input_ids: torch.Tensor, **_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(start_logits=self.starts[input_ids], end_logits=self.ends[input_ids])


def test_answers_are_verbatim_ranked_and_never_from_the_question(tmp_path: Path) -> None:
    long = "It was quiet.  Ada  lives in\nRome , " + "and nobody said a word . " * 8 + "Bo lives in ROME-Oslo ."
    content = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": context,
                        "qas": [{"id": name, "question": "Rome Oslo ?", "answers": [{"text": "x", "answer_start": 0}]}],
                    }
                    for name, context in (("long", long), ("short", "Ada"), ("empty", " "))
                ]
            }
        ]
    }
    source = read_squad(write(tmp_path / "a.json", content), "--predict-file")
    tokenizer = small_tokenizer()
    tokenised = tokenise(source, tokenizer, WindowSize(24, 6, 8), training=False)
    assert len(tokenised.lengths) > 5
    rome, oslo, ada, special, pad = tokenizer.convert_tokens_to_ids(["rome", "oslo", "ada", "[SEP]", "[PAD]"])
    # The largest logits are where no answer can be.
    model = Scripted(
        {rome: 2.0, ada: 1.0, special: 9.0, pad: 9.0}, {oslo: 1.5, rome: 1.0, ada: 0.0, special: 9.0, pad: 9.0}
    )
    found = answers(model, source, tokenised, device=CPU, bf16=False, n_best=4, max_answer_tokens=8)

    best = found["long"]
    # rome-oslo 2 + 1.5; rome 2 + 1, in both places ("Rome", "ROME" differ as text); ada to rome 1 + 1; then rome alone
    assert [candidate.text for candidate in best[:1]] == ["ROME-Oslo"]
    assert {candidate.text for candidate in best[1:3]} == {"Rome", "ROME"}
    assert best[3].text == "Ada  lives in\nRome"
    assert [candidate.start_logit + candidate.end_logit for candidate in best] == pytest.approx([3.5, 3.0, 3.0, 2.0])
    weights = torch.tensor([3.5, 3.0, 3.0, 2.0]).softmax(0).tolist()
    assert [candidate.probability for candidate in best] == pytest.approx(weights)

    assert [candidate.text for candidate in found["short"]] == ["Ada"]
    assert [(each.text, each.probability) for each in found["empty"]] == [("", 1.0)]

    short = answers(model, source, tokenised, device=CPU, bf16=False, n_best=4, max_answer_tokens=2)
    assert "ROME-Oslo" not in [candidate.text for candidate in short["long"]]  # three tokens


def test_the_order_of_windows_by_length_is_undone(tmp_path: Path) -> None:
    names = ["Ada", "Bo", "Cy"]
    content = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": f"{'a ' * (30 * ((number * 2) % 3))}{name}",
                        "qas": [{"id": name, "question": "?", "answers": [{"text": name, "answer_start": 0}]}],
                    }
                    for number, name in enumerate(names)
                ]
            }
        ]
    }
    source = read_squad(write(tmp_path / "a.json", content), "--predict-file")
    tokenizer = small_tokenizer()
    tokenised = tokenise(source, tokenizer, WindowSize(24, 6, 8), training=False)
    pieces = dict.fromkeys(tokenizer.convert_tokens_to_ids([name.lower() for name in names]), 3.0)
    found = answers(Scripted(pieces, pieces), source, tokenised, device=CPU, bf16=False, n_best=1, max_answer_tokens=1)
    assert {name: each[0].text for name, each in found.items()} == {name: name for name in names}
