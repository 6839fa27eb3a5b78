"""What an exported directory is called by, and transformers without its chatter; needs nothing that training needs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

EXPORT_NAME = "olmo_sparsity.json"
EXPORT_KIND = "olmo-sparsity export"


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and no warnings of the libraries that transformers imports where they are installed."""
    from transformers.utils import logging as transformers_logging

    bars, level = transformers_logging.is_progress_bar_enabled(), logging.root.manager.disable
    transformers_logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)
        if bars:
            transformers_logging.enable_progress_bar()
