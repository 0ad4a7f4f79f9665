"""Question and text as BERT reads them: ``[CLS] question [SEP] text [SEP]``, a long text in several windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from transformers import BertTokenizerFast

from ds_vrgd_recipes.bert.squad.data import Questions
from ds_vrgd_recipes.run.errors import InputError

_TOKENISED_AT_ONCE = 1000
_SPECIAL = 3  # [CLS] and two [SEP]
_MULTIPLE = 8  # matrix units work on tiles

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowSize:
    """Lengths in tokens.

    Attributes:
        length: of a window, all of it.
        stride: from the start of one window's text to that of the next.
        question: a longer question is cut.
    """

    length: int
    stride: int
    question: int

    def __post_init__(self) -> None:
        if self.length <= self.question + _SPECIAL:
            raise InputError(
                f"--max-length {self.length} leaves no space for the text after a question of up to "
                f"--max-question-length {self.question} and {_SPECIAL} special tokens; raise the former or lower the "
                "latter"
            )


@dataclass(frozen=True)
class Windows:
    """All W windows of a file, of at most L tokens each, on one device.

    Attributes:
        input_ids: [W, L] int32, padded at the end.
        lengths: [W] tokens without padding.
        text_starts: [W] position of the text's first token.
        starts, ends: [W] positions of the answer's first and last token; 0, which is [CLS], where the window does not
            have all of it.
        is_best: [W, L] bool, whether no other window of the question shows more context of this token of the text.
    """

    input_ids: torch.Tensor
    lengths: torch.Tensor
    text_starts: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    is_best: torch.Tensor

    def to(self, device: torch.device) -> Windows:
        """Return the same on ``device``."""
        return Windows(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def inputs(self, chosen: torch.Tensor, longest: int) -> dict[str, torch.Tensor]:
        """Return the model's inputs for the windows ``chosen`` ([B], on this device), none over ``longest`` tokens."""
        width = min(-(-longest // _MULTIPLE) * _MULTIPLE, self.input_ids.shape[1])
        places = torch.arange(width, device=self.input_ids.device)
        return {
            "input_ids": self.input_ids[chosen, :width].long(),
            "token_type_ids": (places >= self.text_starts[chosen, None]).long(),
            "attention_mask": (places < self.lengths[chosen, None]).long(),
        }


@dataclass(frozen=True)
class TokenisedQuestions:
    """The windows of a file, and the way back to its text.

    Attributes:
        questions: [W] index of each window's question, ascending.
        first_tokens: [W] index in the text of the first token of the window.
        offsets: for each text [tokens, 2], first and last + 1 character of each token.
        lengths: [W] lengths of the windows, on the host.
        cut_questions: number of questions that were longer than allowed.
        without_window: questions about a text without a token, or in training without an answer at its place.
    """

    windows: Windows
    questions: Ints
    first_tokens: Ints
    offsets: list[Ints]
    lengths: Ints
    cut_questions: int
    without_window: list[int]


def tokenise(
    source: Questions, tokenizer: BertTokenizerFast, size: WindowSize, *, training: bool
) -> TokenisedQuestions:
    """Cut every question's text into windows.

    Args:
        training: find the answers, and leave out the questions whose answer is not at its place.

    Raises:
        InputError: no window is left.
    """
    texts, offsets = _tokens(source.contexts, tokenizer)
    questions, _ = _tokens([item.question for item in source.items], tokenizer)
    ids: list[Ints] = []
    best: list[npt.NDArray[np.bool_]] = []
    rows: list[tuple[int, int, int, int, int]] = []  # question, first token, start of text, start and end of answer
    without: list[int] = []
    for number, item in enumerate(source.items):
        text, question = texts[item.context], questions[number][: size.question]
        answer = None
        if training and source.has_answer_at_its_place(item):
            start = item.answers[0].answer_start
            answer = _token_span(offsets[item.context], start, start + len(item.answers[0].text))
        if not len(text) or (training and answer is None):
            without.append(number)
            continue
        spans = window_spans(len(text), size.length - _SPECIAL - len(question), size.stride)
        text_start = len(question) + 2
        head = np.concatenate([[tokenizer.cls_token_id], question, [tokenizer.sep_token_id]])
        for (first, last), shows_best in zip(spans, most_context(spans), strict=True):
            ids.append(np.concatenate([head, text[first:last], [tokenizer.sep_token_id]]))
            best.append(np.concatenate([np.zeros(text_start, bool), shows_best, [False]]))
            place = (0, 0)
            if answer is not None and first <= answer[0] and answer[1] < last:
                place = (text_start + answer[0] - first, text_start + answer[1] - first)
            rows.append((number, first, text_start, *place))
    if not rows:
        raise InputError(
            f"none of {len(source.items)} questions can be used: the text is empty, or the answer is not at its "
            "answer_start; look at the file"
        )
    columns = np.array(rows, dtype=np.int64).T
    _, _, text_starts, starts, ends = (torch.from_numpy(column.copy()) for column in columns)
    lengths = np.array([len(row) for row in ids], dtype=np.int64)
    windows = Windows(
        _padded(ids, lengths, tokenizer.pad_token_id, np.int32),
        torch.from_numpy(lengths),
        text_starts,
        starts,
        ends,
        _padded(best, lengths, False, np.bool_),
    )
    cut = sum(len(question) > size.question for question in questions)
    return TokenisedQuestions(windows, columns[0], columns[1], offsets, lengths, cut, without)


def window_spans(tokens: int, size: int, stride: int) -> list[tuple[int, int]]:
    """Return [first, last) of each window over a text of ``tokens``, without gaps; the last one ends with the text."""
    spans = [(0, min(size, tokens))]
    while spans[-1][1] < tokens:
        first = spans[-1][0] + min(stride, size)
        spans.append((first, min(first + size, tokens)))
    return spans


def most_context(spans: Sequence[tuple[int, int]]) -> list[npt.NDArray[np.bool_]]:
    """Return for each window which of its tokens have more context in it than in any other window.

    Context is the lesser number of tokens to the left and to the right, plus a hundredth of the window's length, as in
    BERT's own code (google-research/bert, run_squad.py). The first of equal windows wins.
    """
    tokens = np.arange(spans[-1][1])
    context = np.stack(
        [
            np.where(
                (tokens >= first) & (tokens < last),
                np.minimum(tokens - first, last - 1 - tokens) + 0.01 * (last - first),
                -1.0,
            )
            for first, last in spans
        ]
    )
    winner = context.argmax(axis=0)
    return [winner[first:last] == number for number, (first, last) in enumerate(spans)]


def _token_span(offsets: Ints, start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last token that share a character with ``start`` to ``end``; None if none does."""
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def _tokens(texts: Sequence[str], tokenizer: BertTokenizerFast) -> tuple[list[Ints], list[Ints]]:
    """Return ids and character offsets of each text, without special tokens."""
    ids: list[Ints] = []
    offsets: list[Ints] = []
    for begin in range(0, len(texts), _TOKENISED_AT_ONCE):
        encoded = tokenizer(
            list(texts[begin : begin + _TOKENISED_AT_ONCE]),
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # it would warn of texts longer than the position table
        )
        ids += [np.array(row, dtype=np.int64) for row in encoded["input_ids"]]
        offsets += [np.array(row, dtype=np.int64).reshape(-1, 2) for row in encoded["offset_mapping"]]
    return ids, offsets


def _padded(rows: Sequence[npt.NDArray[np.generic]], lengths: Ints, fill: int, dtype: type) -> torch.Tensor:
    padded: npt.NDArray[np.generic] = np.full((len(rows), int(lengths.max())), fill, dtype=dtype)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(rows)
    return torch.from_numpy(padded)
