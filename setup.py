"""Puts copies of configs/ and slurm/ into the wheel; everything else about the package stands in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithShippedFiles(build_py):
    """Builds the packages, and what `olmo_sparsity.util.files` finds where there is no checkout."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(
            self.build_lib, ignore_errors=True
        )  # of an earlier build, whose modules may be gone since
        super().run()
        for name in ("configs", "slurm"):
            shutil.copytree(name, Path(self.build_lib) / "olmo_sparsity" / "shipped" / name)


setup(cmdclass={"build_py": BuildWithShippedFiles})
