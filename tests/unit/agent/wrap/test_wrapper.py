"""One attempt of a wrapped job: a real child, with a gateway of the test."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pollux.slurm_job.attempt import AgentSettings
from pollux.slurm_job.environment import Times
from pollux.wrap import wrapper as module
from pollux.wrap.sizes import Sizes, file_in
from pollux.wrap.wrapper import Contract, Wrapper

STEPS = "import time\nfor n in range(1, 9):\n    print('step', n, flush=True)\n    time.sleep(0.05)\n"


class Publisher:
    """A gateway that accepts all; `order` gives an order as polluxd does."""

    def __init__(self, _access, collect, drain, _resize):
        self.collect, self.order = collect, drain
        self.acknowledged = []

    def start(self):
        pass

    wake = close = start

    def acknowledge(self, move, stamps):
        self.acknowledged.append((move, stamps))
        self.order(0)  # what was answered is no order any more
        return True


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Returns a function that makes a wrapper of Python code, on so many GPUs."""
    monkeypatch.setattr(module, "Publisher", Publisher)
    requeued = []

    def run(*words, **_more):
        requeued.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(module.slurm_commands, "run", run)
    monkeypatch.setattr(module.slurm_commands, "answer", lambda *_words: "")
    kept = [(number, signal.getsignal(number)) for number in module.PASSED_ON]

    def make(code, *, gpus=1, grace=60.0, drain_wait=0.5, **more):
        attempt = SimpleNamespace(
            settings=AgentSettings(drain_wait=drain_wait), times=Times(launched_at=time.time())
        )
        command = [sys.executable, "-c", code]
        contract = Contract(command, str(tmp_path / "step-*"), grace=grace, **more)
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
        it = Wrapper(contract, attempt, SimpleNamespace(job_id=7), tmp_path, environ)
        it.requeued = requeued
        return it

    yield make
    for number, before in kept:
        signal.signal(number, before)


def soon(what, seconds=20.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def later(do, when):
    """Do something in a thread once the wrapped trainer is so far."""
    thread = threading.Thread(target=lambda: (soon(when), do()), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("status", [0, 3])
def test_the_end_of_the_trainer_is_the_end_of_the_job(made, status):
    it = made(STEPS + f"raise SystemExit({status})")
    assert it.run() == status
    report = it.report()
    assert (report["progress"], report["checkpointed"], report["resize"]) == (8, False, "requeue")
    assert report["immovable"] == "its trainer has saved no checkpoint yet"
    assert report["next_save_s"] == module.UNKNOWN_SAVE_S
    assert 0 < report["restart_cost"] < 60
    assert it.requeued == []


def test_an_end_for_an_order_that_was_taken_back_is_no_end_of_the_training(made, tmp_path):
    code = (
        "import pathlib, signal, sys, time\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "if mark.exists(): sys.exit(5)\n"
        "signal.signal(signal.SIGTERM, lambda *_: (mark.touch(), time.sleep(1), sys.exit(0)))\n"
        "print('step 1', flush=True)\n"
        "time.sleep(60)\n"
    )
    it = made(code, signal=signal.SIGTERM)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    later(lambda: it.publisher.order(0), (tmp_path / "mark").exists)
    assert it.run() == 5, "the second start's own status"
    assert it.publisher.acknowledged == []


def test_a_checkpoint_after_the_order_is_acknowledged_with_its_own_step(made, tmp_path):
    code = (
        "import pathlib, time\n"
        "for n in range(1, 60):\n"
        "    print('step', n, flush=True)\n"
        "    time.sleep(0.1)\n"
        f"    if n == 10: pathlib.Path({str(tmp_path / 'step-10')!r}).write_text('x')\n"
    )
    it = made(code, drain_wait=0.1)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    assert it.run() == 0
    ((move, stamps),) = it.publisher.acknowledged
    assert move == 3
    assert 10 <= stamps["step"] < 25, "what it trains after the checkpoint is trained again"
    assert it.report()["immovable"] is None


@pytest.mark.parametrize("told", [False, True])
def test_a_start_that_fails_at_a_new_size_bars_it_unless_the_end_was_asked_for(made, tmp_path, told):
    file = file_in(tmp_path, str(tmp_path / "step-*"))
    Sizes({(1, 1, 48): 0.5}).write(file)
    code = (
        "import time\nprint('cannot resume \\x1b[2J here', flush=True)\ntime.sleep(%d)\nraise SystemExit(4)"
    )
    it = made(code % (60 if told else 0), gpus=2)
    if told:
        later(lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: it.steps.last_line)
    assert it.run() == (128 + signal.SIGTERM if told else 4)
    assert bool(it.requeued) is not told
    barred = Sizes.read(file).barred()
    assert barred == (
        "" if told else "its trainer did not start on 2 GPUs (status 4: cannot resume ?[2J here)"
    )
    assert it.report()["barred"] == (barred or None)


def test_a_trainer_whose_lines_name_no_step_is_told_so_once(made, monkeypatch, caplog):
    monkeypatch.setattr(module, "UNSEEN_S", 0.1)
    caplog.set_level(logging.WARNING, "pollux")
    it = made("import time\nprint('x' * 10_000_000, flush=True)\ntime.sleep(1.5)\nprint('loss 3')", gpus=2)
    assert it.run() == 0
    assert [r.getMessage() for r in caplog.records if "--step PATTERN" in r.getMessage()] != []
    assert sum("keeps this job on its 2 GPUs" in r.getMessage() for r in caplog.records) == 1
    report = it.report()
    assert (report["params"], report["times"].get("first_step_at"), report["throughput"]) == (None, None, 0.0)


def test_a_process_that_the_trainer_leaves_behind_keeps_nobody(made):
    left = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '300']).pid, flush=True)\n"
    it = made(left)
    try:
        assert it.run() == 0
    finally:
        os.kill(int(it.steps.last_line), signal.SIGKILL)


