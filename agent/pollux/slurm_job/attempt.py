"""One attempt of a job: its environment when the processes start."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from pollux.slurm_job.access import GatewayAccess, read_access
from pollux.slurm_job.environment import Times, checkpoint_directory, number, yes
from pollux.slurm_job.runs import UNSEEN
from pollux.slurm_job.shared_folder import of_one_node, why_of_this_attempt
from pollux.slurm_job.trainings import NamedTraining, attached


@dataclass(frozen=True)
class AgentSettings:
    """Intervals and waits of the agent, in seconds unless stated.

    The variable POLLUX_NAME sets the field `name`, such as POLLUX_DRAIN_WAIT the field `drain_wait`.
    """

    exchange_interval: float = 1.0
    """From one exchange of the ranks to the next: soon enough for a drain, at less than 0.1 % of a rank."""
    exchanges_per_reading: float = 10
    """Exchanges from one reading of noise samples to the next. The averages over far more steps do not notice; where
    each step ends in an exchange, each step reads."""
    checkpoint_interval: float = 300.0
    """From one periodic checkpoint to the next."""
    fruitless_restarts: float = 10
    """Automatic restarts in a row that may end without a new checkpoint."""
    drain_wait: float = 120.0
    """Time that a drained job waits for Slurm to end it before it trains on."""
    recruit_wait: float = 120.0
    """Time for all ranks of a companion job to be ready after its submission."""
    memory_share: float = 0.25
    """Share of each node's memory, or of the job's where Slurm limits it, that copies of the training's state may take.
    A larger state is not copied; 0 makes no copies."""
    patience: float = 30.0
    """Time without progress after which a rank says that it waits for others, and where it is; 0: never."""
    gone_wait: float = 20.0
    """Time that rank 0 waits for leaving ranks to end before it acknowledges a shrink."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> AgentSettings:
        """Read the settings. Raises PolluxAgentError where a variable is not a number."""
        default = cls()
        names = [field.name for field in fields(cls)]
        return cls(
            **{name: number(environ, f"POLLUX_{name.upper()}", getattr(default, name)) for name in names}
        )


def next_directory(
    checkpoint_dir: str | os.PathLike[str] | None, name: str | None, environ: Mapping[str, str] = os.environ
) -> Path | None:
    """Return the folder of the checkpoints of the training that this process attaches next."""
    folder = checkpoint_directory(checkpoint_dir, environ)
    return (
        None
        if folder is None
        else folder / attached.next(folder, name, given=checkpoint_dir is not None).name
    )


@dataclass(frozen=True)
class Attempt:
    """One start of this job's processes."""

    access: GatewayAccess | None
    """The way to the scheduler; None outside a Pollux job."""
    directory: Path | None
    """Folder of this training's checkpoints; None without any."""
    training: NamedTraining
    """This training among those of this process."""
    seed: int
    alone: bool
    """No scheduler: the GPUs here are all that the job can adapt to."""
    adaptive: bool
    """Whether the batch size may change, unless the script decides."""
    resized_for: int
    """Number of the newest resize at the start of these processes; 0: none."""
    times: Times
    settings: AgentSettings
    unshared: str = ""
    """In a Pollux job: why the next attempt would not see the folder; empty where nothing shows that."""

    @property
    def key(self) -> str:
        """This training's name among all of its process, the same in each start of the process."""
        return f"{self.directory or ''}:{self.training.name}"

    @classmethod
    def begin(
        cls,
        checkpoint_dir: str | os.PathLike[str] | None,
        *,
        seed: int,
        name: str | None = None,
        times: Times | None = None,
        environ: Mapping[str, str] = os.environ,
        agree: Callable[[list[str]], list[str]] = list,
    ) -> Attempt:
        """Begin a training of this process. `name`: from the user. `agree` returns rank 0's value on every rank.

        Raises PolluxAgentError where a variable makes no sense, or where the process has a training of that name.
        """
        access, alone = read_access(environ), not environ.get("SLURM_JOB_ID")
        folder = checkpoint_directory(checkpoint_dir, environ)
        given = checkpoint_dir is not None
        if environ.get("POLLUX_COMPANION") and attached.first and not given and name is None:
            parents = Path(environ["POLLUX_COMPANION"]).parent.name  # it has decided
            training = attached.add(
                folder, None, agree=lambda _: [parents if parents.startswith("attach-") else "", ""]
            )
        else:
            training = attached.add(folder, name, given=given, agree=agree)
        directory = None if folder is None else folder / training.name
        return cls(
            access,
            directory,
            training,
            seed,
            alone,
            yes(environ, "POLLUX_ADAPTIVE", access is not None or alone),
            int(number(environ, "POLLUX_RESIZED", 0)),
            times or Times.from_environment(environ),
            AgentSettings.from_environment(environ),
            "" if access is None or directory is None else _unshared(directory, environ),
        )


def _unshared(directory: Path, environ: Mapping[str, str]) -> str:
    why = why_of_this_attempt(directory, environ)
    if not why and environ.get(UNSEEN) and of_one_node(directory):
        why = "it lies on a disk of this node, and holds nothing of the attempts before"
    return why
