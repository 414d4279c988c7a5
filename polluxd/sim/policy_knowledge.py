"""What policy `pollux` knows and does in a simulation.

By default, what the daemon knows and does.
"""

from __future__ import annotations

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from polluxd.config.settings import MoveSettings, PolicySettings
from polluxd.config.value_types import Duration, Exponent, Kappa, Objective, Share, StartGpus


@dataclass(
    frozen=True,
    slots=True,
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True),
)
class Knowledge:
    """What policy `pollux` knows and does. By default, what the daemon does."""

    objective: Objective = PolicySettings().objective
    """What a plan optimises: `completion-time` or `fair-share`."""
    kappa: Kappa = PolicySettings().kappa
    """Objective `completion-time`: weight of the last job to end."""
    reacts: bool = True
    """It decides when jobs arrive and end, too, not only every interval."""
    remembers: bool = True
    """The fits that earlier runs of the same application left are known from a job's first start on."""
    start_gpus: StartGpus = PolicySettings().start_gpus
    """Most GPUs that a job starts with."""
    gpu_speeds: bool = True
    """One speed per GPU type is configured (the daemon's `slurm.gpu_speeds`), for jobs not measured there yet."""
    daemon: bool = False
    """polluxd's own controller runs, in virtual time: see the simulator's page."""
    remaining_work: bool = True
    """The training length that users declare is known. Without it, set `remaining_work_power` to 0, too."""
    waiting_power: Exponent = PolicySettings().waiting_power
    """Exponent of a waiting job's slowdown in its weight."""
    remaining_work_power: Exponent = PolicySettings().remaining_work_power
    """Exponent of remaining work in a job's weight."""
    hysteresis: Share = PolicySettings().hysteresis
    """A running job moves only where its predicted goodput rises by more than this share."""
    cooldown: Duration = MoveSettings().cooldown_s
    """Seconds for which a moved job is left alone once it trains again (the daemon's `moves.cooldown_s`), and no
    longer than the move took."""
