"""What memory the job has, and how much it may still take."""

from __future__ import annotations

from pathlib import Path

from pollux.slurm_job.job_memory import memory_left, memory_limit


def files(folder: Path, **contents: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name.replace("__", ".")).write_text(content)


def machine(root: Path, groups: str) -> None:
    files(root / "proc/self", cgroup=groups)
    files(root / "proc", meminfo="MemTotal: 64 kB\nMemAvailable:   40000000 kB\n")


def test_of_nested_groups_the_least_counts_and_cache_is_free(tmp_path: Path) -> None:
    """Version 2: a step without a limit in a job with one."""
    machine(tmp_path, "0::/slurm/job_4/step_0\n")
    assert memory_left(tmp_path) <= 40_000_000 * 1024
    job = tmp_path / "sys/fs/cgroup/slurm/job_4"
    stat = "anon 5\ninactive_file 300\nactive_file 200\n"
    files(job, memory__max="2000\n", memory__current="1500\n", memory__stat=stat)
    files(job / "step_0", memory__max="max\n", memory__current="1400\n")
    assert (memory_limit(tmp_path), memory_left(tmp_path)) == (2000, 1000)
    files(job.parent, memory__max="1700\n", memory__current="1600\n")
    assert (memory_limit(tmp_path), memory_left(tmp_path)) == (1700, 100)
    files(job.parent, memory__current="9000\n")
    assert memory_left(tmp_path) == 0


def test_version_1_counts_groups_below_too(tmp_path: Path) -> None:
    machine(tmp_path, "9:memory:/slurm/uid_0/job_4\n8:cpu:/x\n")
    stat = "inactive_file 1\ntotal_inactive_file 300\ntotal_active_file 100\n"
    files(
        tmp_path / "sys/fs/cgroup/memory/slurm/uid_0/job_4",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="900\n",
        memory__stat=stat,
    )
    assert (memory_limit(tmp_path), memory_left(tmp_path)) == (1000, 500)


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    assert memory_left(tmp_path) == memory_limit(tmp_path) > 0
    assert 0 < memory_left() <= memory_limit()
