"""Mail that Slurm sends about jobs. A move is no news for a job's user."""

from __future__ import annotations

import re

_TYPES = re.compile(r"\sMailType=([A-Z0-9_,]+)")
_OF_MOVES = frozenset({"BEGIN", "REQUEUE"})
"""scontrol(1), MailType: what Slurm would send of the two halves of a move through the queue."""


def quiet_mail(record: str) -> str:
    """Return the MailType by which a job's moves send no mail.

    Args:
        record: `scontrol -o show job`. Users' text stands in it, too: whatever that claims, the result is one of
            Slurm's own words, and is for the user's own job.

    Returns:
        Empty where the job sends no mail about its moves.
    """
    found = _TYPES.findall(record)
    types = found[-1].split(",") if found else []
    kept = [name for name in types if name not in _OF_MOVES]
    return "" if len(kept) == len(types) else ",".join(kept) or "NONE"
