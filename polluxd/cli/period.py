"""A point in time, as an option gives it.

It is a time before now (`24h`, `7d`) or a local date (`2026-11-20`, `2026-11-20T08:00`).
"""

from __future__ import annotations

import re
from datetime import datetime

import typer

_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def point(text: str, now: float, option: str) -> float:
    """Return the POSIX time that `text` names.

    Raises:
        typer.BadParameter: `text` is neither; the message names `option`.
    """
    if (found := re.fullmatch(r"(\d{1,6})([mhd])", text)) is not None:
        return now - int(found[1]) * _UNIT_S[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"expected a time such as 24h, 7d, 2026-11-20 or 2026-11-20T08:00, got {text!r}",
            param_hint=option,
        ) from None
