"""Cases of running trainings that polluxd may not move."""

from __future__ import annotations

from collections.abc import Callable

from contrib.sites.idle import Wish
from contrib.sites.place import WATCH_S, Place

_LIMIT = "SBATCH --time=120"


def _kept_as_it_is(place: Place, act: Callable[[int], object], why: str) -> str:
    """A training that may not start again stays on a node that is drained."""
    both = frozenset({"n1", "n2"})
    running = place.train(
        "trains", _LIMIT, "SBATCH --exclude=n3,n4", "POLLUX max-gpus=1", wish=Wish(1, on=both)
    )
    act(running)
    (node,), attempt = place.job(running).nodes, place.job(running).restart_count
    place.until(lambda: why in place.explain(running), f"explain to name {why!r}")
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


def deadline(place: Place) -> str:
    """sbatch refuses --deadline."""
    try:
        place.sbatch("late", "sleep 900", _LIMIT, "SBATCH --deadline=now+3hours", "POLLUX max-gpus=1")
    except RuntimeError as error:
        if "--deadline cannot be used by a Pollux job" in str(error):
            return str(error)
        raise
    raise AssertionError("sbatch took --deadline")


def held(place: Place) -> str:
    return _kept_as_it_is(place, lambda job: place.command("scontrol", "hold", str(job)), "on hold")
