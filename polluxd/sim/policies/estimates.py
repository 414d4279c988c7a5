"""Tell rivals that predict the true times of a job, as an oracle.

The times are those at the batch size of the job's user. Each rival's description states that it uses an oracle.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from polluxd.sim.applications import Application, placement_of, split_batch
from polluxd.sim.engine import View
from polluxd.sim.simulated_job import SimulatedJob

_known: WeakKeyDictionary[Application, dict[tuple[int, int, int], float]] = WeakKeyDictionary()


def steps_per_second(app: Application, batch_size: int, gpus: int, per_node: int) -> float:
    """Optimizer steps per second on so many packed GPUs."""
    rates, key = _known.setdefault(app, {}), (batch_size, gpus, per_node)
    if key not in rates:
        rates[key] = _measured_rate(app, *key)
    return rates[key]


def _measured_rate(app: Application, batch_size: int, gpus: int, per_node: int) -> float:
    m, s = split_batch(batch_size, gpus, app.limits)
    step, sync = app.times(placement_of(gpus, per_node), m)
    return 1.0 / (step + s * (step - sync))


def most_useful(job: SimulatedJob, cluster_gpus: int) -> int:
    """The most GPUs that the user's batch size can be split among."""
    limits = job.app.limits
    most = min(job.submission.batch_size // limits.local_min, cluster_gpus)
    return max(1, most if job.app.most_gpus is None else min(most, job.app.most_gpus))


def remaining_seconds(job: SimulatedJob, gpus: int, per_node: int) -> float:
    """Seconds to the end on so many packed GPUs at the user's batch size."""
    size, last = job.submission.batch_size, job.app.epochs - 1
    done = job.app.iterations(size, job.epoch - 1) if job.epoch else 0.0
    begun, goal = job.app.progress(job.epoch), job.app.progress(job.epoch + 1)
    part = (job.progress - begun) / max(goal - begun, 1e-12)
    here = job.app.iterations(size, job.epoch) - done
    steps = job.app.iterations(size, last) - done - part * here
    return max(steps, 0.0) / steps_per_second(job.app, size, gpus, per_node)


def whole_seconds(job: SimulatedJob, gpus: int, per_node: int) -> float:
    """Seconds of the whole training on so many packed GPUs.

    The batch size is the user's.
    """
    size = job.submission.batch_size
    return job.app.iterations(size, job.app.epochs - 1) / steps_per_second(job.app, size, gpus, per_node)


def finish_time_fairness(job: SimulatedJob, view: View) -> float:
    """Themis' rho: the predicted completion time over that on an exclusive 1/N of the cluster."""
    size = view.scenario.gpus_per_node
    fair = max(1, min(-(-view.scenario.gpus // len(view.jobs)), most_useful(job, view.scenario.gpus)))
    shared = view.now - job.submission.time + remaining_seconds(job, job.submission.gpus, size)
    return shared / whole_seconds(job, fair, size)
