"""Size jobs as users of plain Slurm do, in four ways (`plain_arms`).

The first is the paper's rule for tuned jobs (section 5.1): a number of GPUs is valid if the job reaches 50 to 80 % of
linear speedup over one GPU, with the optimal batch size for each. No figure is typed in. The example states its step
times, the run under polluxd measured the noise scale, and `pollux.goodput` computes the speedups. So the comparison is
against users who know their jobs perfectly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams, efficiency, gain

from .static_sizes import best_static
from .workload import Size, Training, Workload

VALID = (0.5, 0.8)
"""Fractions of linear speedup between which a GPU count is valid (the paper's)."""
RULE = "the paper's rule for tuned jobs"
START_S = 8.0
"""From the start of a job to its first step."""
EXAMPLES = {"digits": 1438, "tumours": 456}
"""On which the examples train, by the data set in a script's name."""


def shapes(work: Workload) -> Iterator[tuple[int, int]]:
    """Yield (nodes, GPUs per node) of every placement a user may ask for.

    A placement is part of one node, or whole nodes.
    """
    for gpus in range(1, work.gpus_per_node + 1):
        yield 1, gpus
    for nodes in range(2, work.nodes + 1):
        yield nodes, work.gpus_per_node


def noise_of(job: Training, phi: float | None) -> NoiseScale | None:
    """Only the ratio of its two parts matters: phi = M0 var / sqr."""
    return None if phi is None else NoiseScale(sqr=1.0, var=phi / job.batch_size)


def goodput_of(job: Training, phi: float | None) -> Goodput:
    """The training's goodput function, from what its example states."""
    theta = ThroughputParams(
        *(job.alpha_s, job.beta_s, job.sync_local_s, 0.0, job.sync_node_s, 0.0),
        gamma=1.0,  # the example sleeps its pass and then its synchronisation: no overlap
    )
    limits = BatchLimits(job.batch_size, job.max_batch_size, *job.per_gpu)
    return Goodput(theta, noise_of(job, phi), limits, adaptive=job.adaptive)


def linear_fractions(job: Training, phi: float | None, work: Workload) -> dict[tuple[int, int], float]:
    """Return the fraction of linear speedup that each shape reaches.

    It is the goodput of the shape's K GPUs over K times the goodput of one GPU, with the optimal batch size for both.
    """
    goodput = goodput_of(job, phi)
    alone = float(goodput.optimize([1], [1]).goodput[0])
    found = {}
    for nodes, per_node in shapes(work):
        gpus = nodes * per_node
        if job.min_gpus <= gpus <= (job.max_gpus or gpus):
            there = float(goodput.optimize([nodes], [gpus]).goodput[0])
            found[nodes, per_node] = there / (gpus * alone) if alone > 0 else 0.0
    return found


def size_of(job: Training, phi: float | None, nodes: int, per_node: int) -> Size:
    """Return the training on this shape, tuned for it: the best batch size there.

    The number of epochs grows by 1 / efficiency, so that the plain run makes the same statistical progress. The
    learning rate grows by AdaScale's gain. A user who tunes a large batch would do both.
    """
    best = goodput_of(job, phi).optimize([nodes], [nodes * per_node])
    batch = int(best.batch_size[0]) if job.adaptive else job.batch_size
    known = noise_of(job, phi) if job.adaptive else None
    epochs = (
        job.epochs / float(efficiency(known, job.batch_size, batch)) if batch > job.batch_size else job.epochs
    )
    factor = float(gain(known, job.batch_size, batch)) if batch > job.batch_size else 1.0
    return Size(
        nodes, per_node, batch, epochs, job.lr * (factor**0.5 if job.lr_rule == "square-root" else factor)
    )


def seconds_on(job: Training, phi: float | None, nodes: int, per_node: int) -> float:
    """Return how long the training takes on this shape, its start included; inf where it cannot run."""
    data = next(number for name, number in EXAMPLES.items() if name in job.script)
    speed = float(goodput_of(job, phi).optimize([nodes], [nodes * per_node]).goodput[0])
    return START_S + job.epochs * data / speed if speed > 0 else math.inf


def tuned_size(job: Training, phi: float | None, work: Workload) -> Size:
    """Return the valid shape nearest the middle of the band.

    Where no shape is valid, return the shape nearest the middle.
    """
    fractions = linear_fractions(job, phi, work)
    if not fractions:
        raise ValueError(f"{job.name}: no placement of the cluster has {job.min_gpus} to {job.max_gpus} GPUs")
    middle = math.sqrt(VALID[0] * VALID[1])
    nodes, per_node = min(fractions, key=lambda shape: abs(math.log(max(fractions[shape], 1e-6) / middle)))
    return size_of(job, phi, nodes, per_node)


def tuned_sizes(work: Workload, phi: Mapping[str, float]) -> dict[str, Size]:
    """Return the tuned size of each job, by name.

    Args:
        phi: the noise scale of each adaptive job [examples], by job name.

    Raises:
        KeyError: an adaptive job has no noise scale.
    """
    return {j.name: tuned_size(j, phi[j.name] if j.adaptive else None, work) for j in work.trainings}


def plain_arms(work: Workload, phi: Mapping[str, float]) -> dict[str, dict[str, Size]]:
    """Return the sizes of each job under each of the ways in which users of plain Slurm size theirs.

    All take the best batch size for their GPUs. Raises KeyError as `tuned_sizes` does.
    """
    known = {job.name: phi[job.name] if job.adaptive else None for job in work.trainings}
    whole = {job.name: min(work.gpus_per_node, job.max_gpus or work.gpus_per_node) for job in work.trainings}
    found = {
        RULE: tuned_sizes(work, phi),
        "one node each": {j.name: size_of(j, known[j.name], 1, whole[j.name]) for j in work.trainings},
        "min-gpus each": {j.name: size_of(j, known[j.name], 1, j.min_gpus) for j in work.trainings},
    }
    seconds = {
        job.name: {
            size_of(job, known[job.name], *shape): seconds_on(job, known[job.name], *shape)
            for shape in linear_fractions(job, known[job.name], work)
        }
        for job in work.trainings
    }
    return found | {"the best static sizes": best_static(work, seconds, found.values())}
