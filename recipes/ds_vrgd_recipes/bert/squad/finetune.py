"""Fine-tune and answer, once per seed; the median over the seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from ds_vrgd_recipes.bert.squad.data import Questions, read_squad
from ds_vrgd_recipes.bert.squad.metric import Scores, score
from ds_vrgd_recipes.bert.squad.predict import Candidate, answers
from ds_vrgd_recipes.bert.squad.settings import Settings
from ds_vrgd_recipes.bert.squad.training import train
from ds_vrgd_recipes.bert.squad.weights import Weights, load_weights
from ds_vrgd_recipes.bert.squad.windows import TokenisedQuestions, tokenise
from ds_vrgd_recipes.run.errors import InputError
from ds_vrgd_recipes.run.files import write_text
from ds_vrgd_recipes.run.locks import LOCK, locked_output


def finetune(settings: Settings, report: Callable[[str], None]) -> str:
    """Fine-tune for every seed, and answer the questions of ``predict_file``.

    Writes ``result.json`` into the output, and for each seed ``seed-N/predictions.json`` ({id: text}, as the official
    script reads it), ``seed-N/nbest_predictions.json`` and, after a training, ``seed-N/model``.

    Args:
        report: is called with lines for the user.

    Returns:
        The line that sums the fine-tuning up.

    Raises:
        InputError: something that the user gave cannot be used; nothing was trained or overwritten.
        TrainingFailed: the loss is not finite, or too many updates are skipped.
    """
    with locked_output(settings.output, "fine-tuning"):
        return _finetune(settings, report)


def _finetune(settings: Settings, report: Callable[[str], None]) -> str:
    if any(path.name != LOCK for path in settings.output.iterdir()):
        raise InputError(f"--output {settings.output} exists and is not an empty folder; remove it or give another")
    predict_on = read_squad(settings.predict_file, "--predict-file")
    train_on = None if settings.train_file is None else read_squad(settings.train_file, "--train-file")
    weights = load_weights(settings.model, settings.tokenizer)
    if settings.from_scratch:
        weights = weights.without_state()
    _check_fit(settings, weights)
    predict_windows = tokenise(predict_on, weights.tokenizer, settings.window, training=False)
    why = "answered with nothing: their text is empty"
    _report_windows(report, "--predict-file", predict_on, predict_windows, why)
    train_windows = None
    if train_on is not None:
        train_windows = tokenise(train_on, weights.tokenizer, settings.window, training=True)
        why = "left out: their answer is not at its answer_start"
        _report_windows(report, "--train-file", train_on, train_windows, why)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bf16 = settings.autocasts(device)
    report(f"weights: {weights.origin}; {device.type}, {'bf16 autocast' if bf16 else 'fp32'}")

    results: list[dict[str, Any]] = []
    for seed in settings.seeds:
        model = weights.model(seed).to(device)
        trained = None if train_windows is None else train(model, train_windows, settings, seed, device)
        found, predictions, scores = answered(model, predict_on, predict_windows, settings, device)
        folder = settings.output / f"seed-{seed}"
        folder.mkdir(parents=True)
        _write(folder / "predictions.json", predictions)
        _write(
            folder / "nbest_predictions.json",
            {name: [asdict(candidate) for candidate in each] for name, each in found.items()},
        )
        speed = ""
        if trained is not None:
            model.save_pretrained(str(folder / "model"))
            weights.tokenizer.save_pretrained(str(folder / "model"))
            speed = f" ({trained.updates} updates in {trained.seconds:.1f} s, loss {trained.loss:.3f})"
        results.append({"seed": seed, **asdict(scores), **({} if trained is None else asdict(trained))})
        report(f"seed {seed}: {_shown(scores)}{speed}")
    median = Scores(*(statistics.median(result[name] for result in results) for name in ("exact_match", "f1")))
    summary = _shown(median) + (f", median over {len(results)} seeds" if len(results) > 1 else "")
    _write(
        settings.output / "result.json",
        {
            "summary": summary,
            "median": asdict(median),
            "seeds": results,
            "questions": len(predict_on.items),
            "weights": weights.origin,
            "settings": settings.model_dump(mode="json"),
        },
    )
    return summary


def answered(
    model: torch.nn.Module, source: Questions, tokenised: TokenisedQuestions, settings: Settings, device: torch.device
) -> tuple[dict[str, list[Candidate]], dict[str, str], Scores]:
    """Return candidates and the text of the best one, by question id, and their scores. ``model`` is on ``device``."""
    found = answers(
        model,
        source,
        tokenised,
        device=device,
        bf16=settings.autocasts(device),
        n_best=settings.n_best,
        max_answer_tokens=settings.max_answer_length,
    )
    predictions = {name: candidates[0].text for name, candidates in found.items()}
    return found, predictions, score(source.truths(), predictions)


def _check_fit(settings: Settings, weights: Weights) -> None:
    positions = weights.config.max_position_embeddings
    if settings.max_length > positions:
        raise InputError(
            f"--max-length {settings.max_length} is more than the {positions} positions of the model; lower it"
        )
    if settings.train_file is None and not weights.has_head:
        raise InputError(
            f"--model {settings.model} is pre-trained and has not learned to answer; give a --train-file, or the "
            "folder seed-.../model of a fine-tuning"
        )


def _report_windows(
    report: Callable[[str], None], option: str, source: Questions, tokenised: TokenisedQuestions, why: str
) -> None:
    report(f"{option}: {len(source.items):,} questions, {len(tokenised.lengths):,} windows")
    if tokenised.cut_questions:
        report(f"{option}: {tokenised.cut_questions:,} questions were cut to --max-question-length")
    if tokenised.without_window:
        names = [source.items[number].id for number in tokenised.without_window]
        report(f"{option}: {len(names):,} questions {why} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})")


def _shown(scores: Scores) -> str:
    return f"F1 {scores.f1:.2f}, exact match {scores.exact_match:.2f}"


def _write(path: Any, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
