"""Every error that the job side raises on purpose.

    PolluxAgentError
    |-- BatchError          batch sizes or their bounds contradict each other, the data, or the world size
    |-- DataError           the dataset, sampler or loader state cannot give every sample exactly once
    |-- StateError          the training state holds an object that no checkpoint can hold
    |-- CheckpointError     a checkpoint could not be written, or none that stands here can be used
    |   `-- ForeignCheckpoint   it belongs to another job or another model
    |-- RestartLoop         restarts came to nothing, one after the other
    |-- LaunchError         the launcher cannot start the workers
    |-- UnsupportedTorch    this release of torch lacks an internal that the agent uses
    |-- OutOfMemory         a rank ran out of GPU memory; all start again with a smaller batch
    `-- RankLost            a rank left, or never came

A class's docstring is its default message. Messages say what was expected, what came, and what to do.
"""

from __future__ import annotations

RETRY_STATUS = 75
"""Exit status of a rank that asks for all ranks to be started again (EX_TEMPFAIL of sysexits.h)."""

LEFT_STATUS = 76
"""Exit status of a rank that a resize has dropped: its part is done, and nothing has failed."""

RELAUNCH_STATUS = 77
"""Exit status of a rank that is to start again in the same allocation, after others have left it."""


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
    """The checkpoint could not be written or read.

    Any earlier one still stands.
    """


class ForeignCheckpoint(CheckpointError):
    """The checkpoint belongs to another job or another model.

    It was left alone.
    """


class RestartLoop(PolluxAgentError):
    """One restart after the other ended without a new checkpoint."""


class LaunchError(PolluxAgentError):
    """The workers could not be started."""


class UnsupportedTorch(PolluxAgentError):
    """This release of torch lacks an internal that the agent uses."""


class OutOfMemory(PolluxAgentError):
    """A rank ran out of GPU memory.

    Started again, all ranks use a smaller batch per GPU.
    """

    exit_status = RETRY_STATUS


class RankLost(PolluxAgentError):
    """A rank of this job has ended or does not answer."""
