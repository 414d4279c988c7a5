"""The page of `polluxctl tune plot` in a real browser: `make docs-images`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from contrib.browser import rendered
from polluxd.cli.report.templates import environment

pytestmark = pytest.mark.skipif(
    shutil.which("chromium") is None, reason="Debian's package chromium is missing"
)
OWNED = "document.documentElement.setAttribute('data-owned','yes')"
NAMES = (
    f"<script>{OWNED}</script>",
    f'"><img src=x onerror="{OWNED}">',
    f'</text></svg><svg onload="{OWNED}">',
    f"javascript:{OWNED}",
    "\x00<\x1b[2J\u202e>",
)


def page(name: str) -> str:
    return environment().get_template("charts.html.jinja").render(title=name, charts=[])


@pytest.mark.parametrize("name", NAMES)
def test_no_name_runs_a_script(name: str, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(name), encoding="utf-8")
    # An owned page would have the attribute on its first element.
    assert '<html lang="en">' in rendered(file)


def test_the_browser_would_run_one(tmp_path: Path) -> None:
    """Without escaping and policy, the first name runs: the test can fail."""
    file = tmp_path / "page.html"
    file.write_text(f'<!doctype html><html lang="en"><title>x</title>{NAMES[0]}</html>')
    assert 'data-owned="yes"' in rendered(file)


def test_the_policy_alone_stops_a_script(tmp_path: Path) -> None:
    """An escaping that failed would still run nothing."""
    file = tmp_path / "page.html"
    file.write_text(page("resnet").replace("resnet", NAMES[0]), encoding="utf-8")
    assert NAMES[0] in file.read_text()
    assert 'data-owned="yes"' not in rendered(file)
