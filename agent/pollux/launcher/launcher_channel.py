"""The line between the launchers of one job: they agree on a port, and hear at once when another node fails.

Launcher 0 listens, the others connect; each side proves by HMAC that it knows the job's key (the ticket's token
where there is one), so that neither a neighbour's program on the same port nor another attempt of the same job is
taken for one of us. The listening port is the first free one of a short list that every node derives from job,
attempt and step; MASTER_PORT is then any port free on node 0, told over the line. So no port needs to be reserved.

Messages are JSON, one per line. Sockets raise SIGIO, which the supervisor takes with its other signals.
"""

from __future__ import annotations

import fcntl
import hmac
import json
import os
import random
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pollux.errors import LaunchError, RankLost
from pollux.slurm_job.allocation import FIRST_PORT, PORTS

Message = dict[str, Any]

CANDIDATES = 16
"""Ports tried, so that fifteen of them may be taken."""
JOIN_TIMEOUT_S = 300.0
HANDSHAKE_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 10.0
MAX_LINE = 1 << 16


class Channel:
    """One connected launcher."""

    def __init__(self, connection: socket.socket, node: int) -> None:
        self.node = node
        self.socket = connection
        self.open = True
        self._received = b""
        connection.settimeout(SEND_TIMEOUT_S)
        if connection.family != socket.AF_UNIX:
            keep_alive(connection)

    def send(self, message: Message) -> None:
        """Send, or find the other side gone; either way no exception: `receive` reports the end."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.open = False

    def receive(self, timeout: float) -> Message | None:
        """The next message, waited for; None where the line has ended or nothing came."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0 or not self._fill(max(left, 0.001)):
                return None
        return self._take()

    def pending(self) -> Iterator[Message]:
        """Messages that are here already."""
        while self.open and self._fill(0.0):
            pass
        while (message := self._take()) is not None:
            yield message

    def close(self) -> None:
        self.open = False
        self.socket.close()

    def _fill(self, timeout: float) -> bool:
        """Read once. False where nothing came in time or the line has ended."""
        self.socket.settimeout(timeout)
        try:
            data = self.socket.recv(MAX_LINE)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            data = b""
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(SEND_TIMEOUT_S)
        if not data or len(self._received) > MAX_LINE:
            self.open = False
            return False
        self._received += data
        return True

    def _take(self) -> Message | None:
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            # Whoever speaks like this is none of us.
            self.open = False
            return None
        return message


@dataclass(slots=True)
class Link:
    """This launcher's lines to the others: to all of them on node 0, else to node 0."""

    node_rank: int
    channels: list[Channel]
    workers: list[int]
    """Workers of each node."""
    names: list[str]
    """What Slurm calls each node."""
    address: str
    """Where node 0 is reached, as seen from here."""
    here: str
    """This node's own address on the line."""
    port: int
    """MASTER_PORT of the coming start."""

    @classmethod
    def alone(cls, workers: int, name: str) -> Link:
        """A job of one node."""
        return cls(0, [], [workers], [name], "127.0.0.1", "127.0.0.1", free_port())

    @property
    def is_hub(self) -> bool:
        return self.node_rank == 0

    @property
    def first_rank(self) -> int:
        """The rank of this node's first worker in the coming start."""
        return sum(self.workers[: self.node_rank])

    def tell(self, message: Message) -> None:
        for channel in self.channels:
            if channel.open:
                channel.send(message)

    def heard(self) -> Iterator[tuple[int, Message]]:
        """(node, message) for all that has come, `{"type": "gone"}` once for a line that has ended."""
        for channel in list(self.channels):
            for message in channel.pending():
                yield channel.node, message
            if not channel.open:
                self.channels.remove(channel)
                channel.close()
                yield channel.node, {"type": "gone"}

    def signal_arrivals(self) -> None:
        """Have this process sent SIGIO when something comes."""
        for channel in self.channels:
            signal_arrivals(channel.socket)

    def keep(self, nodes: Sequence[int], port: int) -> None:
        """Go on with these nodes alone, of which this is one, numbered anew in this order; node 0 stays first."""
        place = {node: number for number, node in enumerate(nodes)}
        if self.is_hub:
            for channel in list(self.channels):
                if channel.node in place:
                    channel.node = place[channel.node]
                else:
                    self.channels.remove(channel)
                    channel.close()
        self.workers = [self.workers[node] for node in nodes]
        self.names = [self.names[node] for node in nodes]
        self.node_rank, self.port = place[self.node_rank], port

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        self.channels.clear()


def listen(ports: Sequence[int]) -> socket.socket:
    """A socket on the first of the ports that is free here. Raises LaunchError where none is."""
    for port in ports:
        listener = socket.socket()
        # Connections of an earlier attempt that linger in TIME_WAIT do not count as taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
            listener.listen(1024)
        except OSError:
            listener.close()
            continue
        return listener
    raise LaunchError(f"none of the ports {', '.join(map(str, ports))} is free on this node")


