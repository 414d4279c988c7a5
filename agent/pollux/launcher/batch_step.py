"""Run the launchers of all nodes from the batch script, as one step of srun, and return how the training ended.

Slurm counts a step as failed in which the kernel has killed a process for memory, also where the ranks then started
again and trained to their end. This process therefore stays beside srun, and node 0's launcher leaves the training's
own exit status in the job's record of runs.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from pollux.errors import LaunchError
from pollux.launcher.log import say
from pollux.launcher.workers import die_with_parent
from pollux.slurm_job import runs
from pollux.slurm_job.environment import job_folder
from pollux.slurm_job.trainings import PROCESS

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2}
_NOT_FOUND = 127


def begin_run(
    words: Sequence[str], name: str | None, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return variables that name this run for its ranks. Raises LaunchError where it cannot be told apart."""
    begun, sentence = runs.begin_here(words, name, environ)
    if sentence:
        say(sentence)
    return begun


def end_run(status: int, environ: Mapping[str, str] = os.environ) -> None:
    """In node 0's launcher, and where srun has ended: record how the run has ended."""
    folder, process = job_folder(environ), environ.get(PROCESS, "")
    if folder is not None and process:
        runs.end(folder, process, status)


def step_status(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run srun to its end; return the training's exit status. Raises LaunchError where srun cannot be started."""
    status = _run(command, environ)
    if status == _NOT_FOUND:
        raise LaunchError(f"inside a Slurm job, but {command[0]} cannot be started")
    folder, process = job_folder(environ), environ.get(PROCESS, "")
    if folder is None or not process:
        return status
    own = runs.status_of(folder, process)
    if status and own == 0:
        say(
            f"the training has ended well. Slurm reports status {status} of its step, because a process of it was "
            "killed before (out of memory, for example) and started again"
        )
        return 0
    if own is None:
        runs.end(folder, process, status)
    return status


def _run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command as this process's child, as if this process were the command. Its status, as a shell gives it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    parent = os.getpid()
    child = os.fork()
    if not child:
        try:
            die_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.execvpe(command[0], list(command), dict(environ))
        finally:
            os._exit(_NOT_FOUND)
    while True:
        taken = signal.sigwaitinfo(_PASSED_ON | {signal.SIGCHLD})
        if taken.si_signo != signal.SIGCHLD:
            if not _reaches_all(taken):
                os.kill(child, taken.si_signo)
            continue
        ended, raw = os.waitpid(child, os.WNOHANG)
        if ended:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            code = os.waitstatus_to_exitcode(raw)
            return code if code >= 0 else 128 - code


def _reaches_all(taken: signal.struct_siginfo) -> bool:
    """Whether the terminal or Slurm's daemon has sent a signal: srun has got it, too."""
    if taken.si_code > 0:
        return True
    try:
        return Path(f"/proc/{taken.si_pid}/comm").read_text().startswith("slurmstepd")
    except OSError:
        return False
