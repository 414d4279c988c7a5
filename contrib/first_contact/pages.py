"""`polluxctl web` in Chromium: as an administrator and as an ordinary user, light, dark and on a phone."""

from __future__ import annotations

import pwd
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Error, Page, sync_playwright

from contrib.devcluster import DevCluster

from .users import ADA

BIN = Path(sys.executable).parent
PATIENCE_S = 180.0


@contextmanager
def served(
    cluster: DevCluster, user: pwd.struct_passwd | None, *words: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `polluxctl web`; yield its URL and its process. `user`: None is who runs this."""
    env = {"POLLUX_GATEWAY": cluster.gateways.addresses[0], "PYTHONUNBUFFERED": "1"}
    rights = {} if user is None else {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    server = subprocess.Popen(
        [str(BIN / "polluxctl"), "web", "-n", "1", *words], env={**cluster.client_environment, **env},
        stdout=subprocess.PIPE, text=True, cwd="/", **rights,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        yield server.stdout.readline().strip(), server
    finally:
        server.send_signal(signal.SIGCONT)
        server.terminate()
        server.wait(30)


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield browser
        browser.close()


def until(found: Callable[[], bool]) -> bool:
    """Wait until something is so; return whether it came to be."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if found():
            return True
        time.sleep(0.5)
    return found()


def seen(page: Page, selector: str) -> bool:
    """Wait until an element is there; return whether it came."""
    return until(lambda: page.query_selector(selector) is not None)


def picture(page: Page, path: Path, *, height: int) -> None:
    """Save the top of the page in 256 colours."""
    width = page.viewport_size["width"] if page.viewport_size else 1200
    page.set_viewport_size({"width": width, "height": height})
    page.evaluate("scrollTo(0, 0)")
    page.screenshot(path=path)
    with Image.open(path) as shot:
        few = shot.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def fits(page: Page) -> bool:
    """Whether the page needs no scrolling to the side."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


Row = Callable[[str, bool], None]


@contextmanager
def _told(row: Row) -> Iterator[None]:
    """Make a row of a failure in Chromium, so that the others are made all the same."""
    try:
        yield
    except Error as error:
        row(str(error), False)


def page_rows(
    cluster: DevCluster, config: Path, own: tuple[int, int], others: int, images: Path
) -> list[dict[str, Any]]:
    """Look for everything that the page has to show. `own`: a running and a waiting job of ada's; `others`: bob's."""
    rows: list[dict[str, Any]] = []

    def row(element: str, ok: bool) -> None:
        rows.append({"element": element, "ok": ok})

    with chromium() as browser:
        with served(cluster, None, "--config", str(config)) as (url, _), _told(row):
            _administrator(browser, url, own, others, images, row)
        with served(cluster, ADA) as (url, _), _told(row):
            _user(browser, url, own[0], others, row)
    return rows


def many_rows(
    cluster: DevCluster, config: Path, failed: int, plain: int, jobs: int, images: Path
) -> list[dict[str, Any]]:
    """Use the page as an administrator and as ada, among so many jobs; `failed` and `plain` are jobs of ada's."""
    rows: list[dict[str, Any]] = []
    with chromium() as browser:
        for who, user, words in (("root", None, ("--config", str(config))), ("ada", ADA, ())):
            with served(cluster, user, *words) as (url, server):
                page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
                page.goto(url)
                page.wait_for_selector("h1")  # the URL of the token leads to another one

                def row(element: str, ok: bool, who: str = who) -> None:
                    rows.append({"element": f"{who}, {jobs} jobs: {element}", "ok": ok})

                with _told(row):
                    for element, ok in _used(page, server, failed, plain, jobs, images / f"many-{who}.png"):
                        row(element, ok)
                page.close()
    return rows


def _used(
    page: Page, server: subprocess.Popen[str], failed: int, plain: int, jobs: int, shot: Path
) -> Iterator[tuple[str, bool]]:
    base = page.url
    yield "all are listed on demand", until(lambda: bool(page.goto(f"{base}?all")) and _listed(page) >= jobs)
    times = sorted(_refreshed(page) for _ in range(5))
    median, most = times[2], times[4]
    yield f"a refresh of all takes {median:.2f} s (at most {most:.2f} s of 5), under 0.5 s", median < 0.5
    page.goto(base)
    yield "no column is cut", page.evaluate(_WHOLE)
    page.screenshot(path=shot)
    page.fill("input[name=find]", "held-7")
    page.press("input[name=find]", "Enter")
    page.wait_for_url("**find=held-7**")
    yield "the filter leaves those with the text", until(lambda: 0 < _listed(page) < jobs / 5)
    page.goto(base)
    page.click("a:text-is('gpus')")
    page.wait_for_url("**sort=gpus**")
    held = [int(text) for text in _column(page, "GPUS")]
    yield "sorted by GPUs", held[:20] == sorted(held[:20], reverse=True)
    page.click("a:text-is('mine only')")
    page.wait_for_url("**mine**")
    mine = {ADA.pw_name} if f"as {ADA.pw_name}" in page.inner_text("header") else set()
    yield "mine only", set(_column(page, "USER")) == mine
    page.goto(base)
    yield "under the pointer stands a value", until(lambda: _pointed(page))
    page.wait_for_timeout(4000)
    yield "it stays there over refreshes", page.evaluate("pointed.isConnected")
    page.mouse.move(0, 0)
    page.goto(f"{base}?find={plain}")
    yield "plain jobs are listed", seen(page, f"td:text-is('{plain}')")
    states = ("mixed", "allocated", "idle")
    yield "nodes have their states", any(page.query_selector(f".nodes small:text-is('{s}')") for s in states)
    page.goto(f"{base}?hours=1")
    yield "charts of the last hour", seen(page, "figure:has-text('GPUs') path.line")
    page.goto(base)
    page.click(f"#ended ~ table a[href$='/jobs/{failed}']")
    page.wait_for_selector(".gist")
    story = page.inner_text("main")
    yield "an ended job names signal and output", "by signal 9" in story and "Its output: /" in story
    page.goto(base)
    server.send_signal(signal.SIGSTOP)
    lost = until(lambda: "not live" in page.inner_text("#state"))
    before = _age(page)
    page.wait_for_timeout(3500)
    counts = lost and _age(page) >= before + 3
    yield f"its age counts on when the connection is lost: {page.inner_text('#state')}", counts
    server.send_signal(signal.SIGCONT)
    yield "and it is live again", until(lambda: page.inner_text("#state") == "")


_DOT = """() => {
  const dot = [...document.querySelectorAll("circle.value")].pop(); dot.scrollIntoView({ block: "center" });
  const { x, y, width, height } = dot.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
}"""
_WHOLE = "[...document.querySelectorAll('section')].every(one => one.scrollWidth <= one.clientWidth)"
_POINTED = "(window.pointed = document.querySelector('circle.value:hover'))?.textContent ?? ''"
_REFRESH = """async () => {
  const begun = performance.now();
  const text = await (await fetch(`${location.href}&part`, { cache: "no-store" })).text();
  document.querySelector("main").innerHTML = text;
  document.body.getBoundingClientRect();
  return (performance.now() - begun) / 1000;
}"""


def _pointed(page: Page) -> bool:
    page.mouse.move(*page.evaluate(_DOT))
    return " at " in page.evaluate(_POINTED)


def _refreshed(page: Page) -> float:
    """Refresh as often as the page does; return how long it took [s]."""
    page.wait_for_timeout(5000)
    return float(page.evaluate(_REFRESH))


def _listed(page: Page) -> int:
    return len(_column(page, "JOB"))


def _column(page: Page, title: str) -> list[str]:
    """Return what stands in a column of the table of jobs; without rows, the next table is another heading's."""
    table = "//h2[@id='queue']/following-sibling::table[preceding-sibling::h2[1]/@id='queue']"
    return list(page.locator(f"{table}//td[@data-title='{title}']").all_inner_texts())


def _age(page: Page) -> int:
    found = re.search(r"(\d+) s old", page.inner_text("#state"))
    return int(found[1]) if found else -1


def _administrator(
    browser: Browser, url: str, own: tuple[int, int], others: int, images: Path, row: Row
) -> None:
    page = browser.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
    strange: list[str] = []
    page.on("request", lambda asked: strange.append(asked.url) if "127.0.0.1" not in asked.url else None)
    page.on("console", lambda said: strange.append(said.text) if said.type == "error" else None)
    page.goto(url)
    page.wait_for_selector("h1")
    base = page.url
    _cluster(page, own, others, images, row)
    _job(page, own[0], images, row)
    _pictures(page, base, images)
    row("nothing comes from elsewhere, nothing fails", not strange)
    page.close()


def _text(page: Page) -> str:
    return str(page.inner_text("main"))


def _cluster(page: Page, own: tuple[int, int], others: int, images: Path, row: Row) -> None:
    row(
        "both jobs hold GPUs in the map",
        until(lambda: all(page.query_selector(f".run[href$='/{n}']") for n in (own[0], others))),
    )
    row("a plain job is grey", seen(page, ".run.plain"))
    colours = {
        page.eval_on_selector(f"td:has([href$='/{n}']) .dot", "e => getComputedStyle(e).backgroundColor")
        for n in (own[0], others)
    }
    row("each job has a colour of its own", len(colours) == 2)
    row("the queue lists the waiting job", f"{own[1]}" in _text(page) and "PENDING" in _text(page))
    row("a move is marked while it lasts", seen(page, ".run.moves"))
    before = _text(page)
    row("the page changes without a reload", until(lambda: _text(page) != before))
    row("goodput against the fair share is drawn", seen(page, "figure:has-text('Goodput') path.line"))
    drawn = ("held by Pollux jobs", "held by plain jobs", "idle", "waiting jobs need", "lost to moves")
    row("GPUs held, plain, idle, waited for, lost to moves", all(words in _text(page) for words in drawn))
    titles = ("ACCOUNT", "USER", "GPUS NOW")
    row("what accounts and users hold", all(page.query_selector(f"th:text-is('{t}')") for t in titles))
    row("no sideways scrolling", fits(page))
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    row("dark mode", page.evaluate("getComputedStyle(document.body).backgroundColor") != light)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 390, "height": 844})
    row("no sideways scrolling at 390 px", fits(page))
    page.set_viewport_size({"width": 1200, "height": 900})


