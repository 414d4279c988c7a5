"""Reasons why Slurm starts a waiting job on no node.

Source: squeue(1), JOB REASON CODES.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_GROUPS = (
    # No node could ever hold the job at this size (Slurm has taken its priority, too), or a limit per job is below it.
    (re.compile(r"BadConstraints|(Assoc|QOS)Max(GRES|Cpu|Memory|Node)Per(Job|Node)"), "size"),
    # What one job asks for, and what one user has, keeps nobody else out.
    (re.compile(r"Partition(Node|Time)Limit|(Assoc|QOS)(Min|Max\w+PerJob)"), "job"),
    (re.compile(r"(QOS)?Max\w+PerUser|AssocMaxJobs"), "user"),
    # ReqNodeNotAvail alone also stands for a node that is busy.
    (re.compile(r"Partition(Down|Inactive|Config)|.*Reserved|Reservation"), "partition"),
    (re.compile(r"Assoc|MaxJobs|Max\w+PerAccount|JobHeldAdmin"), "account"),
    (re.compile(r"QOS"), "qos"),
    (re.compile(r"Licenses"), "licenses"),
    # Fewer tasks of an array may run than its `%` says: its user has set ArrayTaskThrottle.
    (re.compile(r"JobArrayTaskLimit"), "array"),
)


def refused(reason: str) -> bool:
    """Tell whether a waiting job's reason is a refusal.

    Free GPUs do not end a refusal, such as `AssocGrpGRES`.
    """
    return refused_group(reason) is not None


def refused_group(reason: str) -> str | None:
    """Return the field of a job that the refused jobs have in common.

    None: the reason is no refusal.
    """
    return next((name for pattern, name in _GROUPS if pattern.match(reason)), None)


def shown_by_slurm(reason: str, licenses: Iterable[str]) -> bool:
    """Tell whether polluxd reads the cause from Slurm at each look, and so sees its end at once.

    Remote licenses (name@server) it does not.
    """
    if reason.startswith("Licenses"):
        return not any("@" in name for name in licenses)
    return reason in ("PartitionDown", "PartitionInactive")
