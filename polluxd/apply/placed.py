"""Where Slurm shows a job to be, and what it takes to put it elsewhere."""

from __future__ import annotations

from polluxd.model import Placement
from polluxd.slurm.protocol import Geometry, SlurmJob


def held(job: SlurmJob) -> Placement | None:
    """The placement that Slurm shows, or None where the GPUs per node are uneven."""
    if not job.gpus_per_node_held:
        return Placement()
    counts = set(job.gpus_per_node_held.values())
    if len(counts) != 1:
        return None
    return Placement(tuple(sorted(job.gpus_per_node_held)), counts.pop())


def same_place(job: SlurmJob, target: Placement) -> bool:
    """True when the job holds exactly `target`, in whatever order of nodes."""
    return job.gpus_per_node_held == dict.fromkeys(target.nodes, target.gpus_per_node)


def geometry(job: SlurmJob, target: Placement) -> Geometry:
    """What the job asks of Slurm at `target`; CPUs and memory follow the GPUs, which Slurm itself does not do."""
    assert job.spec is not None
    gpus = target.gpus_per_node
    memory = job.spec.mem_per_gpu_mb
    return Geometry(
        nodes=target.nodes,
        gpus_per_node=gpus,
        cpus_per_task=job.spec.cpus_per_gpu * gpus,
        mem_per_node_mb=memory * gpus if memory else None,
    )


def ends_at(job: SlurmJob | None) -> float | None:
    """When Slurm will end the running attempt; None: never, or it does not run."""
    if job is None or job.start_time is None or job.time_limit_s is None:
        return None
    return job.start_time + job.time_limit_s
