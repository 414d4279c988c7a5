"""What policy `pollux` knows and does in a simulation.

By default, what the daemon knows and does.
"""

from __future__ import annotations

from dataclasses import dataclass

from polluxd.settings import MoveSettings, Objective, PolicySettings


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Rules and knowledge of the simulated daemon."""

    objective: Objective = PolicySettings().objective
    kappa: float = PolicySettings().kappa
    reacts: bool = True
    """It decides when jobs arrive and end, too, not only every interval."""
    remembers: bool = True
    """The fits that earlier runs of the same application left are known from a job's first start on."""
    start_gpus: int = PolicySettings().start_gpus
    """Most GPUs that a job starts with."""
    gpu_speeds: bool = True
    """One speed per GPU type is configured (the daemon's `slurm.gpu_speeds`), for jobs not measured there yet."""
    checks_reports: bool = False
    """Reports go through the daemon's own checks (`polluxd.trusted_reports`)."""
    remaining_work: bool = True
    """The training length that users declare is known."""
    waiting_power: float = PolicySettings().waiting_power
    remaining_work_power: float = PolicySettings().remaining_work_power
    hysteresis: float = PolicySettings().hysteresis
    cooldown: float = MoveSettings().cooldown_s
    """Seconds for which a moved job is left alone once it trains again (the daemon's `moves.cooldown_s`), and no
    longer than the move took."""
