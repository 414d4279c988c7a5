"""CPUs that a site gives to jobs with each GPU. Pure.

JobDefaults=DefCpuPerGPU= of a partition, else of slurm.conf, holds for a job that asks for no CPUs itself. Slurm leaves
the default out once a job's CPUs are written, and polluxd writes them at each start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition, default_cpus

_EVERYWHERE = re.compile(r"^JobDefaults\s*=\s*(\S+)", re.MULTILINE)


def with_default_cpus(
    jobs: Iterable[SlurmJob], partitions: Mapping[str, Partition], configuration: str
) -> tuple[SlurmJob, ...]:
    """Give our jobs that ask for no CPUs the site's, if these are more.

    Args:
        configuration: what `scontrol show config` prints.
    """
    found = _EVERYWHERE.search(configuration)
    everywhere = default_cpus(found[1]) if found else None

    def given(job: SlurmJob) -> SlurmJob:
        spec = job.spec
        if spec is None or job.demands.cpus_asked:
            return job
        ruled = [partitions[name].cpus_per_gpu for name in job.partition.split(",") if name in partitions]
        cpus = max((own or everywhere or 1 for own in ruled), default=everywhere or 1)
        return replace(job, spec=replace(spec, cpus_per_gpu=cpus)) if cpus > spec.cpus_per_gpu else job

    return tuple(map(given, jobs))
