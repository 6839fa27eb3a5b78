"""Puts copies of configs/ and slurm/ into the wheel; everything else about the package stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    """Builds the packages, and what `olmo_sparsity.util.shipped` finds where there is no checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("configs", "slurm"):
                target = Path(self.build_lib) / "olmo_sparsity" / "shipped" / name
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(name, target)


setup(cmdclass={"build_py": BuildWithShippedFiles})
