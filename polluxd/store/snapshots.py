"""Keep the snapshot that a cycle decided on.

Its size and its text depend on users. So it is written after the cycle, in a transaction of its own: the cycle's
transaction holds the leader's row, and the lease could not be renewed during the write.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

from polluxd.errors import StoreError

from .transactions import QueryRunner

log = logging.getLogger(__name__)


def keep_snapshot(
    transaction: Callable[[], AbstractContextManager[QueryRunner]], cycle_id: int, text: str
) -> None:
    """Add a snapshot to its cycle, or log why that fails.

    Raises no StoreError.
    """
    try:
        with transaction() as run:
            run("record_snapshot", cycle_id=cycle_id, snapshot=text)
    except StoreError as error:
        log.warning(
            "cycle %d is recorded without its snapshot of %d characters, and cannot be replayed: %s",
            *(cycle_id, len(text), error),
        )
