"""Define the cases of a site.

Each case raises an error if the site or a user is harmed. It returns what the user saw. Options of sbatch, arrays,
licenses and reservations are drawn by `generated`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from contrib.sites import preemption
from contrib.sites.idle import Wish
from contrib.sites.place import WATCH_S, Place


class Case(NamedTuple):
    """One thing that a site does."""

    name: str
    play: Callable[[Place], str]


_LIMIT = "SBATCH --time=120"


def _forbidden(place: Place, begin: Callable[[], object], end: Callable[[], object], rule: str) -> str:
    """Begin a rule and end it.

    Running jobs stay. Waiting jobs name the rule, and start after its end.
    """
    running = place.train("trains", _LIMIT, "POLLUX max-gpus=2 resize=requeue")
    attempt = place.job(running).restart_count
    begin()
    waiting = place.sbatch("waits", "sleep 900", _LIMIT, "POLLUX max-gpus=1", wish=Wish(1, barred=True))
    told = place.explained(waiting, rule)
    place.stays(
        lambda: place.runs(running) and place.job(running).restart_count == attempt, "the training", WATCH_S
    )
    if place.moves(waiting):
        raise AssertionError("a start was tried in vain")
    end()
    place.admit(waiting)
    place.until(lambda: place.runs(waiting), "its start afterwards", 90)
    return told


def _maintenance(start: str, *flags: str) -> Callable[[Place], str]:
    def play(place: Place) -> str:
        words = ("scontrol", "create", "reservation", "ReservationName=maint", f"StartTime={start}")
        more = ("Duration=60", "Nodes=ALL", "Users=root", f"Flags={','.join(('ignore_jobs', *flags))}")
        return _forbidden(
            place,
            lambda: place.command(*words, *more),
            lambda: place.command("scontrol", "delete", "ReservationName=maint"),
            "reservation maint begins",
        )

    return play


def _partition_down(place: Place) -> str:
    return _forbidden(
        place,
        lambda: place.command("scontrol", "update", "PartitionName=main", "State=DOWN"),
        lambda: place.command("scontrol", "update", "PartitionName=main", "State=UP"),
        "partition main is DOWN",
    )


def _limit_reached_by_others(place: Place) -> str:
    lab = "SBATCH --account=lab"
    plain = place.sbatch("plain", "sleep 900", lab, gpus=4)
    place.until(lambda: place.runs(plain), "the plain job")
    # One type of GPU: the training has no reason of its own to move.
    one_type = "SBATCH --exclude=n3,n4"
    running = place.train("trains", lab, one_type, "POLLUX min-gpus=1 max-gpus=1")
    waiting = place.sbatch("waits", "sleep 900", lab, "POLLUX min-gpus=3", wish=Wish(3, barred=True))
    told = place.explained(waiting, "gres/gpu=6 of account lab")
    place.stays(lambda: place.runs(running) and not place.moves(waiting), "no move in vain", WATCH_S)
    place.command("scancel", str(plain))
    place.admit(waiting)
    place.until(lambda: place.runs(waiting), "its start once the plain job has ended")
    return told


def _plain_jobs_behind(place: Place) -> str:
    """A Pollux job of higher priority gets the GPUs that come free.

    Plain jobs of lower priority wait for them, too.
    """
    full = [
        place.sbatch(
            f"full-{n}", "sleep 900", f"SBATCH --nodelist={n}", gpus=4, wish=Wish(4, on=frozenset({n}))
        )
        for n in place.cluster.node_names
    ]
    place.until(lambda: all(map(place.runs, full)), "the plain jobs")
    behind = [place.sbatch(f"behind-{n}", "sleep 900", gpus=4, wish=Wish(4)) for n in (1, 2)]
    first = place.sbatch("first", "sleep 900", "SBATCH --qos=high", "POLLUX max-gpus=4", wish=Wish(1))
    place.until(lambda: place.job(first).reason in ("Resources", "Priority"), "its place in Slurm's queue")
    told = place.explain(first)
    place.command("scancel", str(full[0]))
    place.until(lambda: place.runs(first), "its start")
    if any(map(place.runs, behind)):
        raise AssertionError("a plain job of lower priority came first")
    return told


def _plain_job_first(place: Place) -> str:
    """A plain job of higher priority gets the GPUs that come free."""
    blocks = [
        place.sbatch(
            f"blocks{n}", "sleep 900", f"SBATCH --nodelist={n}", gpus=4, wish=Wish(4, on=frozenset({n}))
        )
        for n in ("n1", "n2", "n3")
    ]
    running = place.train(
        "trains", "POLLUX max-gpus=8", "SBATCH --nodelist=n4", wish=Wish(1, on=frozenset({"n4"}))
    )
    place.until(lambda: all(map(place.runs, blocks)), "the blocking jobs")
    both = frozenset({"n1", "n2"})
    first = place.sbatch(
        "first", "sleep 900", "SBATCH --qos=high --nodes=2 --exclude=n3,n4", gpus=4, wish=Wish(4, 2, both)
    )
    place.until(lambda: place.job(first).reason == "Resources", "the plain job to wait for nodes")
    place.command("scancel", str(blocks[0]))
    late = place.sbatch(
        "late", "sleep 900", "SBATCH --exclude=n4", "POLLUX max-gpus=4", wish=Wish(1, barred=True)
    )
    place.stays(lambda: not place.runs(late), "n1 is left to the plain job", WATCH_S)
    told = place.explain(late)
    place.command("scancel", str(blocks[1]))
    place.until(lambda: place.runs(first), "the plain job's start")
    if not place.runs(running):
        raise AssertionError("the training lost its GPUs")
    return told


def _growth_returned(place: Place) -> str:
    """A plain job gets the GPUs that a training holds above its least size."""
    both = Wish(4, on=frozenset({"n1", "n2"}))
    nodes = "SBATCH --exclude=n3,n4"
    running = place.train("trains", _LIMIT, nodes, "POLLUX min-gpus=4 max-gpus=8", wish=both)
    place.until(lambda: "holds 8 GPUs" in place.explain(running), "its growth")
    before = place.progress(running)
    plain = place.sbatch("plain", "sleep 900", _LIMIT, nodes, gpus=4, wish=both)
    place.until(lambda: place.runs(plain), "the plain job", 60)
    place.until(lambda: place.trains(running), "the training's next step")
    if (after := place.progress(running)) < before:
        raise AssertionError(f"work was lost: step {after:.0f} after step {before:.0f}")
    return place.explain(running)


def _held(place: Place, *jobs: int) -> list[dict[str, int]]:
    return [dict(place.job(job_id).gpus_per_node_held) for job_id in jobs]


def _starts_within_a_type(place: Place) -> str:
    """A job that nobody has measured starts on one node, of one type."""
    plain = [
        place.sbatch(f"plain-{n}", "sleep 900", f"SBATCH --nodelist={n}", gpus=gpus)
        for n, gpus in (("n1", 4), ("n2", 4), ("n4", 2))
    ]
    place.until(lambda: all(map(place.runs, plain)), "the plain jobs")
    # 4 GPUs of type 2080ti are free, and 2 of the profile 1g.5gb.
    first = place.sbatch("first", "sleep 900", "POLLUX max-gpus=8")
    place.until(lambda: place.runs(first), "the first start")
    second = place.sbatch("second", "sleep 900", "POLLUX max-gpus=8")
    place.until(lambda: place.runs(second), "the second start")
    place.stays(lambda: _held(place, first, second) == [{"n3": 4}, {"n4": 2}], "one node each", WATCH_S)
    return place.explain(first)


def _small_jobs(place: Place, name: str, *lines: str) -> float:
    """Start ten jobs of one GPU.

    Returns the GPU-seconds that were idle beside them.
    """
    before = place.idle.measured.gpu_s
    jobs = [
        place.sbatch(f"{name}{i}", "sleep 900", "POLLUX max-gpus=1", *lines, wish=Wish(1)) for i in range(10)
    ]
    place.until(lambda: all(map(place.runs, jobs)), f"ten starts of {name}", 60)
    idle = place.idle.measured.gpu_s - before
    place.command("scontrol", "requeue", str(jobs[0]))
    place.until(lambda: place.job(jobs[0]).restart_count and place.runs(jobs[0]), "its return", 60)
    if held := {place.job(job).mem_per_gpu_mb for job in jobs} - {500}:
        raise AssertionError(f"Slurm gives {held} MB with a GPU")
    place.clear()
    return idle


def _default_memory(place: Place) -> str:
    """Jobs of one GPU without a memory option start as those with one do."""
    control = _small_jobs(place, "asks", "SBATCH --mem=500")
    idle = _small_jobs(place, "default")
    everything = place.sbatch("all", "sleep 900", "SBATCH --mem=0", "POLLUX max-gpus=1", wish=Wish(1))
    beside = place.sbatch("beside", "sleep 900", "SBATCH --exclude=n1", "POLLUX max-gpus=1")
    place.until(lambda: place.runs(everything) and place.runs(beside), "the job with all memory of a node")
    if place.job(everything).mem_per_gpu_mb != 4000:
        raise AssertionError(f"--mem=0 gives {place.job(everything).mem_per_gpu_mb} MB")
    return f"ten jobs run; {idle:.1f} GPU-seconds were idle, {control:.1f} with --mem=500"


def _never_reports(place: Place) -> str:
    """A job that never reports keeps its GPUs until somebody requeues it."""
    here = "SBATCH --nodelist=n3"
    silent = place.sbatch(
        "silent", "sleep 900", here, "POLLUX max-gpus=8", wish=Wish(1, on=frozenset({"n3"}))
    )
    place.until(lambda: _held(place, silent) == [{"n3": 4}], "its start on a node")
    other = place.sbatch(
        "other", "sleep 900", here, "POLLUX min-gpus=3 max-gpus=3", wish=Wish(3, barred=True)
    )
    place.stays(lambda: not place.runs(other) and place.runs(silent), "the silent job", WATCH_S)
    told = place.explain(silent)
    place.command("scontrol", "requeue", str(silent))
    place.admit(other)
    place.until(lambda: _held(place, silent, other) == [{"n3": 1}, {"n3": 3}], "its start on min-gpus")
    return told


def _on_hold(place: Place) -> str:
    """A training that may not start again, as it is on hold, stays on a node that is drained."""
    both = frozenset({"n1", "n2"})
    running = place.train(
        "trains", _LIMIT, "SBATCH --exclude=n3,n4", "POLLUX max-gpus=1", wish=Wish(1, on=both)
    )
    place.command("scontrol", "hold", str(running))
    (node,), attempt = place.job(running).nodes, place.job(running).restart_count
    place.until(lambda: "on hold" in place.explain(running), "explain to name the hold")
    place.command("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=sites")
    try:
        place.stays(
            lambda: place.runs(running) and place.job(running).restart_count == attempt,
            "the training",
            3 * WATCH_S,
        )
    finally:
        place.command("scontrol", "update", f"NodeName={node}", "State=RESUME")
    return place.explain(running)


CASES = (
    Case("maintenance now", _maintenance("now")),
    Case("maintenance in 30 minutes", _maintenance("now+30minutes", "maint")),
    Case("maintenance every day, next in 30 minutes", _maintenance("now+30minutes", "maint", "daily")),
    Case("partition down and up", _partition_down),
    Case("GrpTRES reached by others", _limit_reached_by_others),
    Case("QOS that preempts", preemption.preempted),
    Case("partition of a higher tier preempts", preemption.tier_above),
    Case("Pollux job preempts a partition of a lower tier", preemption.tier_below),
    Case("Pollux job preempts by QOS", preemption.qos_preempts),
    Case("plain job of higher priority waits for 8 GPUs", _plain_job_first),
    Case("plain job waits beside a training that has grown", _growth_returned),
    Case("plain jobs of lower priority wait", _plain_jobs_behind),
    Case("DefMemPerGPU and no memory option", _default_memory),
    Case("two GPU types and jobs that nobody has measured", _starts_within_a_type),
    Case("job that never reports", _never_reports),
    Case("scontrol hold of a running training", _on_hold),
)