def gather(
    listener: socket.socket,
    key: bytes,
    workers: int,
    num_nodes: int,
    *,
    name: str = "",
    timeout: float = JOIN_TIMEOUT_S,
) -> Link:
    """On node 0: wait for all other launchers, and tell them the world. Raises RankLost naming who did not come."""
    deadline = time.monotonic() + timeout
    found: dict[int, tuple[Channel, int, str]] = {}
    while len(found) < num_nodes - 1:
        listener.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, num_nodes)) - set(found))
            raise RankLost(
                f"{len(missing)} of {num_nodes} nodes did not join within {timeout:.0f} s: number(s) "
                f"{', '.join(map(str, missing[:8]))} of the step's node list; see their part of the job's output"
            ) from None
        greeted = _greet(connection, key, num_nodes)
        if greeted is None:
            connection.close()
            continue
        found[greeted[0].node] = greeted
    listener.close()
    others = [found[node] for node in range(1, num_nodes)]
    counts, names = [workers, *(each[1] for each in others)], [name, *(each[2] for each in others)]
    channels = [each[0] for each in others]
    address = channels[0].socket.getsockname()[0] if channels else "127.0.0.1"
    link = Link(0, channels, counts, names, address, address, free_port())
    link.tell({"type": "start", "workers": counts, "names": names, "port": link.port})
    return link


def join(
    address: str,
    ports: Sequence[int],
    key: bytes,
    node_rank: int,
    workers: int,
    *,
    name: str = "",
    timeout: float = JOIN_TIMEOUT_S,
) -> Link:
    """On the other nodes: find launcher 0 and wait for its start. Raises RankLost where it is not found in time."""
    deadline = time.monotonic() + timeout
    pause = 0.02
    why, stranger = "it did not answer", ""
    while time.monotonic() < deadline:
        for port in ports:
            try:
                connection = socket.create_connection((address, port), timeout=HANDSHAKE_TIMEOUT_S)
            except OSError as error:
                why = str(error)
                continue
            channel = _present(connection, key, node_rank, workers, name)
            if channel is None:
                stranger = f"; whoever listens on port {port} is not this job's launcher"
                connection.close()
                continue
            start = channel.receive(max(deadline - time.monotonic(), 1.0))
            if start is None or start.get("type") != "start":
                raise RankLost("node 0's launcher ended before all nodes had joined")
            counts, names, here = start["workers"], start["names"], channel.socket.getsockname()[0]
            return Link(node_rank, [channel], list(counts), list(names), address, here, int(start["port"]))
        time.sleep(pause)
        pause = min(pause * 2, 1.0)
    raise RankLost(
        f"node 0's launcher was not found at {address} within {timeout:.0f} s, on none of the ports "
        f"{', '.join(map(str, ports))}: {why}{stranger}"
    )


def free_port() -> int:
    """A TCP port of this machine that nobody listens on at the moment."""
    for port in [*random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + PORTS), 32), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise LaunchError("no free TCP port on this node")


def _greet(connection: socket.socket, key: bytes, num_nodes: int) -> tuple[Channel, int, str] | None:
    """Node 0's half of the handshake: (channel, workers, name), or None for one who is not of this job."""
    channel = Channel(connection, -1)
    hello = channel.receive(HANDSHAKE_TIMEOUT_S)
    if hello is None or not isinstance(hello.get("nonce"), str):
        return None
    mine = secrets.token_hex(16)
    both = f"{hello['nonce']}.{mine}"
    channel.send({"nonce": mine, "proof": _proof(key, "hub", both)})
    answer = channel.receive(HANDSHAKE_TIMEOUT_S) or {}
    if not hmac.compare_digest(str(answer.get("proof")), _proof(key, "node", both)):
        return None
    node, workers = answer.get("node"), answer.get("workers")
    if not (isinstance(node, int) and isinstance(workers, int) and 1 <= node < num_nodes and workers >= 1):
        return None
    channel.node = node
    return channel, workers, str(answer.get("name", ""))


def _present(
    connection: socket.socket, key: bytes, node_rank: int, workers: int, name: str
) -> Channel | None:
    """The other nodes' half: None where the other side is not this job's launcher 0."""
    channel = Channel(connection, 0)
    mine = secrets.token_hex(16)
    channel.send({"nonce": mine})
    answer = channel.receive(HANDSHAKE_TIMEOUT_S)
    if answer is None:
        return None
    both = f"{mine}.{answer.get('nonce')}"
    if not hmac.compare_digest(str(answer.get("proof")), _proof(key, "hub", both)):
        return None
    proof = _proof(key, "node", both)
    channel.send({"proof": proof, "node": node_rank, "workers": workers, "name": name})
    return channel if channel.open else None


def signal_arrivals(connection: socket.socket) -> None:
    """Have the kernel send this process SIGIO when something comes. fcntl(2), F_SETOWN, O_ASYNC."""
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)


def _proof(key: bytes, role: str, nonces: str) -> str:
    return hmac.new(key, f"pollux-link {role} {nonces}".encode(), "sha256").hexdigest()


def keep_alive(connection: socket.socket) -> None:
    """A node that vanishes without a word is noticed within half a minute. tcp(7)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
