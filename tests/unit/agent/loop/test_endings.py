"""Ends of a training before its time: signals, and the job's time limit.

Each test trains on forked ranks and asks them to end; a second start goes on from the checkpoint.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from pollux import attach
from pollux.errors import STOPPED_STATUS, CheckpointError, PolluxAgentError
from pollux.loop import coordinator, endings
from pollux.ranks.control import ControlExchange, Decision
from pollux.slurm_job.environment import time_limit_at
from tests.unit.agent.answering import connected

EXAMPLES = 203


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(data())


def data() -> TensorDataset:
    x = torch.randn(EXAMPLES, 4, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(1, keepdim=True), torch.arange(EXAMPLES))


Ask = Callable[[Any, int], None]


def train(
    directory: Path, kind: str, passes: int, ask: Ask = lambda *_: None, **options: Any
) -> dict[str, Any]:
    """Train to the end, or until `ask(job, step)` has had the ranks end."""
    torch.manual_seed(0)
    network = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    job = attach(network, optimizer, checkpoint_dir=directory)
    source = Stream() if kind == "stream" else data()
    loader = job.loader(source, 12, **options, **({"length": 100} if kind == "stream" else {}))
    used: list[tuple[int, int]] = []
    code: Any = None
    begun = job.progress.optimizer_steps
    try:
        for _ in job.epochs(passes):
            for x, y, ids in loader:
                place = job.stepper.training.data
                if place.local_samples:
                    used += [(place.pass_index, int(i)) for i in ids]
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
                ask(job, job.progress.optimizer_steps)
    except SystemExit as ended:
        code = ended.code
    return {
        "code": code,
        "begun": begun,
        "steps": job.progress.optimizer_steps,
        "used": used,
        "weights": network.weight.tolist(),
        "handler": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }


def by_signal(number: signal.Signals) -> Ask:
    def ask(job: Any, step: int) -> None:
        if step == 5 and job.is_main:
            os.kill(os.getpid(), number)

    return ask


def by_time_limit(job: Any, step: int) -> None:
    if step == 5 and job.is_main:
        deadline = time.monotonic() + 60
        while not job.coordinator.endings.wanted:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def assert_each_once(*ranks: dict[str, Any]) -> None:
    counts = Counter(sample for rank in ranks for sample in rank["used"])
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * EXAMPLES


@pytest.mark.parametrize(("kind", "number"), [("map", signal.SIGTERM), ("stream", signal.SIGUSR1)])
def test_a_signal_ends_all_ranks_after_a_checkpoint_of_the_step_in_hand(
    kind: str, number: signal.Signals, tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    first = ranks(2, train, tmp_path, kind, 3, by_signal(number))
    assert {rank["code"] for rank in first} == {STOPPED_STATUS}
    (steps,) = {rank["steps"] for rank in first}
    assert 5 <= steps <= 8
    second = ranks(3, train, tmp_path, kind, 3)
    assert {(rank["code"], rank["begun"], rank["handler"]) for rank in second} == {(None, steps, True)}
    assert_each_once(*first, *second)


def test_the_approach_of_the_time_limit_ends_the_training_and_slurm_the_job(
    tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = tmp_path / "calls"
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\necho "JobId=7 EndTime=2999-01-01T00:00:00 PreemptTime=None"\n'
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("POLLUX_CONTINUE", "yes")
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    monkeypatch.setattr(endings, "SLURM_WAIT", 0.1)
    monkeypatch.setattr(coordinator, "MARGIN", 1e12)
    first = ranks(2, train, tmp_path / "ck", "map", 3, by_time_limit)
    assert {rank["code"] for rank in first} == {STOPPED_STATUS}
    assert "requeue 5_2" in calls.read_text().splitlines(), "7 may stand for the whole array"
    assert calls.read_text().count("requeue") == 1, "rank 0 alone asks for it"
    monkeypatch.delenv("SLURM_JOB_ID")
    assert_each_once(*first, *ranks(2, train, tmp_path / "ck", "map", 3))


def test_a_job_that_slurm_preempts_waits_for_slurm_to_requeue_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "JobId=7 JobState=RUNNING PreemptTime={}"
    asked = endings.Endings(main=lambda: True, margin=lambda: 0.0, environ={"SLURM_JOB_ID": "7"})
    for told, waits in (("2026-11-22T09:15:38", True), ("None", False)):
        monkeypatch.setattr(endings, "show_job", lambda _, told=told: shown.format(told))
        assert asked.left_to_slurm(endings.Reason.TERM) is waits
        assert asked.left_to_slurm(endings.Reason.TIME_LIMIT)
    other = endings.Endings(main=lambda: False, margin=lambda: 0.0, environ={"SLURM_JOB_ID": "7"})
    assert not other.left_to_slurm(endings.Reason.TIME_LIMIT), "rank 0 asks Slurm"


def test_a_garbled_continue_is_refused_at_the_start_and_by_its_name() -> None:
    with pytest.raises(PolluxAgentError, match="POLLUX_CONTINUE to be yes or no, got 'maybe'"):
        endings.Endings(main=lambda: True, margin=lambda: 0.0, environ={"POLLUX_CONTINUE": "maybe"})


def test_the_time_limit_is_slurm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from pollux.slurm_job import environment

    monkeypatch.setattr(environment, "show_job", lambda _: "JobId=7 EndTime=Unknown Deadline=N/A")
    assert time_limit_at({}) is None
    assert time_limit_at({"SLURM_JOB_ID": "7"}) is None
    assert time_limit_at({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1795338957"}) == 1795338957.0
    shown = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(1795338957))
    monkeypatch.setattr(
        environment, "show_job", lambda _: f"JobId=7 StartTime=x EndTime={shown} Deadline=N/A"
    )
    assert time_limit_at({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "5"}, ask=True) == 1795338957.0


def test_more_time_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has raised the limit that the job began with."""
    limits = [time.time() + 5.0, time.time() + 1e6]
    monkeypatch.setattr(endings, "time_limit_at", lambda _, ask=False: limits[ask])
    asked = endings.Endings(main=lambda: True, margin=lambda: 10.0, environ={"SLURM_JOB_ID": "7"}, look=0.01)
    asked.begin()
    time.sleep(0.2)
    assert asked.wanted is endings.Reason.NONE
    limits[1] = limits[0]
    asked.close()
    asked.begin()
    deadline = time.monotonic() + 60
    while not asked.wanted:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert asked.wanted is endings.Reason.TIME_LIMIT
    asked.close()


