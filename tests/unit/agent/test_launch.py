"""The launcher: what it reads from Slurm, how workers start and end, how nodes hear of each other."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pollux import launch, link, supervise, wake
from pollux.allocation import (
    Allocation,
    expand_indices,
    fewest_cpus,
    first_host,
    in_batch_script,
    machine_gpus,
    node_address,
    read_allocation,
    visible_gpus,
    without_stale,
)
from pollux.errors import LaunchError, RankLost
from pollux.link import Link
from pollux.supervise import WATCHED, Supervisor, Verdict
from pollux.workers import Notes, Worker, adopt_orphans, start_worker

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

# -- what Slurm says ----------------------------------------------

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_RESTART_COUNT": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n4",
    "CUDA_VISIBLE_DEVICES": "0,1,2",
    # Stale, of the submission:
    "SLURM_NTASKS": "8",
    "SLURM_GPUS": "16",
    "SLURM_NNODES": "4",
}


def test_the_allocation_is_what_slurm_wrote_for_this_start() -> None:
    found = read_allocation(STEP)
    assert (found.node_rank, found.num_nodes, found.workers) == (1, 2, 3)
    assert (found.first_node, found.attempt, found.gpu_ids) == ("n3", 3, ("0", "1", "2"))
    assert read_allocation(STEP, workers=1).workers == 1


def test_ports_are_derived_alike_and_differ_between_attempts() -> None:
    one, other = read_allocation(STEP), read_allocation(STEP | {"SLURM_NODEID": "0"})
    assert one.link_ports(16) == other.link_ports(16)
    assert len(set(one.link_ports(16))) == 16
    assert all(1024 < port < 32768 for port in one.link_ports(16))
    assert one.link_ports(4) != read_allocation(STEP | {"SLURM_RESTART_COUNT": "4"}).link_ports(4)


@pytest.mark.parametrize(
    "change",
    [{"SLURM_LOCALID": "1"}, {"SLURM_STEP_NUM_TASKS": "8"}, {"SLURM_NODEID": "x"}, {"SLURM_JOB_ID": ""}],
)
def test_a_step_that_cannot_be_ours_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(LaunchError, match=r"expected"):
        read_allocation(STEP | change)


def test_stale_sizes_do_not_reach_srun() -> None:
    cleaned = without_stale(
        STEP | {"SLURM_CPUS_PER_TASK": "2", "RANK": "1", "PATH": "/bin", "SLURM_CONF": "/c"}
    )
    assert not {"SLURM_NTASKS", "SLURM_GPUS", "SLURM_NNODES", "SLURM_CPUS_PER_TASK", "RANK"} & set(cleaned)
    assert {"PATH", "SLURM_CONF", "SLURM_JOB_ID"} <= set(cleaned)


def test_batch_script_and_task_are_told_apart() -> None:
    assert in_batch_script({"SLURM_JOB_ID": "7"})
    assert not in_batch_script(STEP)
    assert not in_batch_script({})


@pytest.mark.parametrize(
    ("env", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_STEP_GPUS": "6,7"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, ()),
        ({"SLURM_STEP_GPUS": "4-6"}, ("0", "1", "2")),
        ({"SLURM_JOB_GPUS": "0,2"}, ("0", "1")),
        ({"SLURM_GPUS_ON_NODE": "2"}, ("0", "1")),
        ({}, ()),
    ],
)
def test_gpus_of_this_node(env: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert visible_gpus(env) == gpus


def test_outside_of_slurm_the_machines_gpus_are_counted(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert machine_gpus(tmp_path) == ("0", "1")


def test_a_meeting_that_fails_in_any_way_starts_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("comparing strings with non-ASCII characters is not supported")

    monkeypatch.setattr(launch, "gather", fail)
    monkeypatch.setattr(launch, "listen", fail)
    with pytest.raises(LaunchError, match="could not meet: TypeError"):
        launch._Meeting(Allocation(num_nodes=2)).outcome()


def test_slurm_lists() -> None:
    assert expand_indices("0-2,5") == [0, 1, 2, 5]
    with pytest.raises(LaunchError, match="GPU indices"):
        expand_indices("a-b")
    assert first_host("gpu[03-05,9],login") == "gpu03"
    assert first_host("n1,n2") == "n1"
    assert first_host("rack[1-2]node[4-5]") == "rack1node4"
    assert first_host("") == ""
    assert fewest_cpus("8(x2),4") == 4
    assert fewest_cpus("16") == 16
    assert fewest_cpus("") == 0


def test_the_node_address_comes_from_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text('#!/bin/sh\necho "NodeName=$5 Arch=x NodeAddr=10.1.2.3 NodeHostName=x"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert node_address("n1") == "10.1.2.3"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert node_address("n1") == "n1"


def test_from_a_batch_script_srun_gets_the_sizes_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    started: list[Any] = []

    def execvpe(_file: str, command: list[str], env: dict[str, str]) -> None:
        started.append((command, env))
        raise FileNotFoundError("no srun here")

    monkeypatch.setattr(os, "execvpe", execvpe)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_JOB_CPUS_PER_NODE": "8(x2),6",
        "SLURM_NTASKS": "1",
        "SLURM_GPUS_PER_NODE": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match="srun cannot be started"):
        launch.run(launch._parser().parse_args(["run", str(script), "--epochs", "3"]))
    ((command, env),) = started
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=6"} <= set(command)
    assert command[-3:] == [str(script), "--epochs", "3"]
    assert "SLURM_NTASKS" not in env
    assert "SLURM_GPUS_PER_NODE" not in env


# -- workers --------------------------------------------------------


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Block what the launcher blocks, and give the test process its own mask back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    yield
    while signal.sigtimedwait(WATCHED, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def in_child(body: Callable[[], int]) -> tuple[int, str]:
    """Run `body` in a forked process: (exit status, what it and its children printed to standard error)."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(write, 1)
        os.dup2(write, 2)
        os.close(read)
        os.close(write)
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        code = 99
        try:
            code = body()
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 98
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), text


