"""`polluxctl web`, and its pages: the cluster, a job, a search.

Texts of users are hostile: Jinja escapes every value, `printable` takes the control characters out before, and the
pages' own policy forbids every script but theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from jinja2 import Environment
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from polluxd.errors import PolluxError
from polluxd.gateway.server import GatewayServer
from polluxd.gateway.visitors import Bounds

from .. import tune
from ..access import ConfigOption
from ..answering import Ask, source
from ..explained import SIZE_COLUMNS
from ..output import Column, clock, duration
from ..report.templates import environment
from ..show import SortKey, chosen
from ..slurm_view import PLAIN_COLUMNS, SlurmView, gpus_held, slurm_view
from ..table_rows import JOB_COLUMNS, MOVE_COLUMNS
from . import charts, machine_map
from .browser_session import BrowserSession
from .overview import RestingReader

_OWNER_COLUMNS = (
    Column("gpus", "GPUS NOW", right=True),
    Column("running", "RUNNING", right=True),
    Column("waiting", "WAITING", right=True),
)
_QUEUE = [
    column for column in JOB_COLUMNS if column.key not in ("account", "nodes", "mode", "moves", "age_s")
]
_ENDED = [
    *(
        column
        for column in JOB_COLUMNS
        if column.key in ("job_id", "name", "user", "state", "progress", "moves")
    ),
    Column("age_s", "TOOK", duration, right=True),
    Column("ended_at", "ENDED", clock),
]
_SORTS = tuple(SortKey(key) for key in ("job", "name", "state", "gpus", "goodput", "speedup", "done"))
_HOURS = ("1", "6", "24")
"""Periods that the charts of a job may be cut to."""
ROWS = 200
"""Jobs that the cluster's page lists before it is asked for all."""
HOSTS = ["127.0.0.1", "localhost"]
"""What a browser may call this machine: another name has been rebound to it."""


@dataclass(frozen=True)
class Viewer:
    """Who looks, and what they may read."""

    user: str
    ask: Ask
    slurm: SlurmView | None = None
    """None: Slurm cannot be asked."""


def application(viewer: Viewer, session: BrowserSession, interval_s: float) -> ASGIApp:
    """Return the ASGI application of the pages."""
    pages = _Pages(viewer, session.folder, interval_s)
    routes = [
        Route("/", pages.cluster),
        Route("/jobs/{job:int}", pages.job),
        Route("/searches/{name}", pages.search),
        Route("/page.css", pages.asset),
        Route("/page.js", pages.asset),
    ]
    inner = Starlette(
        routes=[Mount(session.folder, routes=routes)],
        exception_handlers={PolluxError: pages.failure, HTTPException: pages.failure},
    )
    return TrustedHostMiddleware(session.protect(inner), allowed_hosts=HOSTS, www_redirect=False)


