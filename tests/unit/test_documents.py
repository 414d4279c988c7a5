"""The pages as a reader of the repository meets them: links and quoted figures."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_QUOTE = re.compile(r"<!-- figures of ([^:]+): (.+?) -->")


@cache
def tree() -> frozenset[str]:
    """Return the files that git keeps: what is generated is no target for a reader of the repository."""
    named = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split("\n")
    return frozenset(name for name in named if name)


def pages() -> list[str]:
    return sorted(name for name in tree() if name.endswith(".md"))


def dead(page: str, text: str) -> list[str]:
    """Return the relative links of a page that lead to no file or folder of the tree."""
    found = []
    prose = re.sub(r"`[^`\n]*`", "", re.sub(r"^( *)```.*?^\1```", "", text, flags=re.DOTALL | re.MULTILINE))
    for target in _LINK.findall(prose):
        path = target.partition("#")[0]
        if not path or "://" in path or path.startswith("mailto:"):
            continue
        full = (ROOT / page).parent.joinpath(path).resolve()
        inside = full.is_relative_to(ROOT)
        name = str(full.relative_to(ROOT)) if inside else ""
        if not (name in tree() or any(each.startswith(f"{name}/") for each in tree())):
            found.append(target)
    return found


def test_a_dead_link_is_found() -> None:
    if not tree():
        pytest.skip("no git here")
    assert dead(
        "docs/a.md", "[a](reference/metrics.md#x) `[b](c.md)` [d](../README.md) [e](https://x.y)"
    ) == ["reference/metrics.md#x"]


def test_every_relative_link_of_every_page_leads_somewhere() -> None:
    if not tree():
        pytest.skip("no git here")
    found = {page: dead(page, (ROOT / page).read_text()) for page in pages()}
    assert {page: links for page, links in found.items() if links} == {}


def unequal(text: str) -> list[tuple[str, str]]:
    """Return the figures that a page quotes of a file and that the page, or the file, has no more.

    A page says below the paragraph whose figures they are: `<!-- figures of FILE: 4.66 s = 4.66; 0.14 -->`. Each entry
    stands in the paragraph; after `=`, as the file writes it.
    """
    wrong = []
    for comment in _QUOTE.finditer(text):
        source, said = (ROOT / comment[1]).read_text(), text[: comment.start()].rstrip()
        paragraph = said[said.rfind("\n\n") + 1 :]
        for entry in comment[2].split("; "):
            here, _, there = entry.partition(" = ")
            if here not in paragraph or not re.search(
                rf"(?<![\d.]){re.escape(there or here)}(?![\d])", source
            ):
                wrong.append((comment[1], entry))
    return wrong


def test_a_figure_that_differs_is_found() -> None:
    file = "tests/benchmarks/realloc.md"
    assert unequal(f"It takes 4.66 s.\n\n<!-- figures of {file}: 4.66 s = 4.66 -->") == []
    assert unequal(f"It takes 5.5 s.\n\n<!-- figures of {file}: 4.66 s = 4.66 -->") == [
        (file, "4.66 s = 4.66")
    ]
    assert unequal(f"It takes 77.7 s.\n\n<!-- figures of {file}: 77.7 s = 77.7 -->") == [
        (file, "77.7 s = 77.7")
    ]


def test_figures_of_pages_are_those_of_the_benchmarks_that_they_quote() -> None:
    found = {page: unequal((ROOT / page).read_text()) for page in pages()}
    assert {page: wrong for page, wrong in found.items() if wrong} == {}
    assert any(_QUOTE.search((ROOT / page).read_text()) for page in pages())
