"""The norm of each of this rank's chunk gradients, by layer and micro-batch: which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class ChunkNorms:
    """2-norms of the gradients of a window, taken where they arise: only there are layer, rank and micro-batch known.

    One pass over each gradient, on the stream of the caller; nothing waits for it. A norm that is not finite means a
    NaN, an infinity, or squares whose sum leaves the range of fp32 (fp64 for fp64 gradients).
    """

    def __init__(self) -> None:
        self._noted: list[tuple[int, list[Tensor], Tensor]] = []
        self._forgotten: dict[Tensor, int] = {}

    def note(self, micro_batch: int, gradients: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Take the norms of gradients, or of parts of them, in the order in which a report names them.

        ``micro_batch`` is the number in the window, from 0.
        """
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for param, grad in gradients:
            params, grads = alike.setdefault((grad.device, grad.dtype), ([], []))
            params.append(param)
            grads.append(grad)
        for (_, dtype), (params, grads) in alike.items():
            wide = torch.promote_types(dtype, torch.float32)
            if len(grads) == 1:
                norms = torch.linalg.vector_norm(grads[0], dtype=wide).view(1)
            else:
                norms = torch.stack(torch._foreach_norm(grads, 2, dtype=wide))
            self._noted.append((micro_batch, params, norms))

    def forget(self, param: Tensor) -> None:
        """Forget the norms of one parameter so far: its gradient was thrown away unused."""
        if self._noted:
            self._forgotten[param] = len(self._noted)

    def _kept(self, index: int) -> list[int]:
        """Return which norms of a note are not forgotten."""
        params = self._noted[index][1]
        return [place for place, param in enumerate(params) if self._forgotten.get(param, 0) <= index]

    def any_bad(self, device: torch.device) -> Tensor:
        """Return whether any gradient of this rank is not finite: a bool scalar on ``device``."""
        kept = []
        for index, (_, params, norms) in enumerate(self._noted):
            places = self._kept(index) if self._forgotten else range(len(params))
            kept.append((norms if len(places) == len(params) else norms[places]).to(device, torch.float64))
        return torch.isfinite(torch.cat(kept)).all().logical_not_() if kept else torch.zeros((), device=device) > 0

    def bad(self) -> list[tuple[Tensor, int, str]]:
        """Return (parameter, micro-batch, "NaN" or "inf") of each gradient that is not finite, once; waits for them."""
        found: dict[tuple[Tensor, int], str] = {}
        for index, (micro_batch, params, norms) in enumerate(self._noted):
            values = norms.tolist()
            for place in self._kept(index):
                what = params[place], micro_batch
                if not math.isfinite(values[place]) and found.get(what) != "NaN":
                    found[what] = "NaN" if math.isnan(values[place]) else "inf"
        return [(param, micro_batch, kind) for (param, micro_batch), kind in found.items()]

    def clear(self) -> None:
        """Begin the next window."""
        self._noted.clear()
        self._forgotten.clear()
