"""A small corpus and a run file over it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

PART = 4000  # characters; about a sixth of the corpus


def corpus_text(documents: int = 60, seed: int = 0) -> str:
    """Documents of 4 to 12 sentences over 120 invented words, a blank line between them."""
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in "aeiou"]
    words = ["".join(rng.choice(syllables, size=rng.integers(1, 4))) for _ in range(120)]
    return "\n\n".join(
        "\n".join(
            " ".join(rng.choice(words, size=rng.integers(4, 12))).capitalize() + "." for _ in range(rng.integers(4, 13))
        )
        for _ in range(documents)
    )


def run_settings(corpus: Path, /, **changes: Any) -> dict[str, Any]:
    """A complete run file over a folder of text: two phases, 8 chunks of two sequences in every update."""
    settings: dict[str, Any] = {
        "seed": 3,
        "model": {
            "num_hidden_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        },
        "corpus": {"source": "folder", "path": str(corpus)},
        "vocabulary": {"size": 256},
        "held_out_every": 5,
        "evaluation_sequences": 30,
        "checkpoint_every": 3,
        "phases": [
            {
                "sequence_length": 24,
                "global_batch": 16,
                "micro_batch": 2,
                "steps": 4,
                "lr": 0.02,
                "warmup_ratio": 0.25,
            },
            {
                "sequence_length": 32,
                "global_batch": 24,
                "micro_batch": 2,
                "steps": 2,
                "lr": 0.01,
                "warmup_steps": 1,
            },
        ],
    }
    return settings | changes
