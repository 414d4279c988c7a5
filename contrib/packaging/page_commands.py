"""Print the commands of a page, one line each, in order.

    page_commands.py [PAGE [HEADING]]      the install page, "Step by step"

They are the lines of the `console` blocks below the heading.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "administrator-guide" / "install.md"
HEADING = "Step by step"


def commands(text: str, heading: str = HEADING) -> list[str]:
    """Return the commands. Raises ValueError where the page has none."""
    section = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    blocks = (
        re.findall(r"^ *```console\n(.*?)^ *```$", section[1], re.MULTILINE | re.DOTALL) if section else []
    )
    found = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    if not found:
        raise ValueError(f'expected `console` blocks below "## {heading}"')
    return found


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE
    sys.stdout.writelines(f"{line}\n" for line in commands(page.read_text(), *sys.argv[2:3]))
