"""The exactness table: printed when the tests end, and written to docs/EXACTNESS.md on request."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import deepspeed
import pytest
import torch

from ds_vrgd.optim import OPTIMIZERS
from tests.support.trajectory import Case, Result
from tests.zero.cases import ACCUMULATIONS, ENGINES, LEFT_OUT, WORLDS, identify, variants

COMMAND = "make test-full PYTEST_ARGS='tests/zero/test_exactness.py --write-exactness'"
#: A slow case, in a run without the slow tests.
NOT_RUN = "not run"

PREFACE = """\
# Exactness

Every optimizer, under every ZeRO stage and wrapper, held against a dense float64 reference
(`ds_vrgd/doctor/reference.py`) that has the chunk gradients in a list. Each figure is the norm-wise error of the
fp32 (master) weights after 5 steps, |theta - theta_ref| / |theta_ref|. The bound is 8e-7.

The model (`tests/support/model.py`) has odd sizes, an embedding with unused rows, a LayerNorm, an output head tied
to the embedding and a frozen weight; two param groups; a reduction bucket of 300 elements, so that three ranks cut
the embedding in three. The chunk gradients come from a plain copy of the model that holds the engine's weights, in
the model's dtype: one backward pass a chunk, no engine and no hook.

Where DeepSpeed allows it, and so at stages 1 to 3 but for one wrapper, the optimizer replaces DeepSpeed's reduction
(`reduction` auto: fused mode); the rows called "observe" look on beside it, and those called "two nodes" send gradients
only inside groups of two ranks and moments between them.

In bf16 and fp16 a VR optimizer takes the mean from the chunks, summed in fp32, and not DeepSpeed's own, which is
rounded to the model's dtype: hence the figures of fp32. LARS and LAMB (gamma = 1) observe nothing and take
DeepSpeed's mean; in half precision their reference is given that mean, so the figure is the error of the optimizer
alone.

`-` stands for one rank with one micro-batch, k = 1 chunk: no variance exists, and the step is refused with an error
(which the test checks).

Tensor parallelism is held against the same reference, within the same bounds: [TENSOR_PARALLEL.md](TENSOR_PARALLEL.md).
"""

INVARIANCE = """\
## Settings, and the ways in which gradients travel

None of these may change the ratio: `tests/zero/test_exactness.py` also compares the layers' raw GSNR and the clamped
fractions of the first step with those of the plain configuration. Under clipping in half precision the norm is
DeepSpeed's where it reduces, taken from its own rounded mean: the bound is then 5e-3 of the distance moved.
"""


class ExactnessTable:
    """Renders outcomes.

    Args:
        outcomes: by (world, id).
    """

    key: ClassVar[pytest.StashKey[ExactnessTable]] = pytest.StashKey()

    def __init__(self, outcomes: Mapping[tuple[int, str], Result | str]) -> None:
        self._outcomes = outcomes

    def _cell(self, world: int, case: Case) -> str:
        outcome = self._outcomes.get((world, identify(case)), NOT_RUN)
        if isinstance(outcome, Result):
            return f"{outcome.of_weights:.1e}"
        return "-" if "k = 1" in outcome else outcome if outcome == NOT_RUN else "FAILED"

    def matrix(self) -> list[str]:
        """Markdown lines: a row for each optimizer and engine, a column for each number of ranks and micro-batches."""
        columns = [(world, accumulation) for world in WORLDS for accumulation in ACCUMULATIONS]
        lines = [
            "| optimizer | stage | dtype | " + " | ".join(f"{w} x {a}" for w, a in columns) + " |",
            "| --- | --- | --- |" + " --- |" * len(columns),
        ]
        for optimizer in OPTIMIZERS:
            for stage, dtype, accum_dtype in ENGINES:
                cells = [self._cell(w, Case(optimizer, stage, dtype, a, accum_dtype)) for w, a in columns]
                shown = f"{dtype}, {accum_dtype} accumulation" if accum_dtype else dtype
                lines.append(f"| {optimizer} | {stage} | {shown} | " + " | ".join(cells) + " |")
        return lines

    def variants(self) -> list[str]:
        """Markdown lines: the settings around VRLAMB."""
        lines = [
            "| setting | optimizer | ranks x micro-batches | stage | dtype | of the weights | of the distance moved |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for world, name, case in variants():
            outcome = self._outcomes.get((world, name), NOT_RUN)
            if isinstance(outcome, Result):
                cells = (f"{outcome.of_weights:.1e}", f"{outcome.of_distance:.1e}")
            else:
                cells = (outcome if outcome == NOT_RUN else "FAILED", "")
            note = name.split(f"gas{case.accumulation}-", 1)[1].replace("_", " ")
            dtype = f"{case.dtype}, {case.accum_dtype} accumulation" if case.accum_dtype else case.dtype
            split = f"{world} x {case.accumulation}"
            lines.append(f"| {note} | {case.optimizer} | {split} | {case.stage} | {dtype} | {cells[0]} | {cells[1]} |")
        return lines

    def write(self, path: Path) -> None:
        """The whole document."""
        python = platform.python_version()
        versions = f"Python {python}, torch {torch.__version__}, DeepSpeed {deepspeed.__version__}, CPU, gloo"
        left_out = [f"- {what}: {why}" for what, why in LEFT_OUT.items()]
        parts = [
            PREFACE,
            f"Measured with {versions}:\n\n    {COMMAND}\n",
            "## Optimizers x engines\n\nColumns: ranks x accumulated micro-batches.\n",
            "\n".join(self.matrix()),
            "\nLeft out:\n\n" + "\n".join(left_out) + "\n",
            INVARIANCE,
            "\n".join(self.variants()) + "\n",
        ]
        path.write_text("\n".join(parts), encoding="utf-8")
