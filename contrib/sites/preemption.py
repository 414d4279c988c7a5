"""Cases in which one job takes another's GPUs by Slurm's rules."""

from __future__ import annotations

import time

from contrib.sites.idle import Wish
from contrib.sites.place import WATCH_S, Place
from polluxd.model import JobState


def preempted(place: Place, how: str = "SBATCH --qos=urgent") -> str:
    """A plain job preempts a training, which comes back without a step lost."""
    running = place.train(
        "trains",
        "POLLUX min-gpus=4 max-gpus=4 resize=requeue",
        "SBATCH --nodelist=n1",
        wish=Wish(4, on=frozenset({"n1"})),
    )
    place.until(lambda: place.progress(running) > 20, "some steps")
    urgent = place.sbatch(
        "urgent", "sleep 15", how, "SBATCH --nodelist=n1", gpus=4, wish=Wish(4, on=frozenset({"n1"}))
    )
    place.until(lambda: place.runs(urgent), "the urgent job")
    place.until(lambda: not place.runs(running), "the training's requeue")
    told, before = place.explain(running), place.progress(running)
    place.until(lambda: place.trains(running), "the training's return", 150)
    if (after := place.progress(running)) < before:
        raise AssertionError(f"work was lost: step {after:.0f} after step {before:.0f}")
    if place.job(urgent).state is not JobState.COMPLETED:
        raise AssertionError("the urgent job was disturbed")
    return f"{told} It had told of step {before:.0f}, and returned with step {after:.0f}."


def tier_above(place: Place) -> str:
    """A plain job of a higher PriorityTier preempts a training."""
    with place.preempting("preempt/partition_prio"):
        return preempted(place, "SBATCH --partition=pollux")


def tier_below(place: Place) -> str:
    """A Pollux job of a higher tier preempts one plain job.

    Slurm does the same for any job of that tier.
    """
    with place.preempting("preempt/partition_prio"):
        plain = [
            place.sbatch(
                f"plain-{n}",
                "sleep 900",
                f"SBATCH --nodelist={n}",
                gpus=4,
                wish=Wish(4, on=frozenset({n})),
            )
            for n in place.cluster.node_names
        ]
        place.until(lambda: all(map(place.runs, plain)), "the plain jobs")
        behind = place.sbatch("behind", "sleep 900", gpus=4, wish=Wish(4))
        first = place.sbatch(
            "first", "sleep 900", "SBATCH --partition=pollux", "POLLUX min-gpus=4 max-gpus=4", wish=Wish(4)
        )
        place.until(lambda: place.runs(first), "the start of the job of the higher tier")
        told = place.explain(first)
        place.stays(lambda: place.runs(first), "the job of the higher tier", WATCH_S)
        again = [place.job(job_id).restart_count for job_id in plain]
        if sorted(again) != [0, 0, 0, 1] or any(place.job(job_id).state.finished for job_id in plain):
            raise AssertionError(f"plain jobs were started again {again} times")
        if place.runs(behind):
            raise AssertionError("the plain job of the lower tier came first")
        return told


def qos_preempts(place: Place) -> str:
    """A Pollux job may preempt by QOS. It starts as its user's plain job does."""

    def first_start(*lines: str) -> tuple[int, float]:
        # Slurm preempts for the one that waits: its GPUs were not free before.
        job_id = place.sbatch("first", "sleep 900", *lines, gpus=4, wish=Wish(4, barred=True))
        since = time.monotonic()
        place.until(lambda: place.runs(job_id), "the start of the job that may preempt", 60)
        return job_id, time.monotonic() - since

    scavengers = [
        place.sbatch(
            f"scavenger-{n}",
            "sleep 900",
            f"SBATCH --nodelist={n}",
            "SBATCH --qos=scavenge",
            gpus=4,
            wish=Wish(4, on=frozenset({n}), barred=True),
        )
        for n in place.cluster.node_names
    ]
    place.until(lambda: all(map(place.runs, scavengers)), "the scavengers")
    plain, plain_s = first_start()
    mine, mine_s = first_start("POLLUX min-gpus=4 max-gpus=4")
    told = place.explain(mine)
    place.stays(lambda: place.runs(plain) and place.runs(mine), "both jobs", WATCH_S)
    again = sorted(place.job(job_id).restart_count for job_id in scavengers)
    if again != [0, 0, 1, 1]:
        raise AssertionError(f"scavengers were started again {again} times")
    return f"started {mine_s:.0f} s after its submission, a plain job after {plain_s:.0f} s. {told}"
