"""MkDocs hook: the site is built from the repository's own paths, so that one link serves the site and the repository.

MkDocs reads one folder of documents and refuses the repository root. This hook replaces what it found there by the
pages of the root, of `docs/` and of `results/`, with their figures, at the paths that they have in the repository.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "docs/*.md",
    "docs/*.ipynb",
    "docs/*.svg",
    "docs/reference/*.md",
    "docs/*.css",
    "results/*.csv",
    "results/models/sdists*",
    "results/**/*.md",
    "results/**/*.png",
    "results/**/*.html",
)


def on_files(files: Files, config: Any) -> Files:
    """The theme's own files, and those of the repository that match `PATTERNS`."""
    from_theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    pages = [
        File(path.relative_to(ROOT).as_posix(), str(ROOT), config.site_dir, config.use_directory_urls)
        for path in paths
    ]
    return Files([*from_theme, *pages])
