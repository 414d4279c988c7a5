"""Folders that end with an attempt are known before anything is promised."""

from __future__ import annotations

from pathlib import Path

import pytest

from pollux.slurm_job.shared_folder import of_one_node, why_of_this_attempt

JOB = {"SLURM_JOB_ID": "35"}
HEAD = "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"


def mounted(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(HEAD + "".join(f"{line}\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "90 22 254:0 /var/spool/containers/35/.35 /priv rw - ext4 /dev/vda rw",
            "this job's own on this node",
        ),
        ("90 22 254:0 /scratch/slurm.35.0 /priv rw - xfs /dev/sdb rw", "this job's own on this node"),
        ("90 22 0:45 / /priv rw master:3 - tmpfs tmpfs rw,size=1g", "in this node's memory"),
        ("90 22 0:45 / /pri\\166 rw - tmpfs tmpfs rw", "in this node's memory"),
    ],
)
def test_what_ends_with_the_attempt_is_known(tmp_path: Path, line: str, words: str) -> None:
    mounts = mounted(tmp_path, line)
    assert words in why_of_this_attempt(Path("/priv/ck"), JOB, mounts)
    assert why_of_this_attempt(Path("/home/ck"), JOB, mounts) == ""
    assert of_one_node(Path("/priv/ck"), mounts)


@pytest.mark.parametrize(
    "line",
    [
        "90 22 254:0 /var/spool/containers/351/.351 /priv rw - ext4 /dev/vda rw",
        "90 22 0:50 /35 /priv rw - nfs4 server:/export/35 rw",
        "90 22 254:0 /home/class35 /priv rw - ext4 /dev/vda rw",
        "90 22 0:45 / /privy rw - tmpfs tmpfs rw",
        "garbage",
        "90 22 0:45 /",
    ],
)
def test_what_may_be_shared_is_not_called_private(tmp_path: Path, line: str) -> None:
    assert why_of_this_attempt(Path("/priv/ck"), JOB, mounted(tmp_path, line)) == ""


def test_a_containers_own_layer_ends_with_it(tmp_path: Path) -> None:
    mounts = mounted(
        tmp_path, "90 22 0:45 / / rw - overlay overlay rw", "91 90 0:50 / /data rw - lustre s:/x rw"
    )
    inside = JOB | {"APPTAINER_CONTAINER": "/images/a.sif"}
    assert "the container's own layer" in why_of_this_attempt(Path("/work"), inside, mounts)
    assert why_of_this_attempt(Path("/work"), JOB, mounts) == "", "the node itself may be one"
    assert why_of_this_attempt(Path("/data/ck"), inside, mounts) == ""
    assert not of_one_node(Path("/data/ck"), mounts)


def test_without_proc_nothing_is_claimed(tmp_path: Path) -> None:
    assert why_of_this_attempt(Path("/priv"), JOB, tmp_path / "none") == ""
    assert not of_one_node(Path("/priv"), tmp_path / "none")


def test_the_real_file_is_read() -> None:
    assert "memory" in why_of_this_attempt(Path("/dev/shm/x"), JOB)
