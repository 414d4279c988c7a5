"""Text as a manual page writes it."""

from __future__ import annotations

import re


def roff(text: str) -> str:
    """Return the text with what roff takes for commands escaped, and `code` in bold."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)
    lines = text.split("\n")
    return "\n".join("\\&" + line if line[:1] in ("'", ".") and line != ".PP" else line for line in lines)
