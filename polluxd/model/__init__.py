"""What every room shares: observations and decisions, as frozen values.

Units: seconds, GPUs, examples. Times are POSIX timestamps (float, UTC). Nothing here does I/O or reads a clock.
"""

from polluxd.model.decisions import (
    KEPT_BACK,
    RESTARTING_PATHS,
    Allocation,
    DaemonMode,
    Explanation,
    Move,
    Plan,
    Step,
)
from polluxd.model.observations import (
    NO_PLACEMENT,
    GpuLimit,
    JobSpec,
    JobState,
    Node,
    Placement,
    Power,
    Report,
    Snapshot,
    SnapshotJob,
    Spent,
)

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
