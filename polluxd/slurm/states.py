"""Slurm's names of the states of jobs and nodes (squeue(1), sinfo(1))."""

from __future__ import annotations

from polluxd.model import JobState, Power

_WAITS = ("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_KILLED = ("DEADLINE", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
_FAILED = ("BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "RECONFIG_FAIL", *_KILLED)
_STATES = {
    **{state.value: state for state in JobState},
    # The job holds its nodes while the prolog runs (CONFIGURING).
    **dict.fromkeys(("CONFIGURING", "RESIZING", "SIGNALING"), JobState.RUNNING),
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
    **dict.fromkeys(_WAITS, JobState.PENDING),
    **dict.fromkeys(_FAILED, JobState.FAILED),
    "REVOKED": JobState.CANCELLED,
}

_OFF_OR_BOOTING = {"POWERED_DOWN", "POWERING_UP"}
"""Slurm boots such a node for the job that it gives it to."""
_USABLE = {
    *("IDLE", "MIXED", "ALLOCATED", "COMPLETING", "PLANNED", "RESERVED", "CLOUD", "DYNAMIC_NORM", "BLOCKED"),
    *_OFF_OR_BOOTING,
}
"""A node in any other state (DRAIN, DOWN, MAINT, REBOOT_ISSUED, POWERING_DOWN, ...) gets no work.
Reservations themselves say who may use a RESERVED node (`rules`)."""


def job_state(word: str) -> JobState:
    """Map Slurm's word to a state."""
    # A later Slurm may have further states: polluxd then leaves the job and its GPUs alone.
    return _STATES.get(word, JobState.COMPLETING)


def schedulable(state: str) -> bool:
    """Tell whether Slurm starts work on a node in this state.

    `IDLE+DRAIN` has two flags; a node in `IDLE*` does not respond. No node responds while it boots. One that is powered
    down after a boot that failed keeps the flag, and Slurm boots it again for a job.
    """
    flags = set(state.split("+"))
    silent = set() if flags.isdisjoint(_OFF_OR_BOOTING) else {"NOT_RESPONDING"}
    return flags - silent <= _USABLE


def power(state: str) -> Power:
    """Tell from a node's state whether Slurm keeps it powered."""
    flags = state.split("+")
    if "POWERED_DOWN" in flags:
        return "off"
    return "booting" if "POWERING_UP" in flags else "on"