class _Pages:
    def __init__(self, viewer: Viewer, folder: str, interval_s: float) -> None:
        self._viewer = viewer
        self._folder = folder
        self._interval_s = interval_s
        self._reader = RestingReader()
        self._templates: Environment = environment()

    def cluster(self, request: Request) -> Response:
        """The GPUs by node, the queue, and the cluster over time."""
        found = self._read("cluster")
        overview, jobs = found["overview"], machine_map.coloured(found["jobs"])
        asked = request.query_params
        hours, since = _period(request)
        order = asked.get("sort", "")
        sort = SortKey(order) if order in tuple(SortKey) else None
        find = asked.get("find", "").strip()
        rows = [
            dict(row)
            for row in jobs
            if ("mine" not in asked or row["user"] == self._viewer.user) and _has(row, find)
        ]
        rows = (
            chosen(rows, None, sort)
            if sort
            else sorted(rows, key=lambda row: row["user"] != self._viewer.user)
        )
        shown = rows if "all" in asked else rows[:ROWS]
        beside = self._viewer.slurm.read() if self._viewer.slurm is not None else None
        plain_jobs = [
            row
            for row in (beside.plain_jobs if beside is not None else ())
            if ("mine" not in asked or row["user"] == self._viewer.user) and _has(row, find)
        ]
        return self._page(
            request,
            "cluster.html.jinja",
            status=found["status"],
            jobs=jobs,
            rows=shown,
            matching=len(rows),
            columns=_filled(_QUEUE, shown),
            mine="mine" in asked,
            find=find,
            sort=sort,
            sorts=_SORTS,
            ended=[{**row, "colour": ""} for row in found["ended"] if _has(row, find)],
            ended_columns=_ENDED,
            overview=overview,
            plain_jobs=[
                {**row, "colour": "plain"}
                for row in plain_jobs[: len(plain_jobs) if "all" in asked else ROWS]
            ],
            plain_matching=len(plain_jobs),
            plain_columns=PLAIN_COLUMNS,
            held=gpus_held(beside, jobs) if beside is not None else "",
            states=beside.states if beside is not None else {},
            nodes=machine_map.nodes(overview["nodes"], jobs, hidden=overview["hidden"]),
            charts=charts.of_cluster(overview, since),
            hours=hours,
            periods=_HOURS[:1],
            owners=[
                (rows, [Column("name", title.upper(), flexible=True), *_OWNER_COLUMNS])
                for title, rows in machine_map.owners(jobs)
            ],
        )

    def job(self, request: Request) -> Response:
        """One job: why it has what it has, and how it got there."""
        number = request.path_params["job"]
        found, past = self._read("explain", number), self._read("history", number, since=0.0)
        hours, since = _period(request)
        ended = self._viewer.slurm if found["job"]["ended_at"] is not None else None
        return self._page(
            request,
            "job.html.jinja",
            job=found["job"],
            story=found["story"] + (ended.ending(number) if ended is not None else []),
            moves=found["moves"][::-1],
            move_columns=_filled([c for c in MOVE_COLUMNS if c.key not in ("id", "job_id")], found["moves"]),
            sizes=found["sizes"],
            size_columns=_filled(SIZE_COLUMNS, found["sizes"]),
            goodput=charts.goodput(found),
            charts=charts.of_job([p for p in past["points"] if p["at"] >= since], found["moves"]),
            hours=hours,
            periods=_HOURS,
        )

    def search(self, request: Request) -> Response:
        """The trials of a search in the folder where the page is served."""
        name = request.path_params["name"]
        search = self._reader.read(("search", name), lambda: tune.open_search(name))
        rows = self._reader.read(("trials", name), lambda: tune.trial_rows(search))
        return self._page(
            request,
            "search.html.jinja",
            name=name,
            summary="; ".join(tune.summary(search)),
            rows=rows[::-1],
            columns=_filled(tune.TRIAL_COLUMNS, rows),
            charts=charts.of_search(search),
        )

    def _read(self, *question: Any, **words: Any) -> Any:
        """Return an answer, which may be as old as `RestingReader` says."""
        return self._reader.read(question, lambda: self._viewer.ask(*question, **words))

    def asset(self, request: Request) -> Response:
        name = request.url.path.rpartition("/")[2]
        text = self._templates.get_template(name).render()
        return Response(text, media_type="text/css" if name.endswith(".css") else "text/javascript")

    async def failure(self, request: Request, error: Exception) -> Response:
        """Show an expected failure as a page."""
        status = error.status_code if isinstance(error, HTTPException) else 404
        message = error.detail if isinstance(error, HTTPException) else str(error)
        return self._page(request, "failure.html.jinja", status, message=message)

    def _page(self, request: Request, name: str, code: int = 200, /, **values: Any) -> Response:
        """Return a page; with `part` in the question, what a page in a browser puts into its place."""
        part = "part" in request.query_params
        template = self._templates.get_template(name)
        text = template.render(
            values,
            part=part,
            root=self._folder,
            user=self._viewer.user,
            searches=tune.here(),
            interval=self._interval_s,
            now=time.time(),
        )
        return HTMLResponse(text, code)


def _period(request: Request) -> tuple[int | None, float]:
    """Return the hours that charts are cut to, None for all, and their begin as POSIX time."""
    asked = request.query_params.get("hours", "")
    return (int(asked), time.time() - 3600.0 * int(asked)) if asked in _HOURS else (None, 0.0)


def _has(row: Mapping[str, Any], text: str) -> bool:
    """Say whether a text stands in the job's id, name, user, account or state."""
    words = (str(row.get(key, "")).lower() for key in ("job_id", "name", "user", "account", "state"))
    return any(text.lower() in word for word in words)


def _filled(columns: Any, rows: Any) -> list[Any]:
    """Return the columns that have a value in some row."""
    return [c for c in columns if any(row.get(c.key) not in (None, "", {}) for row in rows)]


def web(
    config: ConfigOption = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="port on the loopback address; 0: a free one")
    ] = 0,
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=1.0, help="seconds between two looks of the page")
    ] = 5.0,
) -> None:
    """Serve a live page of the jobs and the cluster on this machine.

    The page shows what you may read, and changes nothing. Ctrl-C ends it.
    """
    ask = source(config)
    ask("top")  # what cannot be read is said here, and not in the browser
    session = BrowserSession()
    app = application(Viewer(getpass.getuser(), ask, slurm_view(config)), session, interval)
    with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
        asyncio.run(_serve(app, session, port))


async def _serve(app: ASGIApp, session: BrowserSession, port: int) -> None:
    """Raises ConfigError."""
    # Every user of this machine may connect, any number of times. Browsers send cookies of other ports along.
    server = GatewayServer(app, bounds=Bounds(request_bytes=1 << 18), setting="--port")
    ((_, number),) = await server.listen(f"127.0.0.1:{port}")
    typer.echo(f"http://127.0.0.1:{number}{session.folder}/?token={session.token}")
    typer.echo(
        "Open this URL in a browser on this machine; it works once. From elsewhere, forward the port first: "
        f"ssh -L {number}:127.0.0.1:{number} {socket.gethostname()}. Ctrl-C ends the page."
    )
    await asyncio.Event().wait()
