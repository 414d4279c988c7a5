"""A prior: step times that earlier runs of the same training measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pollux.goodput import ThroughputParams, step_time
from pollux.tuning.measurements import ProfileRows

HALF_LIFE = 600.0
"""Half-life of the prior's synchronisation times [s]: a wrong time would keep a job from more GPUs, and so from
measuring it."""

REFUTED = 2.0
"""A prior that is off by more than this factor, on any kind of placement, belongs to another training."""

EVIDENCE = 8.0
"""Measured steps on one kind of placement before they can refute the prior."""

_SYNC = ("alpha_local", "beta_local", "alpha_node", "beta_node", "alpha_rack", "beta_rack")


@dataclass(frozen=True)
class Prior:
    """The fit of earlier runs."""

    params: ThroughputParams
    gpus: int
    """Most GPUs of its measurements."""
    nodes: int

    @classmethod
    def from_answer(cls, answer: Any) -> Prior | None:
        """Read the answer of `prior_v1`. None for an empty or an impossible answer."""
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
        """Return the prior after `seconds` without a run that confirms it.

        Its synchronisation times fall by half in each `HALF_LIFE`.
        """
        share = 0.5 ** (max(seconds, 0.0) / HALF_LIFE)
        values = self.params._asdict()
        faded = {name: values[name] * share for name in _SYNC if values[name] is not None}
        return replace(self, params=self.params._replace(**faded))

    def refuted(self, rows: ProfileRows) -> bool:
        """Whether measured synchronising passes contradict it.

        Passes on one GPU, one node, several nodes and several racks are judged separately.
        """
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
