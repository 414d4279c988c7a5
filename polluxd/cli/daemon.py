"""`polluxd`: run the daemon or the gateway, check the configuration."""

from __future__ import annotations

import asyncio
import gc
import getpass
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import sdnotify
import typer
import uvloop

from pollux.scheduler.munge import Munge
from pollux.version import __version__
from polluxd import logs
from polluxd.config.config_file import DEFAULT_PATH, Config, load_config
from polluxd.config.settings_reference import example_file
from polluxd.daemon import Daemon
from polluxd.errors import ConfigError, PolluxError
from polluxd.forecast import service
from polluxd.gateway.app import QUESTION_S, GatewayService
from polluxd.gateway.client import munge_socket
from polluxd.gateway.server import GatewayServer, given_by_systemd
from polluxd.printable import printable
from polluxd.site.file_checks import configuration_files
from polluxd.site.findings import Level
from polluxd.slurm.configuration import Slurm
from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore

from .answering import Answering

log = logging.getLogger(__name__)

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", envvar="POLLUXD_CONFIG", help="Configuration file (TOML).")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polluxd {__version__}")
        raise typer.Exit


@app.callback()
def polluxd(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None:
    """The Pollux scheduling daemon for Slurm."""


@app.command()
def run(
    config: ConfigOption = DEFAULT_PATH,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the daemon in the foreground; systemd starts it so."""
    level = logging.getLevelNamesMapping().get(log_level.upper())
    if level is None:
        raise typer.BadParameter(
            f"expected debug, info, warning or error, got {log_level!r}", param_hint="--log-level"
        )
    logs.begin(level)

    def load() -> Config:
        return load_config(config)

    with service.beside(load):
        Daemon(load).run()


@app.command()
def gateway(config: ConfigOption = DEFAULT_PATH) -> None:
    """Take in what jobs report and users ask, on any host with munge.

    Jobs and users reach the database through it alone. systemd runs it beside the daemon, as a service of its own;
    several may run.
    """
    logs.begin(logging.INFO)
    loaded = load_config(config)
    logs.use(loaded.log.format)
    slurm = Slurm(loaded.slurm.conf, timeout=loaded.slurm.timeout_s)

    def show_config() -> str:
        return slurm.ask("scontrol", "show", "config")

    cluster, waits = loaded.slurm.cluster, loaded.database.waits
    url = loaded.database.gateway_url(loaded.gateway.passfile)
    service = GatewayService(
        GatewayStore(url, cluster, **waits),
        Answering(
            Store(url, cluster, **waits | {"statement_timeout": QUESTION_S}), loaded.policy, show_config
        ),
        Munge(munge_socket(show_config())),
        cluster=cluster,
        version=__version__,
        interval_s=loaded.gateway.publish_interval_s,
    )
    certificate, key = loaded.gateway.tls_certificate, loaded.gateway.tls_key
    tls = None if certificate is None or key is None else (certificate, key)
    # A connection that waits is some dozen objects, and a collection visits them all: not for each 700 new ones.
    gc.freeze()
    # Threads that make long answers let the loop, and so all others, go on after this time and not ten times it [s].
    sys.setswitchinterval(0.0005)
    gc.set_threshold(100_000)
    uvloop.run(_listen(GatewayServer(service.app(), tls), loaded.gateway.listen))


async def _listen(server: GatewayServer, address: str) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.listen(address, given_by_systemd())
    log.info("the gateway listens at %s", address)
    sdnotify.SystemdNotifier().notify("READY=1")
    await stopped.wait()
    await server.close()


@app.command()
def check(config: ConfigOption = DEFAULT_PATH) -> None:
    """Check the configuration and the files that it names.

    Needs neither Slurm nor the database; `polluxctl doctor` checks these too.
    """
    loaded = load_config(config)
    findings = [
        each for each in configuration_files(loaded, config, getpass.getuser()) if each.level is not Level.OK
    ]
    for each in findings:
        typer.echo(printable(f"{each.level}: {each.result}; remedy: {each.remedy}"), err=True)
    if any(each.level is Level.FAULT for each in findings):
        raise ConfigError(f"{config}: the configuration is sound, and the files that it names are not")
    typer.echo(f"{config}: sound; cluster {loaded.slurm.cluster}, mode {loaded.mode}")


@app.command("example-config")
def example_config() -> None:
    """Print a configuration file with every key, its meaning and its default."""
    typer.echo(example_file(), nl=False)


def main() -> None:
    """Run a command; a PolluxError is one line on stderr and status 2."""
    try:
        app()
    except PolluxError as error:
        typer.echo(f"polluxd: {printable(str(error))}", err=True)
        sys.exit(2)
