"""Population-based training: a bad trial goes on from a good one's checkpoint, with perturbed values.

Jaderberg et al., Population Based Training of Neural Networks (2017): truncation selection and perturbation. A trial
keeps its values in Optuna's study, so each copy is a trial of its own, which begins where its parent was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial

READY = 4
"""Steps that a trial makes before it goes on from another one."""
QUANTILE = 4
"""The worst one of so many trials goes on from the best. The paper has 5."""
PERTURBATION = (0.8, 1.2)
"""Of a value, as in the paper."""


def first_step(trial: FrozenTrial) -> int:
    """Return the step at which a trial went on from another one; 0 for other trials."""
    return int(trial.user_attrs.get("first_step", 0))


def better(own: FrozenTrial, others: Sequence[tuple[float, FrozenTrial]]) -> list[FrozenTrial]:
    """Return the running trials that a trial is to go on from, the best first; empty: it goes on as it is.

    `others`: the newest trials of all tasks, this one among them, and what they have gained: after its last step, or
    up to now where they are behind. Who is worse than trials that have made less progress is bad indeed.
    """
    if (own.last_step or 0) - first_step(own) < READY:
        return []
    ranked = sorted(others, key=lambda each: each[0])
    few = len(ranked) // QUANTILE
    gain = next((gain for gain, each in ranked[:few] if each.number == own.number), None)
    if gain is None:
        return []
    return [each for more, each in ranked[::-1][:few] if more > gain and not each.state.is_finished()]


def perturbed(trial: FrozenTrial) -> FrozenTrial:
    """Return a trial with other floats. Other values stay: they may be shapes of what the checkpoint holds."""
    params = dict(trial.params)
    for name, bounds in trial.distributions.items():
        if isinstance(bounds, FloatDistribution):
            value = params[name] * random.choice(PERTURBATION)
            if bounds.step is not None:
                value = bounds.low + bounds.step * round((value - bounds.low) / bounds.step)
            params[name] = min(max(value, bounds.low), bounds.high)
    return create_trial(state=TrialState.RUNNING, params=params, distributions=trial.distributions)


def lineage(trial: FrozenTrial | None) -> dict[str, Any]:
    """Return the attributes that a failed trial's successor takes over."""
    names = ("parent", "first_step", "adopts")
    return {name: trial.user_attrs[name] for name in names if trial and name in trial.user_attrs}
