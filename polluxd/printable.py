"""Make users' text safe for terminals, log lines and pages.

Users choose names of jobs, reasons and messages. A control character in them can rewrite a terminal's screen, forge a
line of a log, or reorder what a reader sees.
"""

from __future__ import annotations

import unicodedata

_HARMFUL = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories: control, format (direction marks, zero width), surrogate, private, unassigned, separators."""


def printable(text: str) -> str:
    """Replace characters that are not printable by escapes (`\\x1b`)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        c.encode("unicode_escape").decode("ascii") if unicodedata.category(c) in _HARMFUL else c for c in text
    )