def test_the_batch_size_follows_the_users_schedule(made):
    it = made(STEPS, batches=((0.0, 8), (4.0, 32)))
    assert (it.report()["limits"]["initial"], it.report()["target"]) == (8, None)
    assert it.run() == 0
    limits = it.report()["limits"]
    assert (limits["initial"], limits["maximum"], limits["local_max"]) == (32, 32, 32)
    Sizes(step=4.0).write(it.file)
    assert made(STEPS, batches=((0.0, 8), (4.0, 32))).report()["batch_size"] == 32, "at its next start, too"


def test_a_trainer_that_saves_on_a_signal_is_waited_for_as_long_as_its_grace(made):
    it = made("import time\nprint('step 1', flush=True)\ntime.sleep(2)", signal=signal.SIGUSR1, grace=1.0)
    assert it.report()["next_save_s"] == 0.0
    assert it.report()["immovable"] is None, "it can be asked"
    it.signalled_at = time.monotonic()
    assert 0 < it.report()["next_save_s"] <= 1.0


def test_a_trainer_that_saved_and_ended_is_not_started_while_slurm_ends_the_job(made, tmp_path, monkeypatch):
    code = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if (folder / 'step-1').exists(): sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'step-1').touch(), sys.exit(0)))\n"
        "print('step 1', flush=True)\n"
        "time.sleep(60)\n"
    )
    it = made(code, signal=signal.SIGTERM, drain_wait=3.0)
    starts, popen = [], subprocess.Popen

    def started(*words, **more):
        starts.append(len(it.publisher.acknowledged))
        return popen(*words, **more)

    monkeypatch.setattr(module.subprocess, "Popen", started)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    begun = time.monotonic()
    assert it.run() == 7
    assert starts == [0, 1], "again once nobody has ended the job"
    assert time.monotonic() - begun >= 3.0


def test_a_trainer_that_ended_for_an_order_that_is_taken_back_is_started_soon(made, tmp_path, monkeypatch):
    code = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if (folder / 'step-1').exists(): sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'step-1').touch(), sys.exit(0)))\n"
        "print('step 1', flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(module, "ENDED_S", 0.1)
    it = made(code, signal=signal.SIGTERM, drain_wait=3600.0)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    later(lambda: it.publisher.order(0), lambda: it.publisher.acknowledged)
    assert it.run() == 7, "its second start"
