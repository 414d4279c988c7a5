"""Orders to polluxd: `polluxctl pause` and `resume`, and `pin`, `unpin` and `cancel-move` for one job."""

from __future__ import annotations

import typer

from polluxd.errors import PolluxError
from polluxd.model import Move, Step

from . import access
from .access import ConfigOption, JobArgument


def _set_pin(job: int, config: ConfigOption, *, pinned: bool) -> None:
    store, _ = access.open_store(config)
    if not store.set_pin(job, access.who(), pinned=pinned):
        raise PolluxError(
            f"job {job} is not known to polluxd, or has ended (`polluxctl jobs` lists those that it manages)"
        )


def pin(job: JobArgument, config: ConfigOption = None) -> None:
    """Keep a job's GPUs until `unpin`. A waiting job starts first.

    Once the job runs, polluxd neither moves nor stops it, even if its node is drained.
    """
    _set_pin(job, config, pinned=True)
    typer.echo(
        f"job {job} is pinned until `polluxctl unpin {job}`: once it runs, polluxd neither moves nor stops it; a move "
        f"that has begun goes on (`polluxctl cancel-move {job}`)"
    )


def unpin(job: JobArgument, config: ConfigOption = None) -> None:
    """Let polluxd move a job again."""
    _set_pin(job, config, pinned=False)
    typer.echo(f"job {job} may be moved again")


def cancel_move(job: JobArgument, config: ConfigOption = None) -> None:
    """Take back a job's move while the job still runs where it was.

    Exit status 1: the job has no move, has left its GPUs already, or was resized in place. Then nothing changes.
    """
    store, _ = access.open_store(config)
    move = store.cancel_move(job, access.who())
    if move is None:
        raise PolluxError(f"job {job} has no move under way (`polluxctl moves {job}`)")
    if not move.revocable:
        raise PolluxError(f"job {job} {_beyond(move)} (step {move.step}): too late")
    waits = " within 2 minutes, having drained already" if move.step is Step.CHECKPOINTED else ""
    typer.echo(
        f"move {move.id} of job {job} to {move.target} is taken back: it trains on at {move.source}{waits}"
        if move.source
        else f"the start of job {job} on {move.target} is taken back"
    )


def _beyond(move: Move) -> str:
    """What has happened that cannot be taken back."""
    if move.grows:
        return f"is growing to {move.target}: the new nodes are joining it"
    if move.in_allocation:
        return f"has shrunk to {move.target} already"
    left = f"has left {move.source} already" if move.source else "has been told to start"
    return f"{left} and {f'will start on {move.target}' if move.target else 'waits for GPUs'}"


def _set_paused(config: ConfigOption, *, paused: bool) -> None:
    access.open_store(config)[0].set_settings({"paused": paused}, access.who())


def pause(config: ConfigOption = None) -> None:
    """Start, move and stop nothing more until `resume`."""
    _set_paused(config, paused=True)
    typer.echo(
        "paused until `polluxctl resume`: polluxd starts, moves and stops nothing; moves that have begun are finished, "
        "running jobs run on, decisions are recorded; waiting jobs start as plain Slurm jobs when their lease lapses"
    )


def resume(config: ConfigOption = None) -> None:
    """Let polluxd act again."""
    _set_paused(config, paused=False)
    typer.echo("resumed")
