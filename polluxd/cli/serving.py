"""`polluxd gateway`: wire its rooms together, and serve."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal

import sdnotify
import uvloop

from pollux.scheduler.munge import Munge
from pollux.version import __version__
from polluxd.config.config_file import Config
from polluxd.gateway.app import GatewayService
from polluxd.gateway.client import munge_socket
from polluxd.gateway.server import GatewayServer
from polluxd.site.slurm_checks import Slurm
from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore

from .answering import Answering

log = logging.getLogger(__name__)


def serve(config: Config) -> None:
    """Answer until SIGTERM or SIGINT. Raises ConfigError, SlurmError."""
    slurm = Slurm(config.slurm.conf, timeout=config.slurm.timeout_s)

    def show_config() -> str:
        return slurm.ask("scontrol", "show", "config")

    database, cluster = config.database, config.slurm.cluster
    url = database.gateway_url(config.gateway.passfile)
    waits = {
        "connect_timeout": database.connect_timeout_s,
        "statement_timeout": database.statement_timeout_s,
    }
    gateway = GatewayService(
        GatewayStore(url, cluster, **waits),
        Answering(Store(url, cluster, **waits), config.policy, show_config),
        Munge(munge_socket(show_config())),
        cluster=cluster,
        version=__version__,
        interval_s=config.gateway.publish_interval_s,
    )
    certificate, key = config.gateway.tls_certificate, config.gateway.tls_key
    tls = None if certificate is None or key is None else (certificate, key)
    # A connection that waits is some dozen objects, and a collection visits them all: not for each 700 new ones.
    gc.freeze()
    gc.set_threshold(100_000)
    uvloop.run(_listen(GatewayServer(gateway.app(), tls), config.gateway.listen))


async def _listen(server: GatewayServer, address: str) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await server.listen(address)
    log.info("the gateway listens at %s", address)
    sdnotify.SystemdNotifier().notify("READY=1")
    await stopped.wait()
    await server.close()
