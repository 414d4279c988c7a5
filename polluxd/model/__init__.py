"""What every room shares: observations and decisions, as frozen values.

Units: seconds, GPUs, examples. Times are POSIX timestamps (float, UTC). Nothing here does I/O or reads a clock.
"""

from polluxd.model.jobs import GpuLimit, JobSpec, JobState, Snapshot, SnapshotJob, Spent
from polluxd.model.moves import RESTARTING_PATHS, Move, Step
from polluxd.model.nodes import NO_PLACEMENT, Node, Placement, Power
from polluxd.model.plans import KEPT_BACK, Allocation, DaemonMode, Explanation, Plan
from polluxd.model.reports import Report

__all__ = [
    "KEPT_BACK",
    "NO_PLACEMENT",
    "RESTARTING_PATHS",
    "Allocation",
    "DaemonMode",
    "Explanation",
    "GpuLimit",
    "JobSpec",
    "JobState",
    "Move",
    "Node",
    "Placement",
    "Plan",
    "Power",
    "Report",
    "Snapshot",
    "SnapshotJob",
    "Spent",
    "Step",
]
