"""`polluxctl web`: who gets in, what each user sees, and what hostile texts do."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from pollux.search.journal import journal_path
from pollux.search.study import Search, SearchSettings
from polluxd import model
from polluxd.cli.answering import Answering, Ask, as_root
from polluxd.cli.report.drawings import COLOURS, MOST_POINTS, Polyline, chart, job_colours
from polluxd.cli.slurm_view import PLAIN_COLUMNS, Beside, SlurmView
from polluxd.cli.web.browser_session import BrowserSession
from polluxd.cli.web.charts import of_cluster
from polluxd.cli.web.live_page import ROWS, Viewer, application
from polluxd.cli.web.overview import RestingReader
from polluxd.config.settings import PolicySettings
from polluxd.model.snapshot_json import encode
from polluxd.slurm.configuration import Slurm
from polluxd.store import HistoryPoint
from tests.build import job as build_job
from tests.build import node, snapshot

from .conftest import HOSTILE, NOW, VIEW, Elements

ADA, BOB = 1001, 1002
SECRETS = ("goodput", "1,234", "1235", "256", "grows from 2 to 4", "1.25", "25%")
"""What only the page of a job's own user may show of the store's job 7."""


def as_user_of(answering: Answering, uid: int) -> Ask:
    """Return the gateway's answers to one user, without the network."""
    return lambda question, *about, **words: getattr(answering, question)(uid, *about, **words)


@pytest.fixture
def store(store):
    mine = replace(VIEW, uid=ADA)
    store.views = [
        mine,
        replace(mine, job_id=9, name="bert", uid=BOB, user="bob", account="nlp", nodes=("n2",)),
    ]
    jobs = (
        build_job(7, name="resnet", user="ada", account="vision"),
        build_job(9, user="bob", account="nlp"),
    )
    nodes = (node("n1", 8), replace(node("n2", 8), foreign_gpus=2), replace(node("n3", 8), schedulable=False))
    store.newest = (42, encode(snapshot(nodes, jobs)))
    store.points = [
        HistoryPoint(7, 1, NOW - 30 + at, 4, 1, 64 + at, 64, 0, 900.0, 950.0, 5.0, 10.0, 1.0, 1.5, 80.0, 9)
        for at in range(3)
    ]
    store.explanation = model.Explanation(
        *(1, 2, 1.0, "contention"), next_gpus=8, next_goodput=2000.0, marginal=0.1, price=0.2, taken_by=9
    )
    return store


def opened(ask: Ask, *, user: str, slurm: SlurmView | None = None) -> TestClient:
    """Return a browser that has opened the printed URL."""
    session = BrowserSession()
    app = application(Viewer(user, ask, slurm), session, 5.0)
    browser = TestClient(app, base_url=f"http://127.0.0.1:8000{session.folder}/")
    assert browser.get("", params={"token": session.token}).status_code == 200
    return browser


def answering(store: Any, private: str = "none") -> Answering:
    return Answering(store, PolicySettings(), lambda: f"PrivateData  = {private}\n")


@pytest.fixture
def admin(store) -> TestClient:
    return opened(as_root(answering(store)), user="root")


@pytest.fixture
def as_user(store):
    asked = answering(store)
    return lambda name, uid: opened(as_user_of(asked, uid), user=name)


def test_the_token_works_once_and_its_cookie_is_strict(store) -> None:
    session = BrowserSession()
    app = application(Viewer("root", as_root(answering(store))), session, 5.0)
    stranger = TestClient(app, base_url="http://127.0.0.1:8000")
    assert stranger.get(f"{session.folder}/").status_code == 403
    assert stranger.get(f"{session.folder}/?token=guess").status_code == 403
    browser = TestClient(app, base_url="http://127.0.0.1:8000")
    cookie = browser.get(f"{session.folder}/?token={session.token}").headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert f"path={session.folder.lower()}" in cookie
    assert browser.get(f"{session.folder}/").status_code == 200
    assert stranger.get(f"{session.folder}/?token={session.token}").status_code == 403


def test_a_cookie_of_another_port_does_not_hide_that_of_the_page(store) -> None:
    """Another user's server on this machine can set cookies that the browser sends here, too."""

    def name_of(session: BrowserSession) -> str:
        browser = TestClient(application(Viewer("root", as_root(answering(store))), session, 5.0))
        answer = browser.get(
            f"http://127.0.0.1:8000{session.folder}/", params={"token": session.token}, follow_redirects=False
        )
        return str(answer.headers["set-cookie"].partition("=")[0])

    theirs, session = name_of(BrowserSession()), BrowserSession()
    app = application(Viewer("root", as_root(answering(store))), session, 5.0)
    browser = TestClient(app, base_url="http://127.0.0.1:8000")
    own = browser.get(f"{session.folder}/?token={session.token}").headers["set-cookie"].partition(";")[0]
    forged = f"{own}; {theirs}=x; pollux-web=x"
    bare = TestClient(app, base_url="http://127.0.0.1:8000")
    assert bare.get(f"{session.folder}/", headers={"Cookie": forged}).status_code == 200
    assert not own.startswith(f"{theirs}=")


