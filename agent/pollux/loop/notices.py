"""Lines that a user sees without setting up logging.

They tell of restores, changes of GPUs or batch size, and the end of a training.
"""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("pollux")


def notice(text: str) -> None:
    """Log `text`, or print it to stderr if the script's logging hides it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(f"pollux: {text}", file=sys.stderr, flush=True)
