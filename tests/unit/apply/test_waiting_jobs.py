"""Waiting jobs have the size that their users wrote."""

from __future__ import annotations

from polluxd.apply.waiting_jobs import WaitingJobs
from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import Geometry


def test_a_job_whose_start_has_failed_is_bound_to_no_node() -> None:
    slurm = FakeSlurm([Node("n1", gpus=4, cpus=8), Node("n2", gpus=4, cpus=8)])
    plain = [slurm.submit(None, gpus_per_node=4) for _ in range(2)]
    slurm.advance(2)
    mine = slurm.submit(JobSpec(min_gpus=2), gpus_per_node=2, lease=20)
    clock = slurm.clock
    queue = WaitingJobs(slurm, lease=300.0, authorize=lambda: 1, clock=clock, monotonic=clock)

    def restore(*still: int) -> None:
        queue.restore_sizes({job.job_id: job for job in slurm.observe().jobs if job.spec is not None}, still)

    restore(mine)
    queue.resized(mine)
    slurm.configure(mine, Geometry(("n2",), 4, 1), start=False)
    restore()  # a look at Slurm while the move is under way
    restore(mine)  # and one after it has failed
    slurm.finish(plain[0])
    slurm.advance(30)  # polluxd is gone, and the lease has ended
    started = slurm.jobs([mine])[mine]
    assert (started.state, started.gpus_per_node_held) == (JobState.RUNNING, {"n1": 2})
