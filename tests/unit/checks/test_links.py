"""Every link between pages leads to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [page for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")) if "_build" not in page.parts]
# A build of the site writes these.
GENERATED = {"polluxctl.md", "polluxd.md", "messages.md", "metrics.md", "examples.md"}


def targets(page: Path) -> list[Path]:
    """The files that a page links to or includes."""
    text = re.sub(r"```\w*\n.*?```", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    links += re.findall(r"^```\{include\} (\S+)", page.read_text(), re.MULTILINE)
    return [(page.parent / link).resolve() for link in links if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    assert [t for t in targets(page) if not t.exists() and t.name not in GENERATED] == []


def test_every_benchmark_is_in_the_documentation() -> None:
    pages = {page.name for page in (ROOT / "docs/benchmarks").glob("*.md")} - {"index.md"}
    assert pages == {page.name for page in (ROOT / "tests/benchmarks").glob("*.md")}


def test_links_are_found() -> None:
    assert len({target for page in PAGES for target in targets(page)}) > 40
