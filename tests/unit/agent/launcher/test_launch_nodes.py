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
from pollux.launcher.channel import Channel
from pollux.launcher.companion_file import CompanionFile
from pollux.launcher.launcher_channel import LauncherChannels
from pollux.launcher.messages import Left, MoveNotice, StartDecided, StartGrace
from pollux.launcher.outcome import Failure
from pollux.launcher.supervisor import LaunchContext, Supervisor
from pollux.launcher.workers import Notes
from pollux.ranks.links import Link
from pollux.slurm_job.allocation import StepAllocation
from tests.unit.agent.killing import exit_codes, forked
from tests.unit.agent.launching import (  # noqa: F401 - fixtures among them
    in_child,
    killed,
    launcher_signals,
    linger,
    on_nodes,
    ports,
    run_workers,
    succeed,
)

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.usefixtures("launcher_signals"),
]


def connect(
    num_nodes: int, workers: list[int], candidates: list[int], key: bytes = b"key"
) -> dict[int, LauncherChannels]:
    links: dict[int, LauncherChannels] = {}

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
        with pytest.raises(RankLost, match="is not this job's"):
            launcher_channel.join("127.0.0.1", [listener.getsockname()[1]], b"other key", 1, 1, timeout=1)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    with pytest.raises(RankLost, match=r"1 of 2 nodes did not join.*number\(s\) 1"):
        launcher_channel.gather(listener, b"key", 1, 2, timeout=2)
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


def test_two_launchers_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [launcher_channel.free_port() for _ in range(3)]

    class Draw:
        """Both draw the same numbers."""

        def sample(self, *_: object) -> list[int]:
            return free

    monkeypatch.setattr(launcher_channel.random, "SystemRandom", Draw)
    read, write = os.pipe()
    ends, end = os.pipe()

    def other() -> int:
        os.close(end)
        os.write(write, str(launcher_channel.free_port()).encode())
        os.read(ends, 1)  # its rank 0 has yet to listen
        return 0

    child = forked(other)
    try:
        assert int(os.read(read, 100)) != launcher_channel.free_port()
    finally:
        os.close(end)
        assert exit_codes([child]) == [0]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_on_one_node_ends_all_nodes_with_its_status(failing: int) -> None:
    bodies = [linger, linger, linger]
    bodies[failing] = lambda: sys.exit(7)
    for status, text in on_nodes(*bodies):
        assert status == 7, text
        assert f"rank {failing} (pid" in text


def test_a_verdict_holds_that_is_read_together_with_the_end_of_the_line() -> None:
    """Node 0 decides and ends before this launcher reads, as on a busy node."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = socket.create_connection(server.getsockname())
        node_0 = Link(server.accept()[0])
    failure = Failure(1.0, 0, 7, "sys.exit(7)", "pid 1, n1")
    Channel(node_0).send(StartDecided(failure, None))
    node_0.close()
    mine = LauncherChannels(1, [Channel(Link(line))], [1, 1], ["n0", "n1"], "127.0.0.1", "127.0.0.1", 1)
    assert Supervisor([], Notes(1), mine, LaunchContext("here")).wait().status == 7


def test_an_end_is_judged_by_what_node_0_has_said_before_it() -> None:
    """On a busy node both are there when the launcher looks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = socket.create_connection(server.getsockname())
        node_0 = Link(server.accept()[0])

    def worker() -> int:
        Channel(node_0).send(MoveNotice(7, frozenset({1})))
        return killed()

    def launcher() -> int:
        # No signal tells it of messages: the worker's end is the first that it hears of.
        mine = LauncherChannels(1, [Channel(Link(line))], [1, 1], ["n0", "n1"], "127.0.0.1", "127.0.0.1", 1)
        return run_workers(worker, channels=mine, first=1).status

    assert in_child(launcher)[0] == 0
    assert list(Channel(node_0).pending()) == [StartGrace(7), Left()], "it has failed nobody"


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
            assert "lost the connection to the launcher of node" in text


def test_a_meeting_that_fails_in_any_way_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("comparing strings with non-ASCII characters is not supported")

    monkeypatch.setattr(node, "gather", fail)
    monkeypatch.setattr(node, "listen", fail)
    with pytest.raises(LaunchError, match="could not meet: TypeError"):
        node.LauncherRendezvous(StepAllocation(num_nodes=2), b"key").outcome()


def test_idle_strangers_do_not_delay_the_meeting() -> None:
    """Each of them had its own ten seconds, one after the other."""
    candidates = ports()
    listener = launcher_channel.listen(candidates)
    strangers = [socket.create_connection(("127.0.0.1", listener.getsockname()[1])) for _ in range(8)]
    joined: list[LauncherChannels] = []

    def join() -> None:
        joined.append(launcher_channel.join("127.0.0.1", candidates, b"key", 1, 1, timeout=60))

    other = threading.Thread(target=join)
    other.start()
    made = launcher_channel.gather(listener, b"key", 1, 2, timeout=60)
    other.join()
    assert [each.node for each in made.channels] == [1]
    for each in (*joined, made):
        each.close()
    for stranger in strangers:
        stranger.close()


def test_idle_strangers_do_not_extend_the_wait() -> None:
    listener = launcher_channel.listen(ports())
    strangers = [socket.create_connection(("127.0.0.1", listener.getsockname()[1])) for _ in range(8)]
    ended = threading.Event()

    def keep_coming() -> None:
        while not ended.wait(0.05):
            try:
                strangers.append(socket.create_connection(listener.getsockname()))
            except OSError:
                return

    more = threading.Thread(target=keep_coming)
    more.start()
    with pytest.raises(RankLost, match="did not join within 0 s"):
        launcher_channel.gather(listener, b"key", 1, 2, timeout=0.4)
    ended.set()
    more.join()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"node": 0, "workers": 1, "name": ""}', b'{"node": 2, "workers": 1, "name": ""}',
             b'{"node": 1, "workers": 0, "name": ""}', b'{"node": true, "workers": 1, "name": ""}',
             b'{"node": 1, "workers": 1}', b"[" * 4000]
)  # fmt: skip
def test_a_launcher_that_says_nonsense_of_itself_is_not_taken(text: bytes) -> None:
    assert launcher_channel.Hello.parse(text, 2) is None


def test_launchers_without_a_secret_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every user of the cluster knows (job, attempt, step) is no key."""
    for name in (node.KEY_VARIABLE, "POLLUX_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="need a secret to know each other by"):
        node.launch_key(StepAllocation(num_nodes=2), None)
    assert node.launch_key(StepAllocation(), None), "one node talks to nobody"
    told = CompanionFile("127.0.0.1", 1, "/", (), "the file's")
    keys = {node.launch_key(StepAllocation(num_nodes=2, job_id=job), told) for job in (1, 2)}
    monkeypatch.setenv(node.KEY_VARIABLE, "of the batch script")
    keys.add(node.launch_key(StepAllocation(num_nodes=2, job_id=1), None))
    assert len(keys) == 3
    assert node.KEY_VARIABLE not in os.environ, "workers have no use for it"
    # `eval "$(pollux env)"` before srun.
    token = {"token": "J.1.0." + "a" * 43}
    job = {"POLLUX_GATEWAY": "https://g:1", "POLLUX_SUBMITTED": "1", "SLURM_JOB_ID": "1"}
    for name, value in (job | {"POLLUX_TOKEN": json.dumps(token)}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    keys.add(node.launch_key(StepAllocation(num_nodes=2, job_id=1), None))
    assert len(keys) == 4
