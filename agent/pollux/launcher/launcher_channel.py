"""Connect the launchers of one job.

Launcher 0 listens, and the other launchers connect. By these connections, each learns at once when another node fails.
Every message is authenticated with the job's key (see `pollux.ranks.links`), so no program of another user, and no
other attempt of the same job, can pass for a launcher of this attempt.

The listening port is the first free port of a short list. Every node derives this list from the key, so a stranger who
knows the job's id cannot take the ports first. MASTER_PORT is then any free port of node 0, and launcher 0 sends its
number over these connections. So no port needs to be reserved.
"""

from __future__ import annotations

import hmac
import json
import queue
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pollux.errors import LaunchError, RankLost
from pollux.launcher.channel import Channel, signal_arrivals
from pollux.launcher.messages import LauncherMessage, Message, Start
from pollux.launcher.outcome import LONGEST, is_count
from pollux.ranks.links import HANDSHAKE_S, LAUNCHERS, Door, Link, NoAnswer, connect
from pollux.slurm_job.allocation import FIRST_PORT, PORTS

CANDIDATES = 16
"""Ports tried, so that fifteen of them may be taken."""
JOIN_TIMEOUT_S = 300.0


@dataclass(slots=True)
class LauncherChannels:
    """This launcher's connections to other launchers.

    On node 0 they lead to all other launchers, on other nodes only to launcher 0.
    """

    node_rank: int
    channels: list[Channel]
    workers: list[int]
    """Workers of each node."""
    names: list[str]
    """What Slurm calls each node."""
    address: str
    """Where node 0 is reached, as seen from here."""
    here: str
    """This node's own address on the connection."""
    port: int
    """MASTER_PORT of the coming start."""

    @classmethod
    def alone(cls, workers: int, name: str) -> LauncherChannels:
        """A job of one node."""
        return cls(0, [], [workers], [name], "127.0.0.1", "127.0.0.1", free_port())

    @property
    def is_hub(self) -> bool:
        return self.node_rank == 0

    @property
    def first_rank(self) -> int:
        """The rank of this node's first worker in the coming start."""
        return sum(self.workers[: self.node_rank])

    def tell(self, message: LauncherMessage) -> None:
        for channel in self.channels:
            if channel.open:
                channel.send(message)

    def heard(self) -> Iterator[tuple[int, Message | None]]:
        """Yield (node, message) for all received messages.

        Yield (node, None) once for a connection that has ended.
        """
        for channel in list(self.channels):
            for message in channel.pending():
                yield channel.node, message
            if not channel.open:
                self.channels.remove(channel)
                channel.close()
                yield channel.node, None

    def signal_arrivals(self) -> None:
        """Have this process sent SIGIO when something comes."""
        for channel in self.channels:
            signal_arrivals(channel.link)

    def keep(self, nodes: Sequence[int], port: int) -> None:
        """Keep only these nodes, renumbered in this order.

        Node 0 stays first. This node is one of them.
        """
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


@dataclass(frozen=True, slots=True)
class Hello:
    """What a launcher says of its node."""

    node: int
    workers: int
    name: str

    def pack(self) -> bytes:
        return json.dumps({"node": self.node, "workers": self.workers, "name": self.name}).encode()

    @classmethod
    def parse(cls, text: bytes, num_nodes: int) -> Hello | None:
        """None where it makes no sense in a job of that many nodes."""
        try:
            match json.loads(text):
                case {"node": int(node), "workers": int(workers), "name": str(name)} if is_count(workers):
                    if is_count(node) and 0 < node < num_nodes and workers > 0 and len(name) <= LONGEST:
                        return cls(node, workers, name)
        except (ValueError, RecursionError):
            pass
        return None


def candidate_ports(key: bytes) -> list[int]:
    """Return ports for launcher 0, first choice first; equal on all nodes."""
    first = int.from_bytes(hmac.digest(key, b"pollux ports", "sha256")[:8])
    return [FIRST_PORT + (first + offset * 733) % PORTS for offset in range(CANDIDATES)]


