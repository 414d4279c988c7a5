"""One attempt of a wrapped job: a real child, with a gateway of the test."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from pollux.errors import LaunchError
from pollux.scheduler import publisher
from pollux.slurm_job.access import GatewayAccess, Grant
from pollux.slurm_job.attempt import AgentSettings
from pollux.slurm_job.environment import Times
from pollux.wrap import process
from pollux.wrap import wrapper as module
from pollux.wrap.sizes import Sizes, of_training
from pollux.wrap.trainers import PATTERNS
from pollux.wrap.wrapper import Contract, Wrapper

NO_ARRAY = {"SLURM_JOB_ID": "7"}
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
    monkeypatch.setattr(module, "why_of_this_attempt", lambda *_words: "")
    monkeypatch.setattr(module, "show_job", lambda job: f"JobId={job} JobState=RUNNING Restarts=0 Requeue=1")
    monkeypatch.setattr(module, "time_limit_at", lambda *_words, **_more: None)
    kept = [(number, signal.getsignal(number)) for number in module.PASSED_ON]

    def make(code, *, gpus=1, grace=60.0, drain_wait=0.5, variables=NO_ARRAY, attempt_number=0, **more):
        attempt = SimpleNamespace(
            settings=AgentSettings(drain_wait=drain_wait), times=Times(launched_at=time.time())
        )
        command = [sys.executable, "-c", code] if isinstance(code, str) else code
        contract = Contract(command, str(tmp_path / "step-*"), grace=grace, **more)
        environ = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
        it = Wrapper(contract, attempt, SimpleNamespace(job_id=7, attempt=attempt_number), tmp_path, environ)
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
    immovable = it.report()["immovable"]
    assert it.run() == status
    report = it.report()
    assert (report["progress"], report["checkpointed"], report["resize"]) == (8, False, "requeue")
    assert immovable == "its trainer has saved no checkpoint yet"
    assert report["immovable"] == "its trainer has ended", "an evaluation may follow, which nobody sees"
    assert report["next_save_s"] == module.UNKNOWN_SAVE_S
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


@pytest.mark.parametrize(("told", "status"), [(False, 4), (False, 0), (True, 4)])
def test_a_start_that_fails_at_a_new_size_bars_it_unless_the_end_was_asked_for(made, tmp_path, told, status):
    """Whatever its status: behind a pipe into `tee`, that is 0."""
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 0)
    Sizes({(1, 1, 48): 0.5}).write(file)
    code = "import time\nprint('cannot resume \\x07 here', flush=True)\ntime.sleep(%d)\nraise SystemExit(%d)"
    it = made(code % (60 if told else 0, status), gpus=2)
    if told:
        later(lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: it.steps.last_line)
    assert it.run() == (128 + signal.SIGTERM if told else status or 1)
    assert bool(it.requeued) is not told
    barred = Sizes.read(file).barred()
    assert barred == (
        "" if told else f"its trainer did not start on 2 GPUs (status {status}: cannot resume ? here)"
    )
    assert it.report()["barred"] == (barred or None)


def test_a_trainer_whose_lines_name_no_step_is_told_so_once(made, monkeypatch, caplog):
    monkeypatch.setattr(module, "UNSEEN_S", 0.1)
    caplog.set_level(logging.WARNING, "pollux")
    it = made("import time\nprint('x' * 10_000_000, flush=True)\ntime.sleep(1.5)\nprint('loss 3')", gpus=2)
    said = []
    later(lambda: said.append(it.report()["immovable"]), lambda: "cannot be moved" in caplog.text)
    assert it.run() == 0
    assert [r.getMessage() for r in caplog.records if "by --step" in r.getMessage()] != []
    assert sum("keeps this job on its 2 GPUs" in r.getMessage() for r in caplog.records) == 1
    assert f"cannot be moved: {said[0]}" in caplog.text, "what polluxctl explain says"
    report = it.report()
    assert (report["params"], report["times"].get("first_step_at"), report["throughput"]) == (None, None, 0.0)


def test_a_process_that_the_trainer_leaves_behind_keeps_nobody(made):
    left = "import subprocess, sys\nprint(subprocess.Popen(['sleep', '300']).pid, flush=True)\n"
    it = made(left)
    try:
        assert it.run() == 0
    finally:
        os.kill(int(it.steps.last_line), signal.SIGKILL)


def test_the_batch_size_follows_the_users_schedule(made, tmp_path):
    it = made(STEPS, batches=((0.0, 8), (4.0, 32)))
    assert (it.report()["limits"]["initial"], it.report()["target"]) == (8, None)
    assert it.run() == 0
    limits = it.report()["limits"]
    assert (limits["initial"], limits["maximum"], limits["local_max"]) == (32, 32, 32)
    Sizes(step=4.0).write(it.file)
    again = {"code": STEPS, "batches": ((0.0, 8), (4.0, 32))}
    assert made(**again).report()["batch_size"] == 8, "without a checkpoint it begins again"
    (tmp_path / "step-4").touch()
    assert made(**again).report()["batch_size"] == 32, "at its next start, too"


def test_a_trainer_that_counts_from_1_after_its_checkpoint_keeps_its_place_in_the_schedule(made, tmp_path):
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 0)
    (tmp_path / "step-1000").touch()
    line = next(pattern.pattern for pattern in PATTERNS if pattern.search("step 1"))
    Sizes(step=1000.0, line=line).write(file)
    it = made(
        STEPS + f"    if n == 4: open({str(tmp_path / 'step-2')!r}, 'w').close()\ntime.sleep(3)\n",
        batches=((0.0, 8), (1005.0, 32)),
        steps=8.0,
    )
    assert it.run() == 0
    report = it.report()
    assert (report["progress"], report["batch_size"]) == (1007, 32), "the step of its first line is not known"
    assert 1001 <= Sizes.read(file).step <= 1007, "what it would go on from"


@pytest.mark.parametrize(("here", "memory"), [(True, ""), (True, "memory"), (False, "")])
def test_a_trainer_whose_checkpoints_stay_on_their_node_is_not_moved(
    made, tmp_path, here, memory, caplog, monkeypatch
):
    """Each move would begin its training again."""
    monkeypatch.setattr(module, "why_of_this_attempt", lambda folder, _: memory and f"{folder}: {memory}")
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 0)
    Sizes({(1, 1, 48): 0.5}, every=10.0, step=20.0).write(file)
    if here:
        (tmp_path / "step-20").touch()
    it = made(STEPS)
    why = it.report()["immovable"]
    it.run()
    if here and not memory:
        assert (why, module.LOST in caplog.text) == (None, False)
    else:
        assert why.startswith(f"{module.LOST}{tmp_path}")
        assert f"cannot be moved: {why}. Have it save in" in caplog.text


def test_a_checkpoint_is_due_by_the_rhythm_in_steps_and_a_late_one_at_once(made, monkeypatch):
    it = made(STEPS)
    monkeypatch.setattr(module.Steps, "seconds", 0.5)
    monkeypatch.setattr(module.Checkpoints, "last_step", 20.0)
    monkeypatch.setattr(module.Checkpoints, "every", 30.0)
    for number, due in ((40.0, 5.0), (70.0, 0.0)):
        monkeypatch.setattr(module.Steps, "number", number)
        assert it.report()["next_save_s"] == due


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
    starts = []

    def started(*words):
        starts.append(len(it.publisher.acknowledged))
        return process.TrainerProcess(*words)

    monkeypatch.setattr(module, "TrainerProcess", started)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    begun = time.monotonic()
    assert it.run() == 7
    assert starts == [0, 1], "again once nobody has ended the job"
    assert time.monotonic() - begun >= 3.0


def test_a_trainer_that_ended_for_an_order_that_is_taken_back_is_started_soon(made, tmp_path):
    code = (
        "import pathlib, signal, sys, time\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if (folder / 'step-1').exists(): sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, lambda *_: ((folder / 'step-1').touch(), sys.exit(0)))\n"
        "print('step 1', flush=True)\n"
        "time.sleep(60)\n"
    )
    it = made(code, signal=signal.SIGTERM, drain_wait=3600.0)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    later(lambda: it.publisher.order(0), lambda: it.publisher.acknowledged)
    assert it.run() == 7, "its second start"


SAVES_ON_TERM = """
import pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
worker = subprocess.Popen(["sleep", "60"])  # it loads data, and is needed to save
def save(*_):
    time.sleep(2)
    print("saves", flush=True)
    if worker.poll() is None:
        (folder / "step-1").touch()
    worker.kill()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("step 1", flush=True)
