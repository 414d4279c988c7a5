"""Would the job's next attempt, on another node, see a folder of this attempt?

A site may give each job a /tmp of its own (job_container/tmpfs, a SPANK plugin), a container has a layer of its own,
and a folder may lie in memory. Each is gone with the attempt. proc(5), /proc/PID/mountinfo.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_IN_MEMORY = ("tmpfs", "ramfs")
_OF_NODE = (
    *_IN_MEMORY,
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "overlay",
    "squashfs",
    "bcachefs",
)
_CONTAINERS = ("POLLUX_CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER", "ENROOT_ROOTFS")
MOUNTS = Path("/proc/self/mountinfo")


class Mount(NamedTuple):
    """The file system in which a folder lies."""

    root: str
    """The folder of the file system that is mounted."""
    point: str
    kind: str


def why_of_this_attempt(folder: Path, environ: Mapping[str, str], mounts: Path = MOUNTS) -> str:
    """Say why a folder ends with this attempt; empty where nothing shows that it does."""
    mount = _mount_of(folder, mounts)
    if mount is None:
        return ""
    if mount.kind in _IN_MEMORY:
        return f"{mount.point} is in this node's memory ({mount.kind})"
    if mount.kind == "overlay" and any(environ.get(name) for name in _CONTAINERS):
        return f"{mount.point} is the container's own layer, which ends with it"
    job_id = re.escape(environ.get("SLURM_JOB_ID", ""))
    own = re.compile(rf"\.?(slurm[._-]?)?{job_id}([._-]\w+)?")
    if job_id and mount.kind in _OF_NODE and any(own.fullmatch(part) for part in Path(mount.root).parts):
        return f"{mount.point} is this job's own on this node ({mount.root}), and Slurm removes it with the attempt"
    return ""


def of_one_node(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether a folder lies on a disk of this node."""
    mount = _mount_of(folder, mounts)
    return mount is not None and mount.kind in _OF_NODE


def _mount_of(folder: Path, mounts: Path) -> Mount | None:
    """The mount that a folder lies in; None where that cannot be told."""
    try:
        here = folder.resolve()
        lines = mounts.read_text().splitlines()
    except (OSError, RuntimeError):
        return None
    found = None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()[:1]
        if len(fields) < 5 or not kind:
            continue
        root, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), each) for each in fields[3:5])
        # A later mount at the same place hides the one before.
        if here.is_relative_to(point) and (found is None or len(point) >= len(found.point)):
            found = Mount(root, point, kind[0])
    return found