def listen(ports: Sequence[int]) -> socket.socket:
    """A socket on the first of the ports that is free here.

    Raises LaunchError where none is.
    """
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
) -> LauncherChannels:
    """On node 0: wait for all other launchers, and tell them the world.

    Raises RankLost naming the missing ones.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, tuple[Channel, Hello]] = {}
    admitted: queue.SimpleQueue[tuple[Link, bytes]] = queue.SimpleQueue()
    door = Door(listener, key, LAUNCHERS, lambda *each: admitted.put(each))
    try:
        while len(found) < num_nodes - 1:
            link, text = admitted.get(timeout=max(deadline - time.monotonic(), 0.0))
            hello = Hello.parse(text, num_nodes)
            if hello is None:
                link.close()
                continue
            if hello.node in found:  # it has tried again
                found[hello.node][0].close()
            found[hello.node] = (Channel(link, hello.node), hello)
    except queue.Empty:
        for channel, _ in found.values():
            channel.close()
        missing = sorted(set(range(1, num_nodes)) - set(found))
        raise RankLost(
            f"{len(missing)} of {num_nodes} nodes did not join within {timeout:.0f} s: number(s) "
            f"{', '.join(map(str, missing[:8]))} of the step's node list; see their part of the job's output"
        ) from None
    finally:
        door.close()
    others = [found[node] for node in range(1, num_nodes)]
    counts, names = [workers, *(h.workers for _, h in others)], [name, *(h.name for _, h in others)]
    channels = [channel for channel, _ in others]
    address = channels[0].link.here if channels else "127.0.0.1"
    made = LauncherChannels(0, channels, counts, names, address, address, free_port())
    made.tell(Start(tuple(counts), tuple(names), made.port))
    return made


def join(
    address: str,
    ports: Sequence[int],
    key: bytes,
    node_rank: int,
    workers: int,
    *,
    name: str = "",
    timeout: float = JOIN_TIMEOUT_S,
) -> LauncherChannels:
    """On the other nodes: find launcher 0 and wait for its start.

    Raises RankLost where it is not found in time.
    """
    deadline = time.monotonic() + timeout
    pause, why = 0.02, "it did not answer"
    hello = Hello(node_rank, workers, name).pack()
    while (left := deadline - time.monotonic()) > 0:
        try:
            link = connect(address, ports, key, LAUNCHERS, hello, min(left, HANDSHAKE_S))
        except NoAnswer as error:
            why = str(error)
            time.sleep(min(pause, max(deadline - time.monotonic(), 0.0)))
            pause = min(pause * 2, 1.0)
            continue
        channel = Channel(link)
        start = channel.receive(max(deadline - time.monotonic(), 1.0))
        if not isinstance(start, Start) or not node_rank < len(start.workers):
            raise RankLost("node 0's launcher ended before all nodes had joined")
        return LauncherChannels(
            node_rank, [channel], list(start.workers), list(start.names), address, link.here, start.port
        )
    raise RankLost(
        f"node 0's launcher was not found at {address} within {timeout:.0f} s, on none of the ports "
        f"{', '.join(map(str, ports))}: {why}"
    )


_reserved: list[socket.socket] = []
"""The UDP port of the newest port that `free_port` has returned."""


def free_port() -> int:
    """Return a TCP port of this machine on which nobody listens now.

    No other launcher chooses it while this one runs: rank 0 listens there some seconds later. This process holds the
    UDP port of the same number, which nobody else needs.
    """
    for port in [*random.SystemRandom().sample(range(FIRST_PORT, FIRST_PORT + PORTS), 32), 0]:
        held = socket.socket(type=socket.SOCK_DGRAM)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
                chosen = int(probe.getsockname()[1])
                held.bind(("", chosen))
            except OSError:
                held.close()
                continue
        for former in _reserved:
            former.close()
        _reserved[:] = [held]
        return chosen
    raise LaunchError("no free TCP port on this node")