FEW = """
import resource
from polluxd.cli.web import live_page
resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))
live_page.source, live_page.slurm_view = lambda config: lambda *about: {}, lambda config: None
live_page.web(None, 0)
"""


def test_other_users_connections_do_not_keep_the_browser_out() -> None:
    words = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen([sys.executable, "-c", FEW], **words) as page, ExitStack() as stack:
        stack.callback(page.kill)
        assert page.stdout is not None
        port = int(page.stdout.readline().split(":")[2].partition("/")[0])
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", port))).send(b"G")
        mine = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        mine.request("GET", "/")
        assert mine.getresponse().status == 403, "of the page: the token is missing"


def test_another_name_for_this_machine_is_refused(admin) -> None:
    assert admin.get("", headers={"Host": "rebound.example:8000"}).status_code == 400
    assert admin.get("", headers={"Host": "localhost:9999"}).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_nothing_but_get(admin, method) -> None:
    assert admin.request(method, "").status_code == 405


def test_other_sites_may_neither_read_frame_nor_script_it(admin) -> None:
    headers = admin.get("", headers={"Origin": "https://evil.example"}).headers
    assert not [name for name in headers if name.startswith("access-control-")]
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy


def test_an_administrator_sees_all(admin) -> None:
    page = admin.get("").text
    for words in (
        "plain Slurm jobs",
        "out of service",
        "job 7 resnet of ada: 4 GPUs",
        "job 9 bert of bob: 4 GPUs",
    ):
        assert words in page
    assert page.count('class="run c0"') == 1  # job 7
    assert "1235" in page  # its goodput
    assert "GPUS NOW" in page
    job = admin.get("jobs/9").text
    for words in ("of bob: running, holds 4 GPUs", "you are here: 4 GPUs", "next size: 8"):
        assert words in job


def test_a_user_sees_others_as_squeue_does(as_user) -> None:
    ada, bob = as_user("ada", ADA), as_user("bob", BOB)
    own = ada.get("").text
    assert all(words in own for words in ("1235", "grows from 2 to 4", "25%", "/jobs/7"))
    assert "/jobs/9" not in own
    assert "bert" in own
    # Of the two jobs, which report the same, each user sees one.
    for page in (own, bob.get("").text):
        assert page.count("1235") == 1
        assert page.count("25%") == 1
    told = ada.get("jobs/7").text
    assert "you are here: 4 GPUs" in told
    assert "Batch size: 66" in told
    refused = ada.get("jobs/9")
    assert refused.status_code == 404
    assert "another user&#39;s" in refused.text
    assert not [word for word in SECRETS[1:] if word in refused.text]


def test_hidden_jobs_are_not_called_idle(store) -> None:
    page = opened(as_user_of(answering(store, "jobs"), ADA), user="ada").get("").text
    assert "bert" not in page
    assert "no job that you may see" in page


@pytest.mark.parametrize(("private", "shown"), [("nodes", False), ("all", False), ("usage", True)])
def test_nodes_that_slurm_keeps_private_are_left_out(store, private, shown) -> None:
    asked = answering(store, private)
    assert ("out of service" in opened(as_user_of(asked, ADA), user="ada").get("").text) is shown
    assert asked.cluster(0)["overview"]["nodes"]


def test_hostile_texts_run_nothing(store, admin) -> None:
    store.views = [
        replace(v, name=HOSTILE, user=HOSTILE, account=HOSTILE, decision_reason=HOSTILE) for v in store.views
    ]
    for path in ("", "jobs/7"):
        text = admin.get(path).text
        found = Elements()
        found.feed(text)
        assert found.names <= {
            "html", "head", "meta", "title", "link", "script", "body", "header", "nav", "b", "a", "p", "span", "main",
            "h1", "h2", "div", "section", "i", "ul", "li", "small", "table", "thead", "tbody", "tr", "th", "td", "em",
            "figure", "figcaption", "svg", "path", "text", "circle", "form", "label", "input",
        }  # fmt: skip
        assert text.count("<script") == 1
        assert not [word for word in ("\x00", "\x1b", "\u202e") if word in text]


