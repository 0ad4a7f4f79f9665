"""From logits to answers: the best valid spans of every window, and their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from ds_vrgd_recipes.bert.squad.data import Questions
from ds_vrgd_recipes.bert.squad.windows import TokenisedQuestions, Windows

_BATCH = 128  # windows at once


@dataclass(frozen=True)
class Candidate:
    """One possible answer, verbatim from the text; the probability is among the candidates of its question."""

    text: str
    probability: float
    start_logit: float
    end_logit: float


def answers(
    model: torch.nn.Module,
    source: Questions,
    tokenised: TokenisedQuestions,
    *,
    device: torch.device,
    bf16: bool,
    n_best: int,
    max_answer_tokens: int,
) -> dict[str, list[Candidate]]:
    """Return up to ``n_best`` different answers to every question, best first, by question id.

    A question whose text has no token gets the empty answer, as in BERT's own code.
    """
    spans = _all_spans(model, tokenised, device, bf16, n_best, max_answer_tokens)
    found: list[list[tuple[float, str, float, float]]] = [[] for _ in source.items]
    for window, number in enumerate(tokenised.questions.tolist()):
        item = source.items[number]
        context, offsets = source.contexts[item.context], tokenised.offsets[item.context]
        to_token = int(tokenised.first_tokens[window]) - int(tokenised.windows.text_starts[window])
        for start, end, start_logit, end_logit in zip(*(column[window].tolist() for column in spans), strict=True):
            total = start_logit + end_logit
            if total == -np.inf:
                break
            text = context[offsets[start + to_token, 0] : offsets[end + to_token, 1]]
            found[number].append((total, text, start_logit, end_logit))
    return {item.id: _ranked(each, n_best) for item, each in zip(source.items, found, strict=True)}


def best_spans(
    start_logits: torch.Tensor,
    end_logits: torch.Tensor,
    may_start: torch.Tensor,
    may_end: torch.Tensor,
    n_best: int,
    max_answer_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the ``n_best`` spans with the largest sum of logits that do not end before they start.

    Args:
        start_logits, end_logits: [B, L].
        may_start, may_end: [B, L] bool, the positions allowed.

    Returns:
        (scores, starts, ends): [B, n] each, best first; -inf for spans that are not allowed.
    """
    start_scores = start_logits.float().masked_fill(~may_start, -torch.inf)
    end_scores = end_logits.float().masked_fill(~may_end, -torch.inf)
    # [B, L, max_answer_tokens]: every start with each end within reach.
    ends = functional.pad(end_scores, (0, max_answer_tokens - 1), value=-torch.inf).unfold(1, max_answer_tokens, 1)
    scores = (start_scores[:, :, None] + ends).flatten(1)
    if scores.shape[1] < n_best:
        scores = functional.pad(scores, (0, n_best - scores.shape[1]), value=-torch.inf)
    best, index = scores.topk(n_best)
    starts = index // max_answer_tokens
    return best, starts, starts + index % max_answer_tokens


def _all_spans(
    model: torch.nn.Module,
    tokenised: TokenisedQuestions,
    device: torch.device,
    bf16: bool,
    n_best: int,
    max_answer_tokens: int,
) -> list[npt.NDArray[Any]]:
    """Return starts, ends, start logits and end logits of the n best spans of each window, best first, [W, n] each.

    Starts and ends are positions in the window. The sum of both logits is -inf for a span that is not allowed.
    """
    windows = tokenised.windows.to(device)
    # By length, so that there is little padding; the longest first, so that memory suffices from the start or never.
    by_length = np.argsort(-tokenised.lengths, kind="stable")
    pieces: list[tuple[torch.Tensor, ...]] = []
    model.eval()
    with torch.inference_mode():
        for begin in range(0, len(by_length), _BATCH):
            rows = by_length[begin : begin + _BATCH]
            chosen = torch.from_numpy(rows).to(device)
            pieces.append(
                _spans(model, windows, chosen, int(tokenised.lengths[rows[0]]), bf16, n_best, max_answer_tokens)
            )
    columns = [torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)]
    back = np.argsort(by_length)
    return [column[back] for column in columns]


def _spans(
    model: torch.nn.Module,
    windows: Windows,
    chosen: torch.Tensor,
    longest: int,
    bf16: bool,
    n_best: int,
    max_answer_tokens: int,
) -> tuple[torch.Tensor, ...]:
    """Return (starts, ends, start logits, end logits) of the windows ``chosen``, [B, n] each."""
    inputs = windows.inputs(chosen, longest)
    with torch.autocast(chosen.device.type, torch.bfloat16, enabled=bf16):
        output = model(**inputs)
    width = inputs["input_ids"].shape[1]
    places = torch.arange(width, device=chosen.device)
    may_start = windows.is_best[chosen, :width]
    may_end = (places >= windows.text_starts[chosen, None]) & (places < windows.lengths[chosen, None] - 1)
    scores, starts, ends = best_spans(
        output.start_logits, output.end_logits, may_start, may_end, n_best, max_answer_tokens
    )
    # A span that is not allowed may lie outside.
    start_logits = output.start_logits.float().gather(1, starts.clamp(max=width - 1))
    end_logits = output.end_logits.float().gather(1, ends.clamp(max=width - 1))
    return starts, ends, start_logits.masked_fill(scores == -torch.inf, -torch.inf), end_logits


def _ranked(found: list[tuple[float, str, float, float]], n_best: int) -> list[Candidate]:
    """Return the best of the different texts, each at its best position."""
    best: dict[str, tuple[float, float, float]] = {}
    for total, text, start_logit, end_logit in sorted(found, key=lambda each: -each[0]):
        if len(best) == n_best:
            break
        best.setdefault(text, (total, start_logit, end_logit))
    if not best:
        return [Candidate("", 1.0, 0.0, 0.0)]
    scores = np.array([total for total, _, _ in best.values()])
    weights = np.exp(scores - scores.max())
    return [
        Candidate(text, float(probability), start_logit, end_logit)
        for (text, (_, start_logit, end_logit)), probability in zip(best.items(), weights / weights.sum(), strict=True)
    ]
