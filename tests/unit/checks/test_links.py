"""Every link and every make target on a page exists.

`make docs` holds the links between pages of the site; here are the pages outside it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OUTSIDE = sorted(ROOT.glob("*.md"))
# Old entries of the change log name targets of their time.
PAGES = [
    page
    for page in (*OUTSIDE, *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("tests/benchmarks/*.md")))
    if "_build" not in page.parts and page.name != "CHANGELOG.md"
]
# A build of the site writes these.
GENERATED = {"polluxctl.md", "polluxd.md", "messages.md", "metrics.md", "examples.md", "scenario.md"}


def linked(page: Path) -> list[Path]:
    """Return the files that a page links to."""
    text = re.sub(r"```\w*\n.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    return [(page.parent / link).resolve() for link in links if "://" not in link]


@pytest.mark.parametrize("page", OUTSIDE, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    assert [file for file in linked(page) if not file.exists() and file.name not in GENERATED] == []


def test_links_are_found() -> None:
    assert len({file for page in OUTSIDE for file in linked(page)}) > 10


def test_every_make_target_on_a_page_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (name, page.name)
        for page in PAGES
        for name in re.findall(r"(?:`|^ *)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
    }
    assert len(named) > 30
    assert [(name, page) for name, page in sorted(named) if name not in targets] == []
