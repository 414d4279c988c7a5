"""The documentation's site and the site report in Chromium, on a phone in dark mode."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageStat
from playwright.sync_api import Locator

from polluxd.site_report.job_log import COLUMNS

from .pages import BIN, chromium, fits

SEARCHES = {
    "uninstall": "administrator-guide/install.html#uninstall",
    "stop": "how-to/continue.html",
    "cancel": "how-to/continue.html",
    "wandb": "user-guide/integrations.html",
}
"""What a reader looks for, and the page that answers."""


def site_rows(root: Path, folder: Path) -> list[dict[str, Any]]:
    """Build the site, and read it and a report."""
    site, report, log = (folder / name for name in ("site", "report.html", "sacct.txt"))
    subprocess.run([BIN / "sphinx-build", "-q", "-b", "html", root / "docs", site], check=True)
    log.write_text("\n".join(["|".join(COLUMNS), *map(_recorded, range(200))]))
    subprocess.run([BIN / "polluxctl", "report", "--sacct", log, "--html", report], check=True, cwd="/")
    return [{"element": f"the site: {element}", "ok": ok} for element, ok in _read(site, report)]


def _recorded(number: int) -> str:
    """Return sacct's record of one of many jobs that wait for each other."""
    begin, gpus = 1_700_000_000 + 3000 * number, f"gres/gpu={2 + number % 7}"
    fields = dict.fromkeys(COLUMNS, "") | {
        "JobIDRaw": number,
        "JobID": number,
        "Partition": "gpu",
        "User": "ada",
    }
    fields |= {"State": "COMPLETED", "Submit": begin, "Eligible": begin, "Start": begin + 600, "NNodes": 1}
    fields |= {"End": begin + 9000, "ReqTRES": gpus, "AllocTRES": gpus, "NodeList": "n1", "JobName": "train"}
    return "|".join(str(fields[name]) for name in COLUMNS)


def _read(site: Path, report: Path) -> Iterator[tuple[str, bool]]:
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
        for word, expected in SEARCHES.items():
            page.goto(f"{site.as_uri()}/search.html?q={word}")
            page.wait_for_selector("#search-results .search-summary:has-text('found')")
            links = page.locator("#search-results li > a").all()[:3]
            found = [str(link.get_attribute("href")) for link in links]
            yield f"{word} finds {found}", any(href.startswith(expected) for href in found)
        wide, bright = list[str](), list[str]()
        for file in [report, *sorted(site.rglob("*.html"))]:
            page.goto(file.as_uri())
            wide += [] if fits(page) else [file.stem]
            pictures = page.locator("article img:visible:not([src*=_static])").all()
            bright += [f"{file.stem}: {image.get_attribute('src')}" for image in pictures if _bright(image)]
        yield f"no page is wider than a phone {wide}", not wide
        yield f"no bright picture on a dark page {bright}", not bright


def _bright(image: Locator) -> bool:
    shot = Image.open(io.BytesIO(image.screenshot())).convert("L")
    return bool(ImageStat.Stat(shot).mean[0] > 128)
