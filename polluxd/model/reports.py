"""What a job's agent reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pollux.parameters import BatchLimits, NoiseScale, ThroughputParams


@dataclass(frozen=True, slots=True)
class Report:
    """The newest report of a job's agent.

    The boundary has validated it: every number is finite and in range.
    """

    attempt: int
    at: float
    limits: BatchLimits
    params: ThroughputParams | None = None
    """None until the first fit: the policy then uses an optimistic prior."""
    noise: NoiseScale | None = None
    """None until measured: efficiency is then taken as 1 at every batch size up to M0 only."""
    explored_gpus: int = 0
    """Most GPUs the job was ever measured on (0: never measured)."""
    explored_nodes: int = 0
    gpus: int = 0
    nodes: int = 0
    batch_size: int = 0
    """Total batch size M now in use."""
    goodput: float = 0.0
    """Measured throughput x efficiency now [examples/s of M0-equivalent progress]."""
    throughput: float = 0.0
    progress: float = 0.0
    """Scale-invariant steps done."""
    target: float | None = None
    """Scale-invariant steps declared (statistical epochs x |D| / M0), when known."""
    epoch: float = 0.0
    lr_factor: float = 1.0
    checkpointed: bool = False
    """A complete checkpoint of this job exists."""
    first_step_at: float | None = None
    """When this attempt made its first optimizer step; None until then."""
    restart_cost: float | None = None
    """Measured by the agent: last step before to first step after the newest move [s]."""
    params_by_type: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fits by GPU type, where known; `params` holds for every type not named here."""
    gpu_type: str = ""
    """The GPU type that `params` was measured on, as Slurm names it where its nodes are typed; empty: not known."""
    prior_gpus: int = 0
    """Most GPUs measured by earlier runs that `params` still relies on; 0 if none."""
    prior_nodes: int = 0
    assumed_types: frozenset[str] = frozenset()
    """Of `params_by_type`, the types on which this training was never measured: taken from another one's fit."""
    data_wait: float | None = None
    """Share of the training time spent waiting for the data loader."""
    resize: str = "requeue"
    """The fastest way in which the job's size can be changed: `in-place` or `requeue`."""
    resized: int = 0
    """The newest resize in effect, by the id of its `Move`; 0: none in this attempt."""
    refused: int = 0
    """A resize that the agent could not carry out, by its id; 0: none."""
    refused_why: str = ""
    resize_cost: float | None = None
    """Seconds between the optimizer steps before and after the newest resize."""
    search_rank: float | None = None
    """A trial's claimed rank in its search, from 0 to 1 (the best)."""
    most_gpus: int | None = None
    """Most GPUs for the job until polluxd sees progress where it is; None: no such limit. polluxd's own."""
