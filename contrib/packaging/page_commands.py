"""Print the commands of the install page: one line each, in order.

They are the lines of the `console` blocks below the heading "Step by step".
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "administrator-guide" / "install.md"


def commands(text: str) -> list[str]:
    """Return the commands. Raises ValueError where the page has none."""
    section = re.search(r"^## Step by step$(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    blocks = (
        re.findall(r"^ *```console\n(.*?)^ *```$", section[1], re.MULTILINE | re.DOTALL) if section else []
    )
    found = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    if not found:
        raise ValueError('expected `console` blocks below "## Step by step"')
    return found


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in commands(PAGE.read_text()))
