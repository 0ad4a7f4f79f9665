"""Put the repository's ``configs/``, the only source of run files, into the sdist and the wheel.

A link would do the same, but archives and checkouts that cannot keep links turn it into a text file.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

CONFIGS = Path(__file__).resolve().parent.parent / "configs"  # nothing is there when a wheel is built from the sdist


def add_configs(root: str) -> None:
    """Copy the run files into the package below ``root``."""
    if CONFIGS.is_dir():
        shutil.copytree(CONFIGS, Path(root, "ds_vrgd_recipes", "configs"), dirs_exist_ok=True)


class BuildPy(build_py):
    """Build for a wheel; an editable installation reads ``configs/`` itself."""

    def run(self) -> None:
        """Add the run files to the modules."""
        super().run()
        if not self.editable_mode:
            add_configs(self.build_lib)


class SDist(sdist):
    """Build the sdist."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Add the run files to the package's own files."""
        super().make_release_tree(base_dir, files)
        add_configs(base_dir)


setup(cmdclass={"build_py": BuildPy, "sdist": SDist})