def run_workers(*bodies: Callable[[], int], node_link: Link | None = None, first: int = 0) -> Verdict:
    """Fork one worker per body and see them through, as the launcher does."""
    notes = Notes(len(bodies))
    unblock = WATCHED - {wake.WAKE_SIGNAL}
    workers = [
        start_worker(first + number, number, {"RANK": str(first + number)}, body, notes, unblock=unblock)
        for number, body in enumerate(bodies)
    ]
    return Supervisor(workers, notes, where="here", link=node_link).wait()


def succeed() -> int:
    return 0


def linger() -> int:
    time.sleep(60)
    return 0


def hold_on() -> int:
    """Ignore TERM, as a worker stuck in a kernel does."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return linger()


def killed() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


def fail() -> int:
    raise ValueError("on purpose")


@pytest.fixture(autouse=True)
def _short_graces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "SIBLING_GRACE_S", 0.1)
    monkeypatch.setattr(supervise, "TERM_GRACE_S", 0.3)


def test_all_succeed() -> None:
    assert in_child(lambda: run_workers(succeed, succeed).status)[0] == 0


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (fail, 1, "ValueError: on purpose"),
        (lambda: sys.exit(7), 7, "sys.exit(7)"),
        (lambda: sys.exit("in words"), 1, "in words"),
        (killed, 137, "SIGKILL (out of memory"),
        (lambda: os._exit(5), 5, "exited with status 5"),
    ],
)
def test_when_one_fails_the_others_end_and_the_cause_is_told(
    body: Callable[[], int], status: int, why: str
) -> None:
    def launcher() -> int:
        verdict = run_workers(linger, body, hold_on)
        assert verdict.failure is not None
        print(supervise.describe(verdict.failure), file=sys.stderr)
        return verdict.status

    code, text = in_child(launcher)
    assert code == status, text
    assert "rank 1 (pid" in text
    assert why in text


def test_of_two_failures_the_earlier_one_is_the_cause() -> None:
    def later() -> int:
        time.sleep(0.05)
        raise RuntimeError("connection closed by peer")

    def slow_to_exit() -> int:
        import atexit

        atexit.register(time.sleep, 0.1)
        return fail()

    def launcher() -> int:
        verdict = run_workers(later, slow_to_exit)
        assert verdict.failure is not None
        return 10 + verdict.failure.rank

    assert in_child(launcher)[0] == 11


@pytest.mark.parametrize(("number", "first"), [(signal.SIGKILL, 1), (signal.SIGABRT, 0)])
def test_a_killed_rank_is_the_cause_though_its_peers_raised_before_it_was_reaped(
    number: signal.Signals, first: int
) -> None:
    notes = Notes(2)
    notes.write(0, "RuntimeError: Connection closed by peer")
    dead = [Worker(0, 0, 11, 1, time.time()), Worker(1, 1, 12, 128 + number, time.time() + 0.1)]
    failure = Supervisor(dead, notes, where="here", link=None)._first_failure()
    assert failure is not None
    assert failure.rank == first


def test_a_trace_begins_in_the_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def deep():\n    raise ValueError('on purpose')\ndeep()\n")
    options = launch._parser().parse_args(["run", str(script)])
    _, text = in_child(lambda: run_workers(lambda: launch._run_script(options)).status)
    assert "workers.py" not in text
    assert "runpy" not in text
    assert f'File "{script}", line 3' in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_ends_all(number: signal.Signals) -> None:
    def launcher() -> int:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
        return run_workers(linger, hold_on).status

    assert in_child(launcher)[0] == 128 + number


def test_usr1_is_passed_on_and_ends_nobody() -> None:
    def take_it() -> int:
        signal.sigwait({signal.SIGUSR1})
        return 0

    def launcher() -> int:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        return run_workers(take_it, take_it).status

    assert in_child(launcher)[0] == 0


def test_what_a_worker_leaves_behind_is_ended() -> None:
    def leave_orphans() -> int:
        # Each in a session of its own, holding the output open as a data-loading process would.
        subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"], start_new_session=True)
        return 3

    def launcher() -> int:
        adopt_orphans()
        return run_workers(leave_orphans).status

    # in_child reads the output to its end, so it returns only when no descendant holds it.
    before = time.monotonic()
    assert in_child(launcher)[0] == 3
    assert time.monotonic() - before < 50


def test_workers_die_with_a_killed_launcher() -> None:
    def launcher() -> int:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return run_workers(linger, hold_on).status

    before = time.monotonic()
    assert in_child(launcher)[0] == -signal.SIGKILL
    assert time.monotonic() - before < 50


# -- nodes ----------------------------------------------------------


def ports() -> list[int]:
    return [link.free_port() for _ in range(4)]


def connect(
    num_nodes: int, workers: list[int], candidates: list[int], key: bytes = b"key"
) -> dict[int, Link]:
    links: dict[int, Link] = {}

    def meet(node: int) -> None:
        if node == 0:
            links[0] = link.gather(link.listen(candidates), key, workers[0], num_nodes, timeout=80)
        else:
            links[node] = link.join("127.0.0.1", candidates, key, node, workers[node], timeout=80)

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
    listener = link.listen(candidates)

    def intrude() -> None:
        with pytest.raises(RankLost, match="is not this job's launcher"):
            link.join("127.0.0.1", candidates, b"other key", 1, 1, timeout=0.5)

    intruder = threading.Thread(target=intrude)
    intruder.start()
    with pytest.raises(RankLost, match=r"1 of 2 nodes did not join.*number\(s\) 1"):
        link.gather(listener, b"key", 1, 2, timeout=0.7)
    intruder.join()


def test_a_hub_that_never_comes_is_told() -> None:
    with pytest.raises(RankLost, match=r"was not found at 127\.0\.0\.1"):
        link.join("127.0.0.1", ports(), b"key", 1, 1, timeout=0.1)


def test_no_free_port_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="none of the ports"):
            link.listen([taken.getsockname()[1]])


def on_nodes(*bodies: Callable[[], int]) -> list[tuple[int, str]]:
    """One launcher per body, each in its own process with one worker: (exit status, output) of each."""
    candidates = ports()
    results: dict[int, tuple[int, str]] = {}

    def node(number: int, body: Callable[[], int]) -> None:
        def launcher() -> int:
            if number == 0:
                mine = link.gather(link.listen(candidates), b"key", 1, len(bodies), timeout=80)
            else:
                mine = link.join("127.0.0.1", candidates, b"key", number, 1, timeout=80)
            mine.signal_arrivals()

            def worker() -> int:
                mine.close()
                return body()

            verdict = run_workers(worker, node_link=mine, first=number)
            if verdict.failure is not None:
                print(supervise.describe(verdict.failure), file=sys.stderr)
            return verdict.status

        results[number] = in_child(launcher)

    threads = [threading.Thread(target=node, args=item) for item in enumerate(bodies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(len(bodies))]


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
    message = {"type": "verdict", "failure": failure, "restart": None}
    node_0.sendall(json.dumps(message).encode() + b"\n")
    node_0.close()
    mine = link.Link(1, [link.Channel(line, 0)], [1, 1], "127.0.0.1", 1)
    assert Supervisor([], Notes(1), where="here", link=mine).wait().status == 7


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


# -- the command ------------------------------------------------------


LAUNCHER = [sys.executable, "-m", "pollux.launch"]


def command(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    return subprocess.run(
        [*LAUNCHER, *arguments],
        capture_output=True,
        text=True,
        env=plain | env,
        check=False,
        timeout=100,
    )


def test_help_and_bad_input_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    shown = command("run", "--help", PYTHONPATH=str(tmp_path))
    assert shown.returncode == 0
    assert "MASTER_ADDR" in shown.stdout
    missing = command("run", "nowhere.py", PYTHONPATH=str(tmp_path))
    assert missing.returncode == 2
    assert "no such script: nowhere.py" in missing.stderr


SCRIPT = """
import os, sys, torch, torch.distributed as dist
assert __name__ == "__main__"
dist.init_process_group("gloo")
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} total {total.item():.0f} args {sys.argv[1:]} child-of-one {os.environ['LOCAL_RANK']}")
dist.destroy_process_group()
"""


def test_end_to_end_under_a_storm_of_usr1(tmp_path: Path) -> None:
    """From the first instant: the shell's trap, as the batch step has it, then the launcher's mask."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    process = subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            'trap "" USR1; echo; exec "$@"',
            "sh",
            *LAUNCHER,
            "run",
            "--nproc",
            "2",
            str(script),
            "--lr",
            "1",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=env | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    process.stdout.readline()  # the trap is set
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.002)
    text = process.stdout.read()
    assert process.returncode == 0, text
    assert "rank 0 total 3 args ['--lr', '1']" in text
    assert "rank 1 total 3" in text


def test_wake_calls_back_off_the_main_thread() -> None:
    def body() -> int:
        calls: list[int | None] = []
        called = threading.Event()

        def callback() -> None:
            calls.append(threading.current_thread().ident)
            called.set()

        stop = wake.watch(callback)
        assert wake.is_blocked()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert called.wait(20)
        stop()
        os.kill(os.getpid(), signal.SIGUSR1)  # ends nobody afterwards either
        return 0 if calls[0] != threading.main_thread().ident else 1

    code, text = in_child(body)
    assert code == 0, text


def test_an_allocation_outside_of_slurm_is_one_worker() -> None:
    assert Allocation().workers == 1
