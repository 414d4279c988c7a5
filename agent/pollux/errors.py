"""The errors of the job side.

    PolluxAgentError
    |-- BatchError          batch sizes or their bounds contradict each other, the data, or the world size
    |-- DataError           the dataset, sampler or loader state cannot give every sample exactly once
    |-- StateError          the training state holds an object that no checkpoint can hold
    |-- CheckpointError     a checkpoint could not be written, or none here can be used
    |   `-- ForeignCheckpoint   the checkpoint belongs to another job or another model
    |-- RestartLoop         several restarts in a row ended without a new checkpoint
    |-- LaunchError         the launcher cannot start the workers
    |-- UnsupportedTorch    this release of torch lacks an internal that the agent uses
    |-- OutOfMemory         a rank ran out of GPU memory; all ranks start again with a smaller batch
    |-- LoopMistake         the training loop calls something where it does harm
    |-- SearchError         a search, a trial's suggestion or its value is not usable
    |-- RanksDiffer         ranks hold different parameters
    `-- RankLost            a rank ended, does not answer, or never joined

A class's docstring is its default message. Messages say what was expected, what came, and what to do.
"""

from __future__ import annotations

RETRY_STATUS = 75
"""Exit status of a rank that asks the launcher to start all ranks again (EX_TEMPFAIL of sysexits.h)."""

LEFT_STATUS = 76
"""Exit status of a rank that a resize removes; nothing has failed."""

STOPPED_STATUS = 143
"""Exit status of a rank that was asked to end and has saved (128 + SIGTERM, as if SIGTERM had ended it)."""


class PolluxAgentError(Exception):
    """The training agent could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class BatchError(PolluxAgentError, ValueError):
    """The batch sizes are not usable."""


class DataError(PolluxAgentError):
    """The dataset or the loader's saved state is not usable."""


class StateError(PolluxAgentError, TypeError):
    """The training state holds an object that a checkpoint cannot hold."""


class CheckpointError(PolluxAgentError):
    """The checkpoint could not be written or read; earlier ones remain."""


class ForeignCheckpoint(CheckpointError):
    """The checkpoint, left as it is, belongs to another job or model."""


class RestartLoop(PolluxAgentError):
    """Several restarts in a row ended without a new checkpoint."""


class LoopMistake(PolluxAgentError):
    """The training loop calls something where it does harm."""


class SearchError(PolluxAgentError):
    """The search cannot be used."""


class RanksDiffer(PolluxAgentError):
    """Ranks of this job hold different parameters."""


class LaunchError(PolluxAgentError):
    """The workers could not be started."""


class UnsupportedTorch(PolluxAgentError):
    """This release of torch lacks an internal that the agent uses."""


class OutOfMemory(PolluxAgentError):
    """A rank ran out of GPU memory; the next start uses a smaller batch."""

    exit_status = RETRY_STATUS


class RankLost(PolluxAgentError):
    """A rank of this job has ended or does not answer."""