def _pictures(page: Page, url: str, images: Path) -> None:
    """Save the cluster's page when its jobs have been measured."""
    page.set_viewport_size({"width": 1200, "height": 900})
    page.goto(url)
    seen(page, "td[data-title='GOODPUT']:not(.x)")
    picture(page, images / "live-page.png", height=900)
    page.emulate_media(color_scheme="dark")
    picture(page, images / "live-page-dark.png", height=900)
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 390, "height": 844})
    picture(page, images / "live-page-phone.png", height=1000)


def _job(page: Page, own: int, images: Path, row: Row) -> None:
    page.click(f"td a[href$='/jobs/{own}']")
    page.wait_for_selector("text=Why it has what it has")
    row("explain as sentences", f"Job {own}" in _text(page) and "Decided" in _text(page))
    row("goodput over GPUs with the present size", until(lambda: "you are here" in page.content()))
    row("the next size", until(lambda: "next size" in page.content()))
    row("what a move would cost", until(lambda: "A move would cost" in _text(page)))
    picture(page, images / "live-job.png", height=1150)
    drawn = ("GPUs", "Batch size", "Gradient noise scale", "Factor on the learning rate")
    row(
        "history", until(lambda: all(page.query_selector(f"figure:has-text('{w}') path.line") for w in drawn))
    )
    reason = "h2:has-text('Its moves') + table td[data-title='REASON']"
    row(
        "its moves with reasons",
        until(lambda: any(len(c.inner_text()) > 9 for c in page.query_selector_all(reason))),
    )
    row("no sideways scrolling on a job's page", fits(page))
    page.set_viewport_size({"width": 390, "height": 844})
    row("no sideways scrolling on a job's page at 390 px", fits(page))


def _user(browser: Browser, url: str, own: int, others: int, row: Row) -> None:
    context = browser.new_context(viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("h1")
    base = page.url
    row("user: the own job in full", seen(page, f"td a[href$='/jobs/{own}']"))
    theirs = page.query_selector_all(f"tr:has(td:text-is('{others}')) td")
    shown = {cell.get_attribute("data-title"): cell.inner_text() for cell in theirs}
    listed = (shown.get("STATE"), shown.get("USER")) == ("RUNNING", "games")
    row("user: another's job as squeue shows it", listed)
    secret = {shown.get(title, "-") for title in ("BATCH", "GOODPUT", "SPEEDUP", "DONE", "REASON")}
    row("user: nothing else of it", bool(shown) and secret <= {"-"})
    row("user: no link to it", page.query_selector(f"a[href$='/jobs/{others}']") is None)
    answer = page.goto(f"{base}jobs/{others}")
    refused = answer is not None and answer.status == 404 and "another user" in page.content()
    row("user: its page is refused", refused)
    context.clear_cookies()
    answer = page.goto(base)
    row("without the cookie: refused", answer is not None and answer.status == 403)
    context.close()
