"""Slurm's names of the states of jobs and nodes (squeue(1), sinfo(1))."""

from __future__ import annotations

from polluxd.model import JobState, Power

_STATES = {
    **{state.value: state for state in JobState},
    "CONFIGURING": JobState.RUNNING,  # the job holds its nodes while the prolog runs
    "RESIZING": JobState.RUNNING,
    "SIGNALING": JobState.RUNNING,
    "STAGE_OUT": JobState.COMPLETING,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "REQUEUE_FED": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "BOOT_FAIL": JobState.FAILED,
    "DEADLINE": JobState.FAILED,
    "LAUNCH_FAILED": JobState.FAILED,
    "NODE_FAIL": JobState.FAILED,
    "OUT_OF_MEMORY": JobState.FAILED,
    "PREEMPTED": JobState.FAILED,
    "RECONFIG_FAIL": JobState.FAILED,
    "TIMEOUT": JobState.FAILED,
    "REVOKED": JobState.CANCELLED,
}

_USABLE = frozenset(
    {
        *(
            "IDLE",
            "MIXED",
            "ALLOCATED",
            "COMPLETING",
            "PLANNED",
            "RESERVED",
            "CLOUD",
            "DYNAMIC_NORM",
            "BLOCKED",
        ),
        # Slurm boots such a node for the job that it gives it to.
        *("POWERED_DOWN", "POWERING_UP"),
    }
)
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
    silent = not flags.isdisjoint({"POWERING_UP", "POWERED_DOWN"})
    return flags - ({"NOT_RESPONDING"} if silent else set()) <= _USABLE


def power(state: str) -> Power:
    """Tell from a node's state whether Slurm keeps it powered."""
    flags = state.split("+")
    if "POWERED_DOWN" in flags:
        return "off"
    return "booting" if "POWERING_UP" in flags else "on"
