"""How the launchers of a job's nodes meet, and hear of each other."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading

import pytest

from pollux.errors import LaunchError, RankLost
from pollux.launcher import launcher_channel, node
from pollux.launcher.launcher_channel import Link
from pollux.launcher.supervisor import LaunchContext, Supervisor
from pollux.launcher.workers import Notes
from pollux.slurm_job.allocation import StepAllocation
from tests.unit.agent.launching import (  # noqa: F401 - fixtures among them
    launcher_signals,
    linger,
    on_nodes,
    ports,
    short_graces,
    succeed,
)

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.usefixtures("launcher_signals", "short_graces"),
]


def connect(
    num_nodes: int, workers: list[int], candidates: list[int], key: bytes = b"key"
) -> dict[int, Link]:
    links: dict[int, Link] = {}

    def meet(node: int) -> None:
        if node == 0:
            links[0] = launcher_channel.gather(
                launcher_channel.listen(candidates), key, workers[0], num_nodes, timeout=80
            )
        else:
            links[node] = launcher_channel.join("127.0.0.1", candidates, key, node, workers[node], timeout=80)

    threads = [threading.Thread(target=meet, args=(node,)) for node in reversed(range(num_nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return links


def test_nodes_agree_on_world_and_port_whoever_comes_first_and_whatever_port_is_taken() -> None:
    candidates = ports()
    taken = socket.socket()
    taken.bind(("", candidates[0]))
    taken.listen()
    stranger = threading.Thread(target=_talk_nonsense, args=(taken,), daemon=True)
    stranger.start()
    links = connect(3, [2, 1, 3], candidates)
    assert {each.port for each in links.values()} == {links[0].port}
    assert all(each.workers == [2, 1, 3] for each in links.values())
    assert [each.is_hub for _, each in sorted(links.items())] == [True, False, False]
    for each in links.values():
        each.close()
    taken.close()


def _talk_nonsense(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        connection.sendall(b'{"nonce": "x", "proof": "y"}\n')
        connection.close()


def test_strangers_do_not_join() -> None:
    candidates = ports()
    listener = launcher_channel.listen(candidates)

    def intrude() -> None:
        with pytest.raises(RankLost, match="is not this job's launcher"):
            launcher_channel.join("127.0.0.1", candidates, b"other key", 1, 1, timeout=0.5)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    with pytest.raises(RankLost, match=r"1 of 2 nodes did not join.*number\(s\) 1"):
        launcher_channel.gather(listener, b"key", 1, 2, timeout=0.7)
    intruder.join()


def test_a_hub_that_never_comes_is_told() -> None:
    with pytest.raises(RankLost, match=r"was not found at 127\.0\.0\.1"):
        launcher_channel.join("127.0.0.1", ports(), b"key", 1, 1, timeout=0.1)


def test_no_free_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="none of the ports"):
            launcher_channel.listen([taken.getsockname()[1]])


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_on_one_node_ends_all_nodes_with_its_status(failing: int) -> None:
    bodies = [linger, linger, linger]
    bodies[failing] = lambda: sys.exit(7)
    for status, text in on_nodes(*bodies):
        assert status == 7, text
        assert f"rank {failing} (pid" in text


def test_a_verdict_holds_that_is_read_together_with_the_end_of_the_line() -> None:
    """As on a busy node: node 0 has decided and ended before this launcher comes to read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = socket.create_connection(server.getsockname())
        node_0, _ = server.accept()
    failure = {"at": 1.0, "rank": 0, "status": 7, "why": "sys.exit(7)", "where": "pid 1, n1"}
    message = {"type": "outcome", "failure": failure, "again": None}
    node_0.sendall(json.dumps(message).encode() + b"\n")
    node_0.close()
    mine = Link(1, [launcher_channel.Channel(line, 0)], [1, 1], ["n0", "n1"], "127.0.0.1", "127.0.0.1", 1)
    assert Supervisor([], Notes(1), mine, LaunchContext("here")).wait().status == 7


def test_success_of_all_nodes_is_success_of_each() -> None:
    assert [status for status, _ in on_nodes(succeed, succeed)] == [0, 0]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_is_killed_is_missed_by_the_others(lost: int) -> None:
    bodies = [linger, linger, linger]

    def kill_launcher() -> int:
        os.kill(os.getppid(), signal.SIGKILL)
        return linger()

    bodies[lost] = kill_launcher
    results = on_nodes(*bodies)
    assert results[lost][0] == -signal.SIGKILL
    for number, (status, text) in enumerate(results):
        if number != lost:
            assert status == 1, text
            assert "has gone without a word" in text


def test_a_meeting_that_fails_in_any_way_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("comparing strings with non-ASCII characters is not supported")

    monkeypatch.setattr(node, "gather", fail)
    monkeypatch.setattr(node, "listen", fail)
    with pytest.raises(LaunchError, match="could not meet: TypeError"):
        node._Rendezvous(StepAllocation(num_nodes=2)).outcome()
