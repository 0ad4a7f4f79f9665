"""The configurations to measure, in their order: a run that is cut short has the most important ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.contenders import BARE, CONTENDERS, REFERENCE

STAGES = (1, 2, 3, 0)
ACCUMULATIONS = (1, 4)

#: What the claim of this package is about: measured first, at every stage.
_FIRST = (BARE, REFERENCE, "vrlamb", "vrlamb-fused", "vrlamb-observe")


@dataclass(frozen=True)
class Configuration:
    """One training that is timed.

    Attributes:
        model: its name in ``bert.NETWORKS``.
        stage: of ZeRO; None without an engine.
        accumulation: micro-batches of a step on each rank.
        contender: its name in ``contenders.CONTENDERS``.
        micro_batch: sequences of a micro-batch on each rank.
    """

    model: str
    stage: int | None
    accumulation: int
    contender: str
    micro_batch: int

    def __str__(self) -> str:
        stage = "no engine" if self.stage is None else f"stage {self.stage}"
        return f"{self.model}, {stage}, accumulation {self.accumulation}, {self.contender}"


def configurations(
    models: dict[str, int], stages: Sequence[int], accumulations: Sequence[int], contenders: Sequence[str], ranks: int
) -> list[Configuration]:
    """Return all that exist among the wanted, contenders of one (model, stage, accumulation) next to each other.

    Args:
        models: name to micro-batch, in order.
        stages, accumulations, contenders: in order.
        ranks: data-parallel ranks; a contender that observes is left out where a step has a single chunk.
    """
    found = [
        Configuration(model, stage, accumulation, name, micro_batch)
        for model, micro_batch in models.items()
        for name in contenders
        for stage in (stages if CONTENDERS[name].has_stages else [None])
        if stage is None or stage in CONTENDERS[name].stages
        for accumulation in accumulations
        if ranks * accumulation > 1 or not CONTENDERS[name].observes
    ]
    models_order = list(models)

    def importance(c: Configuration) -> tuple[int, bool, bool, int, int, int]:
        return (
            models_order.index(c.model),
            c.contender not in _FIRST,
            c.stage is not None and c.stage == 0,
            -1 if c.stage is None else list(stages).index(c.stage),
            list(accumulations).index(c.accumulation),
            list(contenders).index(c.contender),
        )

    return sorted(found, key=importance)
