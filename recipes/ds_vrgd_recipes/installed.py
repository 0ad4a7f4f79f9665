"""Run files and DeepSpeed configurations that are installed with the package, found by name."""

from __future__ import annotations

from pathlib import Path

_IN_WHEEL = Path(__file__).parent / "configs"

#: The run files: the wheel's own, or those of the clone.
CONFIGS = _IN_WHEEL if _IN_WHEEL.is_dir() else Path(__file__).parents[2] / "configs"


def config_path(text: str) -> Path:
    """Return the path of a configuration; made for ``argparse``.

    Args:
        text: a path. Where nothing is there, a name within ``configs/``, such as ``bert-large/64k-32k.yaml``, with or
            without ``configs/`` before it.

    Returns:
        The path, or that of the installed file. If there is neither, the path, for the error of whoever reads it.
    """
    path = Path(text)
    if path.exists() or path.is_absolute():
        return path
    name = path.relative_to("configs") if path.parts[:1] == ("configs",) else path
    installed = CONFIGS / name
    return installed if ".." not in name.parts and installed.is_file() else path
