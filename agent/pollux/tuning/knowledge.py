"""Knowledge across runs: which training this is, and what earlier runs of it have measured.

A fingerprint names runs whose step times are alike: the same script, model and per-GPU batch range; the database
adds the user and the GPU type. What an earlier run has left under it is this run's prior: it stands where nothing is
measured yet, gives way where something is (`pollux.fit`), fades where nothing confirms it, and is dropped as a whole
once measured times contradict it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pollux.goodput import BatchLimits, ThroughputParams, step_time
from pollux.slurm_job.ticket import Ticket
from pollux.tuning.profile import ProfileRows, StepProfile

if TYPE_CHECKING:
    from pollux.checkpoint.restart import Known

logger = logging.getLogger("pollux")

HALF_LIFE = 600.0
"""Seconds in which synchronisation known from earlier runs only halves: a wrong one would keep a job from ever being
tried on more GPUs, and so from ever being put right."""

REFUTED = 2.0
"""A prior that is off by more than this factor, on any kind of placement, is of another training."""

EVIDENCE = 8.0
"""Measured steps on one kind of placement before they can refute."""

_SYNC = ("alpha_local", "beta_local", "alpha_node", "beta_node", "alpha_rack", "beta_rack")


def fingerprint(model: Any, limits: BatchLimits, argv: list[str] | None = None) -> str:
    """32 hexadecimal digits, equal for runs of one script, with one model's shapes, in one range of per-GPU batches.

    The script counts by its file name: it may be edited, and run from a folder of its own each time. Arguments do not
    count, the shapes say what of them matters to step times; where they do not, the prior is refuted and dropped.
    """
    script = os.path.basename((sys.argv if argv is None else argv)[0])
    facts = [script, limits.local_min, limits.local_max, list(_shapes(model))]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _shapes(model: Any) -> Iterable[tuple[str, list[int], str, bool]]:
    for name, parameter in model.named_parameters():
        yield name, list(parameter.shape), str(parameter.dtype), bool(parameter.requires_grad)


def gpu_type(device: Any, ticket: Ticket | None) -> str:
    """The type of GPU that step times are bound to: Slurm's name of it, else the device's own; empty for a CPU."""
    if ticket is not None and ticket.gpu_type:
        return ticket.gpu_type
    if device.type != "cuda":
        return ""
    import torch  # noqa: PLC0415 - only a training that has torch has such a device

    return str(torch.cuda.get_device_name(device))[:64]


@dataclass(frozen=True)
class Prior:
    """What earlier runs have measured."""

    params: ThroughputParams
    gpus: int
    """Most GPUs that it was measured on."""
    nodes: int

    @classmethod
    def from_answer(cls, answer: Any) -> Prior | None:
        """From what `prior_v1` answers; None for an answer that is none, or makes no sense."""
        if not isinstance(answer, dict):
            return None
        try:
            params = ThroughputParams(**{name: float(value) for name, value in answer["params"].items()})
            gpus, nodes = int(answer["explored_gpus"]), int(answer["explored_nodes"])
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        known = [value for value in params if value is not None]
        sound = all(math.isfinite(x) and x >= 0 for x in known) and params.gamma >= 1 and gpus >= 1
        return cls(params, gpus, max(nodes, 1)) if sound else None

    def after(self, seconds: float) -> Prior:
        """What is left of it after so many seconds in which it was not confirmed: synchronisation fades."""
        share = 0.5 ** (max(seconds, 0.0) / HALF_LIFE)
        values = self.params._asdict()
        faded = {name: values[name] * share for name in _SYNC if values[name] is not None}
        return replace(self, params=self.params._replace(**faded))

    def refuted(self, rows: ProfileRows) -> bool:
        """Whether measured synchronising passes contradict it; they are judged by how far their placements reach."""
        if rows.gpus.size == 0:
            return False
        predicted = step_time(self.params, rows.nodes, rows.gpus, rows.local_batch, racks=rows.racks)
        off = np.log(rows.final / predicted)
        reach = np.select([rows.gpus < 2, rows.nodes < 2, rows.racks < 2], [0, 1, 2], 3)
        for kind in np.unique(reach):
            chosen = reach == kind
            weights = rows.weights[chosen]
            if weights.sum() >= EVIDENCE and abs(np.average(off[chosen], weights=weights)) > math.log(
                REFUTED
            ):
                return True
        return False


@dataclass(frozen=True, slots=True)
class Introduction:
    """Which training this is, and who wants to hear what earlier runs of it have measured."""

    fingerprint: str
    gpu_type: str
    learn: Callable[[Any], None]
    """Called once, from the reporter's thread, with `prior_v1`'s answer."""


def introduction(
    model: Any, limits: BatchLimits, profile: StepProfile, environ: Mapping[str, str] = os.environ
) -> Introduction | None:
    """How a training introduces itself; what is heard goes into its profile. None with `#POLLUX prior=no`."""
    if environ.get("POLLUX_PRIOR", "").strip().lower() in ("no", "false", "0", "off"):
        return None

    def learn(answer: Any) -> None:
        prior = Prior.from_answer(answer)
        if prior is not None:
            profile.learn(prior)
            logger.info("earlier runs have measured up to %d GPUs: begun with their fit", prior.gpus)

    return Introduction(fingerprint(model, limits), profile.gpu_type, learn)


def kept(known: Known | None, profile: StepProfile) -> ThroughputParams | None:
    """The fit of the attempt before, where it was measured on GPUs of this type."""
    return None if known is None or profile.of_other_type else known.params
