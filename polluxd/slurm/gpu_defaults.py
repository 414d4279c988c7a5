"""CPUs and memory that a site gives to jobs with each GPU. Pure.

DefCpuPerGPU and DefMemPerGPU of a partition, else of slurm.conf, hold for a job that asks for none itself.
Slurm leaves the CPUs out once a job's CPUs are written, and polluxd writes them at each start. Slurm shows the memory
of running jobs alone: a waiting job counts there with all memory of its nodes (22.05).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition, gpu_default

_EVERYWHERE = re.compile(r"^JobDefaults\s*=\s*(\S+)", re.MULTILINE)


def with_default_cpus(
    jobs: Iterable[SlurmJob], partitions: Mapping[str, Partition], configuration: str
) -> tuple[SlurmJob, ...]:
    """Give our jobs that ask for no CPUs the site's, if these are more.

    Args:
        configuration: what `scontrol show config` prints.
    """
    everywhere = _everywhere("DefCpuPerGPU", configuration)

    def given(job: SlurmJob) -> SlurmJob:
        spec = job.spec
        if spec is None or job.demands.cpus_asked:
            return job
        ruled = [partitions[name].cpus_per_gpu for name in job.partition.split(",") if name in partitions]
        cpus = max((own or everywhere or 1 for own in ruled), default=everywhere or 1)
        return replace(job, spec=replace(spec, cpus_per_gpu=cpus)) if cpus > spec.cpus_per_gpu else job

    return tuple(map(given, jobs))


def default_memory(partitions: Mapping[str, Partition], configuration: str) -> dict[str, int]:
    """Return the memory that goes with each GPU, by partition.

    In MB; 0: no default.
    """
    everywhere = _everywhere("DefMemPerGPU", configuration)
    return {
        name: (everywhere if partition.memory_per_gpu_mb is None else partition.memory_per_gpu_mb) or 0
        for name, partition in partitions.items()
    }


def _everywhere(name: str, configuration: str) -> int | None:
    found = _EVERYWHERE.search(configuration)
    return gpu_default(name, found[1]) if found else None
