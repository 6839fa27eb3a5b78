"""Puts copies of configs/, slurm/ and the pages of docs/ into the wheel; all else stands in pyproject.toml."""

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
        shipped = Path(self.build_lib) / "olmo_sparsity" / "shipped"
        for name in ("configs", "slurm"):
            shutil.copytree(name, shipped / name)
        (shipped / "docs").mkdir()
        for page in Path("docs").glob("*.md"):  # messages and --help name them
            shutil.copy(page, shipped / "docs")


setup(cmdclass={"build_py": BuildWithShippedFiles})