time.sleep(60)
"""


def test_ranks_that_a_shell_has_started_get_the_signal_and_their_time_to_save(made, tmp_path):
    (tmp_path / "train.py").write_text(SAVES_ON_TERM)
    # No exec: each shell waits, and would end at the signal.
    (tmp_path / "launch.sh").write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/train.py {tmp_path}; true\n")
    (tmp_path / "launch.sh").chmod(0o755)
    it = made(["bash", "-c", f"{tmp_path}/launch.sh 2>&1 | tee {tmp_path}/log; true"], signal=signal.SIGTERM)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    # Slurm ends the job once it has its answer.
    later(lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: it.publisher.acknowledged)
    assert it.run() == 128 + signal.SIGTERM, "saved, which is no end of the training"
    assert (tmp_path / "step-1").exists()
    assert len(it.publisher.acknowledged) == 1
    assert not Sizes.read(it.file).deaf


def test_what_outlives_its_attempt_starts_no_trainer(made, tmp_path, monkeypatch):
    """Slurm may lose processes of an attempt; the next one trains already."""
    (tmp_path / "train.py").write_text(SAVES_ON_TERM)
    it = made([sys.executable, f"{tmp_path}/train.py", str(tmp_path)], signal=signal.SIGTERM, drain_wait=0.1)
    shown = iter([None, "JobId=7 JobState=RUNNING Restarts=1 Requeue=1"])
    monkeypatch.setattr(module, "show_job", lambda _job: next(shown))
    monkeypatch.setattr(module, "REPEAT_S", 0.1)
    starts = []

    def started(*words):
        starts.append(words)
        return process.TrainerProcess(*words)

    monkeypatch.setattr(module, "TrainerProcess", started)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    assert it.run() == 128 + signal.SIGTERM
    assert len(starts) == 1


def test_a_trainer_that_saves_nothing_at_the_signal_is_not_asked_in_later_attempts(made):
    it = made(STEPS, signal=signal.SIGTERM, drain_wait=0.1)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    later(lambda: os.kill(os.getpid(), signal.SIGTERM), lambda: it.publisher.acknowledged)
    it.run()
    assert made(STEPS, signal=signal.SIGTERM).report()["immovable"], "its own checkpoints are waited for"


def test_a_trainer_that_made_all_its_steps_has_ended_whatever_it_was_asked(made):
    code = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: None)\n" + STEPS
    it = made(code, signal=signal.SIGTERM, steps=8.0)
    later(lambda: it.publisher.order(3), lambda: it.steps.first_at)
    assert it.run() == 0
    assert it.publisher.acknowledged == []
    assert Sizes.read(it.file).ended == 0


@pytest.mark.parametrize("ended", [-1, 0])
def test_a_trainer_that_fails_in_its_first_steps_at_a_new_size_goes_back(made, tmp_path, ended):
    """It has no memory there for its optimizer, say. One that ended before may have nothing left to do."""
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 1)
    Sizes({(1, 2, 48): 0.5}, ended=ended).write(file)
    it = made("print('step 1', flush=True)\nraise SystemExit('out of memory')", attempt_number=1)
    assert it.run() == 1
    assert bool(it.requeued) is (ended < 0)
    assert it.report()["least_gpus"] == (2 if ended < 0 else 1)


def test_where_a_failed_size_cannot_be_kept_the_job_ends(made, tmp_path, monkeypatch):
    """A full disk: the next attempt would try the size again, and so on."""
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 0)
    Sizes({(1, 1, 48): 0.5}).write(file)
    it = made("raise SystemExit(4)", gpus=2)

    def full(_sizes, _file):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Sizes, "write", full)
    assert it.run() == 4
    assert it.requeued == []


def test_a_trainer_that_hangs_at_a_new_size_goes_back(made, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HANGS_S", 0.5)
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 0)
    Sizes({(1, 1, 48): 0.5}).write(file)
    it = made("import time\ntime.sleep(20)", gpus=2)
    it.run()
    assert it.requeued == [("scontrol", "requeue", "7")]
    assert it.report()["barred"] == "its trainer did not start on 2 GPUs (no step in 0 s)"


def test_the_task_of_an_array_is_requeued_alone(made, tmp_path):
    file, _ = of_training(tmp_path, str(tmp_path / "step-*"), 0)
    Sizes({(1, 1, 48): 0.5}).write(file)
    last = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    it = made("raise SystemExit(4)", gpus=2, variables=last)
    it.run()
    assert it.requeued == [("scontrol", "requeue", "7_3")]


@pytest.mark.parametrize("extended", [False, True])
def test_near_its_time_limit_a_job_that_continues_saves_and_is_requeued(
    made, tmp_path, monkeypatch, extended
):
    ends = iter([time.time() + 1.0, time.time() + (3600.0 if extended else 1.0)])
    monkeypatch.setattr(module, "time_limit_at", lambda *_words, **_more: next(ends))
    code = STEPS.replace("9", "80") + f"    if n == 20: open({str(tmp_path / 'step-1')!r}, 'w').close()\n"
    it = made(code, variables={"SLURM_JOB_ID": "7", "POLLUX_CONTINUE": "yes"}, drain_wait=0.1)
    assert it.run() == 0
    assert it.requeued == ([] if extended else [("scontrol", "requeue", "7")])


@pytest.mark.parametrize(("left", "grace", "asked"), [(119.0, 60.0, False), (650.0, 600.0, True)])
def test_a_trainer_has_its_whole_grace_before_the_limit_and_two_minutes_are_trained(
    made, monkeypatch, caplog, left, grace, asked
):
    ends_at = time.time() + left
    monkeypatch.setattr(module, "time_limit_at", lambda *_words, **_more: ends_at)
    it = made(STEPS, signal=signal.SIGTERM, grace=grace)
    assert it.run() == 0
    assert ("saved nothing within" in caplog.text) is asked


def test_a_second_wrapper_of_one_attempt_is_refused(tmp_path):
    with process.alone(tmp_path / "job", 0):
        with pytest.raises(LaunchError, match="one after another"), process.alone(tmp_path / "job", 0):
            pass
        with process.alone(tmp_path / "job", 1):
            pass
    with process.alone(tmp_path / "job", 0):
        pass


def test_without_a_gateway_the_trainer_trains_to_its_end(made, monkeypatch, caplog):
    access = GatewayAccess(("http://127.0.0.1:9",), "", 7, 0, Grant("J.7.0." + "a" * 43, gpu_type=""))
    monkeypatch.setattr(module, "Publisher", lambda _access, *rest: publisher.Publisher(access, *rest))
    it = made(STEPS)
    assert it.run() == 0
    assert it.report()["progress"] == 8
    assert "cannot be reached" in caplog.text


def test_an_agent_in_the_trainer_reports_nothing_beside_the_wrapper(made):
    it = made(
        "import os\nprint(os.environ.get('POLLUX_SUBMITTED'), os.environ['POLLUX_GPUS'])",
        variables={"SLURM_JOB_ID": "7", "POLLUX_SUBMITTED": "1"},
    )
    assert it.run() == 0
    assert it.steps.last_line == "None 1"