SCRIPT = """
import subprocess, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.unit.agent.loop.test_endings import train

def ask(job, step):
    if step == 5:
        # As Slurm does: data-loading processes, too.
        subprocess.run(["sh", "-c", "trap '' TERM; kill -TERM 0"], check=True)

ended = train(Path(sys.argv[1]), "map", 50, ask, num_workers=2)
print(ended["code"], ended["begun"], ended["steps"], flush=True)
sys.exit(ended["code"])
"""


def test_data_loading_processes_outlive_a_signal_to_all_of_a_step(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[4])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=root), str(tmp_path)],
        env={**os.environ, "POLLUX_EXCHANGE_INTERVAL": "0", "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == STOPPED_STATUS, done.stderr[-2000:]
    code, begun, steps = map(int, done.stdout.split())
    assert (code, begun) == (STOPPED_STATUS, 0)
    assert 5 <= steps <= 8
    assert "SIGTERM: checkpoint of step" in done.stderr


def test_a_forked_process_and_a_script_s_own_handler_are_left_alone(tmp_path: Path) -> None:
    asked = endings.Endings(main=lambda: True, margin=lambda: 0.0, environ={})
    asked.begin()
    try:
        child = os.fork()
        if not child:
            os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
        assert os.waitpid(child, 0)[1] == 0
        with asked.off():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "a drained job ends at once"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.wanted is endings.Reason.USR1, "`sbatch --signal=USR1@120` saves"
    finally:
        asked.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def own(*_: Any) -> None: ...

    signal.signal(signal.SIGTERM, own)
    try:
        asked.begin()
        assert signal.getsignal(signal.SIGTERM) is own
        asked.close()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_where_a_step_takes_seconds_the_ranks_act_at_its_end() -> None:
    exchange = ControlExchange(None, 0)
    answers = iter([Decision(next_exchange=0), Decision(next_exchange=0, end=1), Decision(next_exchange=1)])
    taken = [exchange.step(lambda: next(answers)) for _ in range(3)]
    assert taken == [None, Decision(next_exchange=0), Decision(next_exchange=0, end=1)]


def test_a_drain_is_refused_where_no_checkpoint_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    found: dict[str, Any] = {}

    def ask(job: Any, step: int) -> None:
        if step == 5:

            def full(*_: Any, **__: Any) -> None:
                raise CheckpointError("no space left on device")

            found["line"] = connected(job)
            job.coordinator.checkpointer.writer.store.save = full
            job.coordinator.drains.order(31)
        found["refused"] = job.report().get("resize_refused")

    ended = train(tmp_path, "map", 1, ask)
    assert ended["code"] is None, "training goes on"
    assert found["refused"] == {"id": 31, "why": "no space left on device"}
    assert not found["line"].heard, "nothing is to be acknowledged"


def test_loaders_of_a_script_are_data_loaders() -> None:
    """The place where torch forks them is known by its file."""
    file = sys.modules[DataLoader.__module__].__file__
    assert file is not None
    assert file.endswith(endings.LOADER)
