"""What a rank prints where another rank ended first."""

from __future__ import annotations

import sys
from types import TracebackType

from pollux.errors import RankLost


def print_lost_ranks_in_one_line(rank: int) -> None:
    """Print an uncaught RankLost as one line. The output of the rank that failed first shows the cause."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, RankLost):
            print(f"pollux: rank {rank} ends: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook
