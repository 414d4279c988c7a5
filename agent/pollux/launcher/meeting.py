"""Connect the launchers of one job.

Node 0's launcher listens, and the others connect. By these connections, it learns at once when another node fails.
Every message is authenticated with the job's key (see `pollux.ranks.links`), so no program of another user, and no
other attempt of the same job, can pass for a launcher of this attempt.

The listening port is the first free port of a short list. Every node derives this list from the key, so a stranger who
knows the job's id cannot take the ports first. MASTER_PORT is then any free port of node 0, and its launcher sends the
number over these connections. So no port needs to be reserved.
"""

from __future__ import annotations

import hmac
import queue
import random
import signal
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread

from pollux.errors import LaunchError, PolluxAgentError, RankLost
from pollux.launcher.messages import Channel, Hello, pack, parse
from pollux.launcher.workers import WATCHED
from pollux.ranks.links import LAUNCHERS, Door, Link, NoAnswer, reach
from pollux.slurm_job.allocation import FIRST_PORT, PORTS, StepAllocation, node_address, node_name

CANDIDATES = 16
"""Ports tried, so that fifteen of them may be taken."""
JOIN_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class JobNode:
    """One node of the job, as node 0's launcher knows it."""

    workers: int
    name: str
    """What Slurm calls it."""
    channel: Channel | None = None
    """To its launcher; None for node 0, which this is."""


class Meeting:
    """Meets the other nodes' launchers, in a thread while torch is imported. The thread ends before any fork."""

    def __init__(self, allocation: StepAllocation, key: bytes) -> None:
        self._found: Future[list[JobNode]] = Future()
        self._thread = Thread(target=self._meet, args=(allocation, key), daemon=True)
        self._thread.start()

    def nodes(self) -> list[JobNode]:
        """On node 0 all nodes, in order; elsewhere node 0 alone. Raises RankLost and LaunchError."""
        self._thread.join()
        return self._found.result()

    def _meet(self, allocation: StepAllocation, key: bytes) -> None:
        # This thread may outlive its end, as Python sees it, by a moment, and must not be the one that takes a signal
        # which the main thread has blocked by then: SIGIO of the channels would end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
        try:
            own, ports = JobNode(allocation.workers, node_name()), candidate_ports(key)
            if allocation.num_nodes == 1:
                found = [own]
            elif allocation.node_rank == 0:
                found = [own, *gather(listen(ports), key, allocation.num_nodes)]
            else:
                hello = Hello(allocation.node_rank, allocation.workers, own.name)
                hub = join(node_address(allocation.first_node), ports, key, hello)
                found = [JobNode(0, "", hub)]
            self._found.set_result(found)
        except PolluxAgentError as error:
            self._found.set_exception(error)
        except Exception as error:
            # Any error ends this node: without the other launchers it would train alone, as if it were the whole job.
            why = f"the launchers could not meet: {type(error).__name__}: {error}"
            self._found.set_exception(LaunchError(why))


def candidate_ports(key: bytes) -> list[int]:
    """Return ports for node 0's launcher, first choice first; equal on all nodes."""
    first = int.from_bytes(hmac.digest(key, b"pollux ports", "sha256")[:8])
    return [FIRST_PORT + (first + offset * 733) % PORTS for offset in range(CANDIDATES)]


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
    num_nodes: int,
    *,
    timeout: float = JOIN_TIMEOUT_S,
) -> list[JobNode]:
    """On node 0: wait for all other launchers; return their nodes. Raises RankLost naming the missing ones."""
    deadline = time.monotonic() + timeout
    found: dict[int, JobNode] = {}
    admitted: queue.SimpleQueue[tuple[Link, bytes]] = queue.SimpleQueue()
    door = Door(listener, key, LAUNCHERS, lambda *each: admitted.put(each))
    try:
        while len(found) < num_nodes - 1:
            link, text = admitted.get(timeout=max(deadline - time.monotonic(), 0.0))
            hello = parse_hello(text, num_nodes)
            if hello is None:
                link.close()
                continue
            if hello.node in found:  # it has tried again
                found[hello.node].channel.close()  # type: ignore[union-attr]
            found[hello.node] = JobNode(hello.workers, hello.name, Channel(link))
    except queue.Empty:
        missing = sorted(set(range(1, num_nodes)) - set(found))
        raise RankLost(
            f"{len(missing)} of {num_nodes} nodes did not join within {timeout:.0f} s: number(s) "
            f"{', '.join(map(str, missing[:8]))} of the step's node list; see their part of the job's output"
        ) from None
    finally:
        door.close()
    return [found[node] for node in range(1, num_nodes)]


def parse_hello(text: bytes, num_nodes: int) -> Hello | None:
    """What a launcher says of itself; None where it makes no sense in a job of that many nodes."""
    try:
        hello = parse(text)
    except ValueError:
        return None
    if isinstance(hello, Hello) and 0 < hello.node < num_nodes and hello.workers > 0:
        return hello
    return None


def join(
    address: str, ports: Sequence[int], key: bytes, hello: Hello, *, timeout: float = JOIN_TIMEOUT_S
) -> Channel:
    """On the other nodes: connect to node 0's launcher. Raises RankLost where it is not found in time."""
    try:
        return Channel(reach(address, ports, key, LAUNCHERS, timeout, pack(hello), insists=True))
    except NoAnswer as error:
        raise RankLost(
            f"node 0's launcher was not found at {address} within {timeout:.0f} s, on none of the ports "
            f"{', '.join(map(str, ports))}: {error}"
        ) from None


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
