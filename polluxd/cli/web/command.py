"""`polluxctl web`: serve the live page on this machine."""

from __future__ import annotations

import contextlib
import getpass
import socket
from typing import Annotated

import typer
import uvicorn

from polluxd.errors import ConfigError

from .. import answers
from ..access import ConfigOption
from ..explained import MOST_JOBS
from .browser_session import BrowserSession
from .live_page import Viewer, application


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
    source = answers.source(config, MOST_JOBS)
    source.top()  # what cannot be read is said here, and not in the browser
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {error.strerror}; another program may listen there: leave --port out"
        ) from None
    session, number = BrowserSession(), listener.getsockname()[1]
    database = source if isinstance(source, answers.Database) else None
    app = application(Viewer(getpass.getuser(), source, database), session, interval)
    typer.echo(f"http://127.0.0.1:{number}{session.folder}/?token={session.token}")
    typer.echo(
        "Open this URL in a browser on this machine; it works once. From elsewhere, forward the port first: "
        f"ssh -L {number}:127.0.0.1:{number} {socket.gethostname()}. Ctrl-C ends the page."
    )
    settings = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", server_header=False, date_header=False
    )
    with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
        uvicorn.Server(settings).run(sockets=[listener])
