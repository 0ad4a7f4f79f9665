"""Converted checkpoints in which something is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_vrgd.engines.deepspeed.checkpoints.universal import MANIFEST

Manifest = dict[str, Any]


def _edited(change: Callable[[Manifest], Any]) -> Callable[[Path], None]:
    def edit(tag: Path) -> None:
        manifest = json.loads((tag / MANIFEST).read_text())
        change(manifest)
        (tag / MANIFEST).write_text(json.dumps(manifest))

    return edit


def _edited_layer(change: Callable[[Manifest], Any]) -> Callable[[Path], None]:
    return _edited(lambda manifest: change(manifest["layers"]["up.weight"]))


def _replaced(file: str, content: Any) -> Callable[[Path], None]:
    return lambda tag: torch.save(content, tag / file)


#: By fault of a checkpoint of TinyLM's VRLAMB at stage 2: the change, and the error.
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda tag: (tag / "zero/up.weight/exp_avg_gsnr.pt").unlink(), "exp_avg_gsnr.pt is missing"),
    "no weights": (lambda tag: (tag / "zero/up.weight/fp32.pt").unlink(), "fp32.pt is missing"),
    "no manifest": (lambda tag: (tag / MANIFEST).unlink(), "was not converted by ds-vrgd"),
    "format": (_edited(lambda manifest: manifest.update(format=2)), "is of format 2"),
    "parameter": (_edited(lambda manifest: manifest["layers"].pop("up.weight")), "no trained parameter up.weight"),
    "groups": (_edited(lambda manifest: manifest.update(groups=3)), "has 3 param groups"),
    "group": (_edited_layer(lambda layer: layer.update(group=1)), "up.weight was in param group 1"),
    "shape": (_edited_layer(lambda layer: layer.update(shape=[9])), r"up.weight has shape \[9\]"),
    "states": (_edited_layer(lambda layer: layer["states"].pop()), "which shares its shard here"),
    "average": (
        _edited(lambda manifest: [layer["states"].remove("exp_avg_gsnr") for layer in manifest["layers"].values()]),
        "VRLAMB finds no exp_avg_gsnr in the checkpoint",
    ),
    "step": (_replaced("zero/up.weight/step.pt", torch.tensor(9.0)), "is 3.0, and 9.0 of up.weight"),
    "size": (
        _replaced("zero/up.weight/exp_avg.pt", {"param": torch.ones(7)}),
        "has 7 elements, and must have 143",
    ),
    "buffer": (_replaced("rest.pt", {}), "has no seen, which this model has frozen or as a buffer"),
}


def spoil(good: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    """Make a copy of ``good`` for each fault; return where it is, and the error that must follow."""
    found = {}
    for name, (change, message) in FAULTS.items():
        shutil.copytree(good, folder / name)
        change(folder / name / "global_step3")
        found[name] = folder / name, message
    return found
