"""Cases of running trainings that polluxd may not move."""

from __future__ import annotations

from collections.abc import Callable

from contrib.sites.idle import Wish
from contrib.sites.place import WATCH_S, Place

_LIMIT = "SBATCH --time=120"


def _kept_as_it_is(place: Place, act: Callable[[int], object], why: str) -> str:
    """A training that may not start again keeps its GPUs.

    Another waits for some.
    """
    both = Wish(4, on=frozenset({"n1", "n2"}))
    nodes = "SBATCH --exclude=n3,n4"
    running = place.train("trains", _LIMIT, nodes, "POLLUX min-gpus=4 max-gpus=8", wish=both)
    place.until(lambda: "holds 8 GPUs" in place.explain(running), "its growth")
    place.until(lambda: place.trains(running), "its next step")
    act(running)
    attempt = place.job(running).restart_count
    place.until(lambda: why in place.explain(running), f"explain to name {why!r}")
    other = place.sbatch("other", "sleep 900", nodes, "POLLUX max-gpus=1", wish=Wish(1, barred=True))
    place.stays(
        lambda: place.runs(running) and place.job(running).restart_count == attempt,
        "the training",
        2 * WATCH_S,
    )
    if place.runs(other):
        raise AssertionError("the training gave GPUs up")
    return place.explain(running)


def deadline(place: Place) -> str:
    """sbatch refuses --deadline.

    A job that has one all the same keeps its GPUs.
    """
    try:
        place.sbatch("late", "sleep 900", _LIMIT, "SBATCH --deadline=now+3hours", "POLLUX max-gpus=1")
    except RuntimeError as error:
        refusal = str(error)
    else:
        raise AssertionError("sbatch took --deadline")
    if "--deadline cannot be used by a Pollux job" not in refusal:
        raise AssertionError(refusal)
    return _kept_as_it_is(
        place,
        lambda job: place.command("scontrol", "update", f"JobId={job}", "Deadline=now+121minutes"),
        "has a deadline",
    )


def held(place: Place) -> str:
    return _kept_as_it_is(place, lambda job: place.command("scontrol", "hold", str(job)), "on hold")
