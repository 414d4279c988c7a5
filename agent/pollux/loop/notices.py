"""Lines that a user sees without setting up logging: restores, changes of GPUs or batch size, the end."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("pollux")


def notice(text: str) -> None:
    """Log `text`; print it to stderr where the script has not set up logging that shows it."""
    if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
        logger.info(text)
    else:
        print(f"pollux: {text}", file=sys.stderr, flush=True)
