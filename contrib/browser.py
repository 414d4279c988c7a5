"""Debian's Chromium without a window.

It takes pictures of pages, and prints pages as their scripts left them.
"""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

CHROMIUM = "chromium"


def _chromium(page: Path | str, *words: str) -> str:
    with tempfile.TemporaryDirectory(prefix="pollux-browser-") as profile:
        done = subprocess.run(
            [
                CHROMIUM,
                "--headless=new",
                "--no-sandbox",  # root has no sandbox of its own
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                *words,
                page if isinstance(page, str) else page.resolve().as_uri(),
            ],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
    return done.stdout


def screenshot(page: Path | str, picture: Path, *, width: int = 1200, height: int = 1600) -> None:
    """Write a picture of the top of a page (a file or a URL), `width` x `height` pixels."""
    # The time is for a page that leads to another one.
    words = f"--window-size={width},{height}", f"--screenshot={picture.resolve()}"
    _chromium(page, *words, "--virtual-time-budget=3000")


def rendered(page: Path) -> str:
    """Return the document after its scripts, if any, have run."""
    return _chromium(page, "--virtual-time-budget=2000", "--dump-dom")
