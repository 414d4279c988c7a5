"""How the launchers of a job's nodes meet, and hear of each other."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from pollux.errors import LaunchError, RankLost
from pollux.launcher import meeting, node, supervisor
from pollux.launcher.companion_file import CompanionFile
from pollux.launcher.machine import Graces
from pollux.launcher.messages import Channel, Hello, Leave, Over, pack
from pollux.launcher.supervisor import Follower
from pollux.launcher.workers import NodeWorkers
from pollux.ranks.links import Link
from pollux.slurm_job.allocation import StepAllocation
from tests.unit.agent.killing import exit_codes, forked
from tests.unit.agent.launched_step import STOPPED, step
from tests.unit.agent.launching import launcher_signals, ports  # noqa: F401 - a fixture among them

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.usefixtures("launcher_signals"),
]


def hello(node: int = 1, workers: int = 1) -> Hello:
    return Hello(node, workers, f"n{node}")


def idle_strangers(listener: socket.socket) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", listener.getsockname()[1])) for _ in range(8)]


def test_nodes_meet_whoever_comes_first_and_whatever_port_is_taken() -> None:
    """Idle strangers do not delay the meeting: each of them had its own ten seconds, one after the other."""
    candidates = ports()
    taken = socket.create_server(("", candidates[0]))
    threading.Thread(target=_talk_nonsense, args=(taken,), daemon=True).start()
    listener = meeting.listen(candidates)
    strangers = idle_strangers(listener)
    with ThreadPoolExecutor() as pool:
        coming = [
            pool.submit(meeting.join, "127.0.0.1", candidates, b"key", hello(*each), timeout=60)
            for each in ((2, 3), (1, 1))
        ]
        nodes = meeting.gather(listener, b"key", 3, timeout=60)
    assert [(each.workers, each.name) for each in nodes] == [(1, "n1"), (3, "n2")]
    ends = [each.channel for each in nodes if each.channel is not None]
    for each in (taken, *strangers, *ends, *(one.result() for one in coming)):
        each.close()


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
    listener = meeting.listen(candidates)
    with ThreadPoolExecutor() as pool:
        intruder = pool.submit(meeting.join, "127.0.0.1", candidates, b"other key", hello(), timeout=1)
        with pytest.raises(RankLost, match=r"1 of 2 nodes did not join.*number\(s\) 1"):
            meeting.gather(listener, b"key", 2, timeout=2)
        with pytest.raises(RankLost, match="is not this job's"):
            intruder.result()


def test_a_hub_that_never_comes_is_told() -> None:
    with pytest.raises(RankLost, match=r"was not found at 127\.0\.0\.1"):
        meeting.join("127.0.0.1", ports(), b"key", hello(), timeout=0.1)


def test_no_free_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="none of the ports"):
            meeting.listen([taken.getsockname()[1]])


def test_two_launchers_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    free = [meeting.free_port() for _ in range(3)]

    class Draw:
        """Both draw the same numbers."""

        def sample(self, *_: object) -> list[int]:
            return free

    monkeypatch.setattr(meeting.random, "SystemRandom", Draw)
    read, write = os.pipe()
    ends, end = os.pipe()

    def other() -> int:
        os.close(end)
        os.write(write, str(meeting.free_port()).encode())
        os.read(ends, 1)  # its rank 0 has yet to listen
        return 0

    child = forked(other)
    try:
        assert int(os.read(read, 100)) != meeting.free_port()
    finally:
        os.close(end)
        assert exit_codes([child]) == [0]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_on_one_node_ends_all_nodes_with_its_status(tmp_path: Path, failing: int) -> None:
    body = f"if rank == {failing}: sys.exit(7)\ntime.sleep(90)"
    with step(tmp_path, 3, body, workers=1, settings="sibling=0.1") as launched:
        assert launched.statuses() == [7, 7, 7], launched.output()
    assert f"rank {failing} (pid" in launched.output()


@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_is_killed_is_missed_by_the_others(tmp_path: Path, lost: int) -> None:
    body = f"if rank == {lost}: kill(os.getppid())\ntime.sleep(90)"
    with step(tmp_path, 3, body, workers=1, settings="sibling=0.1") as launched:
        expected = [1, 1, 1]
        expected[lost] = STOPPED
        assert launched.statuses() == expected, launched.output()
    assert f"lost the connection to the launcher of node {'n1' if lost else '0'}" in launched.output()


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_launcher_ends_all_nodes(tmp_path: Path, node: int) -> None:
    with step(tmp_path, 2, "mark(f'up-{rank}'); time.sleep(90)", workers=1) as launched:
        launched.until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        launched.launchers[node].terminate()
        assert launched.statuses() == [143, 143], launched.output()


@contextmanager
def followed() -> Iterator[tuple[Channel, Follower]]:
    """Node 0's end of a connection, and the launcher of another node."""
    ends = socket.socketpair()
    hub, mine = Channel(Link(ends[0])), Channel(Link(ends[1]))
    yield hub, Follower(mine, lambda _: NodeWorkers(1, "n1", 1.0), Graces(), lambda _: None)
    hub.close()
    mine.close()


def test_an_order_holds_that_is_read_together_with_the_end_of_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Node 0 decides and ends before this launcher reads, as on a busy node."""
    # Descendants of this process belong to other tests, such as the workers of their loaders.
    monkeypatch.setattr(supervisor, "kill_descendants", lambda: None)
    for orders, status in (([Over(7)], 7), ([Leave()], 0), ([], 1)):
        with followed() as (hub, follower):
            for order in orders:
                hub.send(order)
            hub.close()
            assert follower.run() == status


def test_a_meeting_that_fails_in_any_way_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("comparing strings with non-ASCII characters is not supported")

    monkeypatch.setattr(meeting, "listen", fail)
    with pytest.raises(LaunchError, match="could not meet: TypeError"):
        meeting.Meeting(StepAllocation(num_nodes=2), b"key").nodes()


def test_idle_strangers_do_not_extend_the_wait() -> None:
    listener = meeting.listen(ports())
    strangers = idle_strangers(listener)
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
        meeting.gather(listener, b"key", 2, timeout=0.4)
    ended.set()
    more.join()
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize(
    "text", [b"", pack(Hello(0, 1, "")), pack(Hello(2, 1, "")), pack(Hello(1, 0, "")), pack(Leave()),
             pack(Hello(True, 1, "")), b"[" * 4000]
)  # fmt: skip
def test_a_launcher_that_says_nonsense_of_itself_is_not_taken(text: bytes) -> None:
    assert meeting.parse_hello(pack(Hello(1, 1, "")), 2) == Hello(1, 1, "")
    assert meeting.parse_hello(text, 2) is None


def test_launchers_without_a_secret_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every user of the cluster knows (job, attempt, step) is no key."""
    for name in (node.KEY_VARIABLE, "POLLUX_GATEWAY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match="need a secret to know each other by"):
        node.launch_key(StepAllocation(num_nodes=2), None)
    assert node.launch_key(StepAllocation(), None), "one node talks to nobody"
    told = CompanionFile(Path("file"), "127.0.0.1", 1, "/", (), "the file's")
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
