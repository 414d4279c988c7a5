"""One attempt of a job: its environment when the processes start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pollux.slurm_job.access import GatewayAccess, read_access
from pollux.slurm_job.agent_settings import AgentSettings
from pollux.slurm_job.environment import Times, checkpoint_directory, number, stands_alone, yes


@dataclass(frozen=True)
class Attempt:
    """One start of this job's processes."""

    access: GatewayAccess | None
    """The way to the scheduler; None outside a Pollux job."""
    directory: Path | None
    """Folder of this job's checkpoints; None without any."""
    seed: int
    alone: bool
    """No scheduler: the GPUs here are all that the job can adapt to."""
    adaptive: bool
    """Whether the batch size may change, unless the script decides."""
    resized_for: int
    """Number of the newest resize at the start of these processes; 0: none."""
    times: Times
    settings: AgentSettings

    @classmethod
    def begin(
        cls,
        checkpoint_dir: str | os.PathLike[str] | None,
        *,
        seed: int,
        environ: Mapping[str, str] = os.environ,
    ) -> Attempt:
        """Read the environment. Raises PolluxAgentError where a variable makes no sense."""
        access, alone = read_access(environ), stands_alone(environ)
        return cls(
            access,
            checkpoint_directory(checkpoint_dir, environ),
            seed,
            alone,
            yes(environ.get("POLLUX_ADAPTIVE"), access is not None or alone),
            int(number(environ, "POLLUX_RESIZED", 0)),
            Times.from_environment(environ),
            AgentSettings.from_environment(environ),
        )
