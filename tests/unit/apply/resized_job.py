"""One job on one node or two, its moves, its companion, its reports."""

from __future__ import annotations

from typing import Any

from pollux.goodput import BatchLimits
from polluxd.model import JobState, Move, Node, Placement, Report, Step
from polluxd.slurm.protocol import Companion, SlurmJob
from tests.build import move as build_move
from tests.build import slurm_job

ONE, BOTH = Placement(("n1",), 4), Placement(("n1", "n2"), 4)
NODES = (Node("n1", 4, cpus=64), Node("n2", 4, cpus=64), Node("n3", 4, cpus=64))


def job(at: Placement, state: JobState = JobState.RUNNING, **more: Any) -> SlurmJob:
    return slurm_job(
        **{"state": state, "at": at, "name": "train", "account": "", "qos": "", "batch_host": "n1", **more}
    )


def companion(at: tuple[str, ...] = (), state: JobState = JobState.RUNNING, **more: Any) -> SlurmJob:
    place = Placement(at, 4) if at else Placement()
    return job(place, state, job_id=9, companion=Companion(7, 0, 5), **more)


def move(step: Step, *, grow: bool, path: str = "resize", **more: Any) -> Move:
    source, target = (ONE, BOTH) if grow else (BOTH, ONE)
    return build_move(path, source, target, step, {Step.PLANNED: 1.0}, id=5, **more)


def says(**more: Any) -> Report:
    return Report(**{"attempt": 0, "at": 1.0, "limits": BatchLimits(32, 1024, 8, 128), **more})