def test_a_search_of_this_folder_is_shown(admin, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    begun = Search(journal_path("digits", tmp_path), "digits", SearchSettings(maximize=True, pruner="none"))
    for number, value in enumerate((0.2, 0.9, -0.5, 0.4)):
        trial = begun.live(begun.begin(f"7_{number}", lambda: None))
        trial.suggest_float("lr", 1e-4, 1.0, log=True)
        trial.suggest_categorical("kind", ["<b>", "plain"])
        begun.report(trial, 10, value, 3600.0, 2)
    assert '/searches/digits">' in admin.get("").text
    page = admin.get("searches/digits").text
    assert page.count('class="line c0"') == 2, "the best quarter, in both charts"
    assert page.count('class="line plain"') == 6
    assert "trial 1: 0.9" in page
    assert "lr</text>" in page
    assert "<b>" not in page.partition("<main")[2]
    assert admin.get("searches/none").status_code == 404


def test_a_long_queue_is_cut_and_own_jobs_come_first(store, as_user) -> None:
    store.views = [
        replace(store.views[1], job_id=n, gpus=0, nodes=()) for n in range(100, 400)
    ] + store.views[:1]
    page = as_user("ada", ADA).get("").text
    assert f"{ROWS} of 301 jobs" in page
    assert "/jobs/7" in page
    assert as_user("ada", ADA).get("?all").text.count('data-title="JOB"') == 301


def test_a_job_that_ended_stays_on_the_page_for_a_day(store, as_user) -> None:
    mine = store.views[0]
    gone = {"state": "FAILED", "nodes": (), "gpus": 0}
    store.views += [
        replace(mine, job_id=21, ended_at=time.time() - 60, **gone),
        replace(mine, job_id=22, ended_at=time.time() - 2 * 86400, **gone),
        replace(mine, job_id=23, ended_at=time.time() - 60, uid=BOB, user="bob", **gone),
    ]
    page = as_user("ada", ADA).get("").text
    ended = page[page.index("Ended in the last day") :]
    assert re.findall(r"/jobs/(2\d)", page) == ["21"], "of the last day, and no other user's"
    assert "FAILED" in ended


def plain_row(job_id: int, user: str, name: str) -> dict[str, Any]:
    row = dict.fromkeys([*(column.key for column in PLAIN_COLUMNS), "account", "moves", "moving"])
    return row | {"job_id": job_id, "user": user, "name": name, "state": "RUNNING"}


def test_plain_jobs_and_the_states_of_nodes_stand_beside(store, as_user) -> None:
    rows = [plain_row(50, "ada", "cfd"), plain_row(51, "bob", "md <i>")]
    store.beside = Beside(rows, {"n1": "mixed", "n3": "idle+drain"}, gpus=24, used=20)
    browser = opened(as_user_of(answering(store), ADA), user="ada", slurm=SlurmView(Slurm()))
    page = browser.get("").text
    assert "24 GPUs: 8 held by Pollux jobs, 12 by others, 4 idle" in page
    assert all(f"<small>{state}</small>" in page for state in ("mixed", "idle+drain"))
    listed = page[page.index('id="plain"') : page.index('id="ended"')]
    assert ">50<" in listed
    assert "md &lt;i&gt;" in listed
    assert "/jobs/5" not in listed, "there is no page of a plain job"
    mine = browser.get("?mine").text
    assert "cfd" in mine
    assert "md &lt;i" not in mine
    assert "cfd" not in browser.get("?find=md").text


def test_the_page_of_an_ended_job_says_where_its_output_is(store, as_user) -> None:
    store.views += [replace(store.views[0], job_id=21, ended_at=time.time() - 60, state="FAILED", gpus=0)]
    slurm = SlurmView(Slurm())
    page = opened(as_user_of(answering(store), ADA), user="ada", slurm=slurm).get("jobs/21").text
    assert "Its output: /home/ada/21.out." in page


def test_colours_of_jobs_belong_to_jobs_alone(store, admin) -> None:
    store.samples = [
        {"at": time.time() - 60, "gpus": 16, "plain": 2, "held": 8, "waiting": 0, "speedup": 1.5}
    ]
    page = admin.get("").text
    assert re.findall(r'class="(?:line|area) ([^"]*)"', page)
    assert not re.search(r'class="(?:line|area) [^"]*\bc\d', page)


def test_jobs_are_sorted_and_mine_alone_are_shown(store, as_user) -> None:
    mine = store.views[0]
    store.views += [replace(mine, job_id=30, gpus=1), replace(mine, job_id=31, gpus=16)]
    ada = as_user("ada", ADA)

    def order(query: str) -> list[str]:
        return re.findall(r'dot"></i>(?:<a [^>]*>)?(\d+)', ada.get(query).text)

    assert order("?mine") == ["7", "30", "31"]
    assert "9" in order("")
    assert order("?mine&sort=gpus") == ["31", "7", "30"]
    assert order("?mine&sort=nonsense") == ["7", "30", "31"]
    assert '?mine&amp;sort=gpus"' in ada.get("?sort=gpus").text, "a filter keeps the order"


def test_a_text_filters_the_jobs_and_is_kept(store, as_user) -> None:
    mine = store.views[0]
    store.views += [replace(mine, job_id=30, name="vit <large>"), replace(mine, job_id=31, name="llm")]
    ada = as_user("ada", ADA)

    def listed(query: str) -> list[str]:
        return re.findall(r'data-title="JOB"><i class="\S* dot"></i><a [^>]*>(\d+)</a>', ada.get(query).text)

    assert listed("?mine&find=VIT%20%3C") == ["30"]
    assert listed("?mine&find=31") == ["31"]
    assert listed("?find=nobody%27s") == []
    assert '<input name="find" maxlength="64">' in ada.get("").text, "an empty filter is empty"
    page = ada.get("?mine&find=vit%20%3C&sort=gpus").text
    assert 'value="vit &lt;"' in page
    assert "sort=name&mine&find=vit%20%3C" in page.replace("&amp;", "&")
    assert '<input type="hidden" name="sort" value="gpus">' in page


def test_charts_tell_values_and_moves_and_can_be_cut(store, admin) -> None:
    store.known_moves = [
        replace(move, times={**move.times, model.Step.PLANNED: NOW - 29}) for move in store.known_moves
    ]
    page = admin.get("jobs/7").text
    assert re.search(r"<title>GPUs: \S+ at [\d: -]+</title>", page)
    assert re.search(r'class="moment"[^>]*><title>[\d: -]+: move from .* to .*</title>', page)
    assert "nothing was measured yet" in admin.get("jobs/7?hours=1").text, "the reports are of another day"
    assert 'href="?hours=6" aria-current="true"' in admin.get("jobs/7?hours=6").text
    assert admin.get("jobs/7?hours=nonsense").status_code == 200


def test_the_cluster_over_time_adds_up(store, admin) -> None:
    store.samples = [{"at": NOW - 90, "gpus": 16, "plain": 2, "held": 8, "waiting": 3, "speedup": None}]
    overview = answering(store).cluster(0)["overview"]
    assert overview["use"]["held"] == []  # older than the period
    store.samples[0]["at"] = at = overview["at"] - 100
    overview = answering(store).cluster(0)["overview"]
    assert overview["speedup"] == []  # nobody held GPUs
    assert overview["use"] == {
        "held": [[at, 8]],
        "waiting": [[at, 3]],
        "plain": [[at, 2]],
        "idle": [[at, 16 - 2 - 8]],
    }
    plain = next(line for line in of_cluster(overview, at + 50)[0].lines if "plain" in line.label)
    assert plain.values[0][2].startswith("held by plain jobs: 2"), "as it was then"
    assert 'href="?hours=1" aria-current="true"' in admin.get("?hours=1").text


def test_a_young_cluster_is_drawn_from_its_first_job_on(store) -> None:
    begin = time.time() - 120
    store.views = [replace(VIEW, submitted_at=begin, started_at=begin + 10)]
    assert answering(store).cluster(0)["overview"]["since"] == begin


def test_jobs_have_colours_of_their_own_while_there_are_enough() -> None:
    assert job_colours([1, 8, 2]) == {1: "c1", 8: "c2", 2: "c3"}
    assert len(set(job_colours(range(0, 7 * COLOURS, 7)).values())) == COLOURS


def test_a_chart_stays_small_and_inside() -> None:
    points = [(float(x), float(x % 97)) for x in range(10_000)]
    made = chart("x", [Polyline("a", "c0", points)])
    numbers = [float(n) for n in re.findall(r"[-\d.]+", made.lines[0].path)]
    assert len(numbers) <= 2 * (MOST_POINTS + 2)
    assert 0 <= min(numbers) <= max(numbers) <= 480
    assert [words for _, words in made.y_ticks] == ["0", "50", "100"]


def test_what_takes_long_is_read_seldom() -> None:
    now, read = [0.0], []

    def slow() -> int:
        read.append(now[0])
        now[0] += 2.0
        return len(read)

    reader = RestingReader(lambda: now[0])
    while now[0] < 400:
        reader.read("x", slow)
        now[0] += 1.0
    assert 2.0 * len(read) <= 0.05 * now[0] + 2.0
    assert reader.read("x", slow) == len(read)
