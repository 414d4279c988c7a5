"""Every error that polluxd raises on purpose.

A class's docstring is its default message. Messages say what was expected, what came, and what to do.
"""

from __future__ import annotations


class PolluxError(Exception):
    """polluxd could not do what was asked."""

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or "").strip())


class ConfigError(PolluxError):
    """The configuration is not usable."""


class DirectiveError(PolluxError):
    """A #POLLUX directive is not usable."""


class SlurmError(PolluxError):
    """Slurm could not be used."""


class SlurmUnavailable(SlurmError):
    """Slurm does not answer. polluxd tries again in the next cycle."""

    # As far as polluxd knows, the call changed nothing in Slurm.


class SlurmRefused(SlurmError):
    """Slurm refused the request."""

    def __init__(self, said: str) -> None:
        # A site's hook may repeat a user's words. In what polluxd writes of a move, a semicolon ends a sentence.
        super().__init__(said.replace(";", ","))


class SlurmGarbled(SlurmError):
    """polluxd cannot understand Slurm's answer and took no action on it."""


class StoreError(PolluxError):
    """The database could not be used."""


class StoreUnavailable(StoreError):
    """Postgres does not answer; jobs run on. The next cycle tries again."""


class StoreRejected(StoreError):
    """Postgres refused the statement."""


class ReportError(PolluxError):
    """A job's report is not usable; the job keeps its last good one."""


class LeaderLost(PolluxError):
    """Another polluxd leads now; this one stops acting."""
