"""The norm of each of this rank's chunk gradients, by layer and micro-batch: which of them are not finite."""

from __future__ import annotations

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
        """Take the norms of gradients, or of parts of them.

        Args:
            micro_batch: its number in the window, from 0.
            gradients: (parameter, gradient), in the order in which a report names them.
        """
        alike: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for param, grad in gradients:
            alike.setdefault((grad.device, grad.dtype), []).append((param, grad))
        for (_, dtype), pairs in alike.items():
            wide = torch.promote_types(dtype, torch.float32)
            norms = torch._foreach_norm([grad for _, grad in pairs], 2, dtype=wide)
            self._noted.append((micro_batch, [param for param, _ in pairs], torch.stack(norms)))

    def forget(self, param: Tensor) -> None:
        """Forget the norms of one parameter so far: its gradient was thrown away unused."""
        if self._noted:
            self._forgotten[param] = len(self._noted)

    def _bad(self) -> list[Tensor]:
        """Return for every note, ``(n,)``, which of its norms are not finite and not forgotten."""
        bad = []
        for index, (_, params, norms) in enumerate(self._noted):
            found = torch.isfinite(norms).logical_not_()
            if self._forgotten:
                kept = [self._forgotten.get(param, 0) <= index for param in params]
                found &= torch.tensor(kept, device=found.device)
            bad.append(found)
        return bad

    def any_bad(self, device: torch.device) -> Tensor:
        """Return whether any gradient of this rank is not finite: a bool scalar on ``device``."""
        parts = [found.any().to(device) for found in self._bad()]
        return torch.stack(parts).any() if parts else torch.zeros((), dtype=torch.bool, device=device)

    def bad(self) -> list[tuple[Tensor, int, str]]:
        """Return (parameter, micro-batch, "NaN" or "inf") of each gradient that is not finite, once; waits for them."""
        found: dict[tuple[Tensor, int], str] = {}
        for (micro_batch, params, norms), bad in zip(self._noted, self._bad(), strict=True):
            for param, norm, is_bad in zip(params, norms.tolist(), bad.tolist(), strict=True):
                if is_bad and found.get((param, micro_batch)) != "NaN":
                    found[param, micro_batch] = "NaN" if norm != norm else "inf"
        return [(param, micro_batch, kind) for (param, micro_batch), kind in found.items()]

    def clear(self) -> None:
        """Begin the next window."""
        self._noted.clear()
        self._forgotten.clear()
