"""Megatron-Core on CPU ranks: what it asks of CUDA is answered by the CPU, in the tests alone.

``python -m tests.engines.megatron.without_cuda PROGRAM`` runs a program like that.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class CudaIsTheCPU(TorchFunctionMode):
    """Makes tensors on the CPU that are asked for on CUDA, and names the types of CPU tensors as CUDA does."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        if function is torch.Tensor.cuda:
            return args[0]
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


def pretend() -> None:
    """Answer for CUDA in this process from now on."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return

    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = torch.cuda.empty_cache = nothing
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: SimpleNamespace(wait_stream=nothing)  # type: ignore[assignment, return-value]
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    CudaIsTheCPU().__enter__()
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


if __name__ == "__main__":
    pretend()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
