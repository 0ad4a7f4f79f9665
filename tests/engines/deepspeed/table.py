"""The exactness table: printed when the tests end, and written to docs/EXACTNESS.md on request."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import ClassVar

import deepspeed
import pytest
import torch

from ds_vrgd.optim import OPTIMIZERS
from tests.engines.deepspeed.cases import ACCUMULATIONS, ENGINES, LEFT_OUT, WORLDS, identify, variants
from tests.support.trajectory import Case, Result

COMMAND = "make test-full PYTEST_ARGS='tests/engines/deepspeed/test_exactness.py --write-exactness'"
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
the model's dtype: one backward pass per chunk, no engine and no hook.

Where DeepSpeed allows it (at stages 1 to 3, except for one wrapper), the optimizer replaces DeepSpeed's reduction
(`reduction` auto: fused mode). In the rows called "observe" it leaves it in place; those called "two nodes" send
gradients only inside groups of two ranks and moments between them.

In bf16 and fp16 a VR optimizer takes the mean from the chunks, summed in fp32, and not DeepSpeed's own, which is
rounded to the model's dtype: hence the figures of fp32. So do LARS and LAMB in fused mode, where the exchange serves
the mean alone. Elsewhere (stage 0, CPU offload, stage 1 with fp32 accumulation of bf16 weights, pipelines, experts,
`reduction="observe"`) they take DeepSpeed's mean, and their reference is given that mean in half precision, so the
figure is the error of the optimizer alone.

### LARS, LAMB and gamma = 1 in 16 bits

Where LARS and LAMB take DeepSpeed's mean, its rounding shows against the chunks' own: after 5 steps they are off by
6e-4 to 1.1e-2 of the distance that the weights moved in bf16, and by 7e-5 to 4.7e-3 in fp16 (the doctor's model, 2 and
3 ranks, 1 and 4 micro-batches, stages 0 to 2). On a step at which fp16's loss scale grows DeepSpeed halves the
gradient besides. With fp32 weights nothing is rounded; settings that would round there are refused.

`VRLARS` and `VRLAMB` with gamma = 1 are `LARS` and `LAMB`, bit for bit. The other optimizers with gamma = 1 leave
DeepSpeed's reduction alone, and their update is bitwise that of torch's optimizer in the same engine, except for stage
0 in bf16: there DeepSpeed lets torch's optimizer take a real step, with decay, while the engine is built, and ours
allocates its state without one.

### What users do between backward and step

r is measured on the chunks as they leave autograd: after every tensor hook, in whatever order hooks were registered.
The gradient of the step is the fp32 mean of the chunks, at the engine's scale and clipping. The exceptions, in this
order, are held against the reference at stages 0 to 3, in fused and observe mode, with CPU offload and in plain
PyTorch (`tests/engines/deepspeed/test_edits.py`, `tests/optim/test_edits.py`), and in random programs there, under
DeepSpeed, FSDP2 and Megatron-Core (`tests/optim/test_random.py`, and one of this name for each engine):

1. **Dropped.** After `zero_grad()` of the engine, of its wrapper or of the optimizer, no chunk so far belongs to the
   window. The same holds, layer by layer, for a `.grad` that was set to None or to zero in any way
   (`module.zero_grad()`, `p.grad.zero_()`, `p.grad.data.zero_()`, `p.grad = zeros`), where gradients stay in `.grad`:
   in plain PyTorch, under DDP, at stage 0, and in observe mode at stage 1. A gradient that autograd itself left at
   zero is a chunk. A backward pass that brings no gradient, as another model's loss through a frozen discriminator,
   is none; in plain PyTorch and under DDP, nor is one that brings a gradient to parameters with gamma = 1 alone. Two
   backward passes of one micro-batch are one chunk, their sum.
2. **Stale.** A layer without a gradient in a window's first or last micro-batch (a branch, layer drop, a head that is
   used now and then) has a zero gradient there. DeepSpeed reuses its buffers at ZeRO-3 and with CPU offload; they are
   cleared with every window and completed before every step, so that LAMB, LARS and gamma = 1 are right as well. At
   stage 1 with `overlap_comm` it leaves a gradient unreduced that the last backward pass did not bring; that is reduced
   before the step.
3. **Edited.** After `safe_set_full_grad`, `safe_set_local_grad`, an edit of `.grad`, or a hook on accumulated
   gradients, on one rank or on all, the edited gradient takes the mean's place. r stays that of the chunks.
4. **An error.** A second backward pass after the first one's gradients were exchanged, a pass that broke off, or ranks
   that disagree on k stop the step. The message names the layer and the way out.

Where GSNR is off and DeepSpeed's own reduction stays (`gamma=1`; LARS and LAMB in observe mode and with CPU offload),
so does what DeepSpeed makes of `zero_grad()` within a window, and of a second backward pass of a micro-batch. As with
AdamW, `zero_grad()` of the engine or of `engine.optimizer` throws the gradients away at stages 0 and 1, at stage 3 only
that of `engine.optimizer` does, and at stage 2 neither does.

Under an engine, a chunk is what one rank computes between two calls of `engine.step()`. Where the program owns the
accumulation boundary and steps once per window, a forward pass after a backward pass begins the next chunk: with
`set_gradient_accumulation_boundary` (the Hugging Face Trainer and Accelerate go by it),
`managed_gradient_accumulation: false` and `no_sync()`. At stages 1 to 3 gradients leave during the backward pass, so a
second pass has to be announced: by `engine.backward(first_loss, retain_graph=True)`, or by a forward pass of its own
before the first backward pass. An announced chunk is held back until it is complete, and takes the memory of a whole
gradient.

Without an engine each `backward()` is a chunk, also where two of them reach different layers: add the losses of a
micro-batch, and call it once.

In observe mode an edit is found by comparing what DeepSpeed hands over with the mean of the chunks, element by
element. What DeepSpeed's own rounding can explain is no edit: with n roundings to a dtype of unit roundoff u, and
chunks of mean m and variance v, that is ten times `u sqrt(n m^2 / 9 + v / 3)`; with sequence parallelism, where
DeepSpeed rounds each rank's part of a chunk, it is four times the layer's root mean square of that as well. In a
pipeline, weights that stages share are not compared. Each rank takes its part of an edited layer as a whole, and the
log says so once. In half precision an edited layer bears DeepSpeed's rounding. Two things have no effect in DeepSpeed
itself: its setters under `BF16_Optimizer` (stage 1 in bf16 with fp32 accumulation), which write to a gradient that
has been added up already, and `engine.module.zero_grad()` where `.grad` is empty after each pass.

`-` stands for one rank with one micro-batch, k = 1 chunk: no variance exists, and `deepspeed.initialize` refuses it
(which the test checks). A single window of one chunk is held against the reference in
`tests/engines/deepspeed/test_one_chunk.py`.

Tensor parallelism is held against the same reference, within the same bounds: [TENSOR_PARALLEL.md](TENSOR_PARALLEL.md).
"""

INVARIANCE = """\
## Settings, and the ways in which gradients travel

None of these may change the ratio: `tests/engines/deepspeed/test_exactness.py` also compares the layers' raw GSNR and
the clamped fractions of the first step with those of the plain configuration. Under clipping in half precision the norm
is DeepSpeed's where it reduces, taken from its own rounded mean: the bound is then 5e-3 of the distance moved.
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

    def page(self) -> str:
        """Return DeepSpeed's part of the document."""
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
            "\n".join(self.variants()),
        ]
        return "\n".join(parts)
