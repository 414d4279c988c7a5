"""The interface between polluxd and Slurm.

`scontrol.ScontrolClient`, `pyslurm_client.PyslurmClient` and `fake.FakeSlurm` implement it.

Times are POSIX timestamps (UTC). Memory is in MB, as Slurm counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from polluxd.model import JobSpec, JobState, Node
from polluxd.slurm.demands import Demands
from polluxd.slurm.limits import Limits
from polluxd.slurm.rules import Rules


@dataclass(frozen=True, slots=True)
class Companion:
    """What a companion job says about itself.

    A companion is a worker-only job that lends further whole nodes to a running job. These values come from the user:
    `polluxd.apply.companions` checks them against the parent and its moves.
    """

    parent: int
    """Job id."""
    attempt: int
    """Restart count of the parent."""
    move: int
    """The parent's growing move that it was submitted for."""
    nonce: str = ""
    """The nonce of the order; empty: a version of the submission hook without nonces wrote the comment."""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """One job as slurmctld describes it; ours (`spec` is not None) or not."""

    job_id: int
    name: str
    user: str
    uid: int
    account: str
    partition: str
    qos: str
    state: JobState
    raw_state: str
    """Slurm's own word, such as TIMEOUT for what is FAILED here."""
    reason: str
    restart_count: int
    submit_time: float
    """When the user submitted it. (Slurm's own SubmitTime moves on with every requeue.)"""
    queued_at: float = 0.0
    """When it came into the queue: at its submission, or at its last requeue [POSIX s]."""
    start_time: float | None = None
    """When this attempt started; None while it waits."""
    eligible_time: float | None = None
    """While it waits: when it may start, which is the end of its lease."""
    end_time: float | None = None
    """When it ended; None before."""
    time_limit_s: float | None = None
    """None: unlimited. Each attempt has the whole limit."""
    deadline: float | None = None
    """When the job must have ended (--deadline). Slurm cancels a waiting job that could not."""
    nodes: tuple[str, ...] = ()
    """Nodes held, sorted."""
    gpus_per_node_held: Mapping[str, int] = field(default_factory=dict)
    cpus_per_node_held: Mapping[str, int] = field(default_factory=dict)
    requested_gpus_per_node: int | None = None
    """None: the job asked in another way (--gpus=N)."""
    held_by_user: bool = False
    """Held (`scontrol hold`, by the user or an administrator): not ours to start. A running job goes on, and would not
    start again after a requeue."""
    dependent: bool = False
    """Waits for another job (--dependency)."""
    begin_time: float | None = None
    """The user's own --begin; None where there is none."""
    admin_comment: str = ""
    spec: JobSpec | None = None
    """What the job asks of Pollux; None: the job did not opt in and is left alone."""
    left_alone: str = ""
    """Why polluxd leaves a job alone that opted in; empty: it does not."""
    batch_host: str = ""
    """The node that its batch script runs on, which no shrink may give back."""
    mem_per_gpu_mb: int = 0
    """Memory that Slurm gives it with each GPU, by whatever option or default; 0: not known."""
    tres: Mapping[str, int] = field(default_factory=dict)
    """What it holds, or asks for while it waits, as Slurm's limits count it: `gres/gpu`, `cpu`, `node`."""
    licenses: Mapping[str, int] = field(default_factory=dict)
    demands: Demands = field(default_factory=Demands)
    priority: int = 0
    """Slurm's; 0: not known, or held."""
    planned_nodes: tuple[str, ...] = ()
    """While it waits: the nodes that Slurm plans to start it on."""
    array: tuple[int, int] | None = None
    """Of a task of a job array: the array's id and the task's number."""
    tasks: tuple[int, ...] = ()
    """Tasks that wait in one record of Slurm: the renewal of their leases gives each a record of its own. Empty for a
    job that can be placed."""
    companion: Companion | None = None
    """Set for a companion job, which users, plans and lists do not see as a job of its own."""
    companions: tuple[SlurmJob, ...] = ()
    """The companions that have joined the job. Their nodes, GPUs and CPUs are then included in `nodes` and in the
    fields of what the job holds per node (`polluxd.apply.companions.gather`)."""

    @property
    def base(self) -> tuple[str, ...]:
        """Nodes of the job's own allocation, sorted: those that it holds without its companions' nodes."""
        lent = {name for companion in self.companions for name in companion.gpus_per_node_held}
        return tuple(sorted(name for name in self.gpus_per_node_held if name not in lent))

    def kept_back(self, now: float) -> bool:
        """Tell whether the job waits and is not to start yet: its user says so."""
        later = (self.begin_time or 0.0) > now
        return self.state is JobState.PENDING and (self.held_by_user or self.dependent or later)


@dataclass(frozen=True, slots=True)
class ClusterState:
    """Nodes and jobs at one moment.

    `Node.foreign_gpus` counts what jobs without a spec hold there.
    """

    taken_at: float
    nodes: tuple[Node, ...]
    jobs: tuple[SlurmJob, ...]
    unreadable: Mapping[str, str] = field(default_factory=dict)
    """Records that could not be understood (`job 7`, `node n1`): why. Such a job is left alone and its GPUs count as
    foreign; such a node is closed for placement."""
    rules: Rules = field(default_factory=Rules)
    limits: Limits = field(default_factory=Limits)
    kept_off_s: float = 0.0
    """For how long after its end an attempt bars its nodes to the job's next one (`slurm.site_defaults`)."""

    def reach(self, partition: str) -> frozenset[str]:
        """Return the nodes that a `--partition` leads to; all of them where it names no known partition."""
        named = [known.nodes for known in self.rules.named(partition)]
        return frozenset().union(*named) if named else frozenset(node.name for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The geometry that a pending job is to request.

    The job requests one task (the launcher) on each of exactly these nodes.
    """

    nodes: tuple[str, ...]
    gpus_per_node: int
    cpus_per_task: int
    mem_per_node_mb: int | None = None
    """None leaves the memory request as it is."""
    gpu_type: str = ""
    """Empty: any."""
    min_cpus: int = 1
    """CPUs that the user wants on each node at least (--mincpus)."""
    anywhere: bool = False
    """Slurm chooses the nodes: of `nodes` only the number counts."""

    def __post_init__(self) -> None:
        if not self.nodes or len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"a geometry names each of its nodes once, and at least one: {self.nodes!r}")
        if self.gpus_per_node < 1 or self.cpus_per_task < 1:
            raise ValueError(
                f"a geometry has a GPU and a CPU per node, not {self.gpus_per_node} and {self.cpus_per_task}"
            )


class SlurmClient(Protocol):
    """The requests that the daemon makes to Slurm.

    All calls raise SlurmUnavailable (no answer within the time limit: the request may or may not have been applied;
    read again before repeating it), SlurmRefused (Slurm said no) or SlurmGarbled (the answer makes no sense). The
    writing calls refuse jobs that did not opt in.
    """

    def observe(self) -> ClusterState:
        """Read all nodes and jobs, in a number of requests that does not depend on theirs."""

    def jobs(self, job_ids: Sequence[int]) -> dict[int, SlurmJob]:
        """Read the present state of these jobs, in one request; those that Slurm no longer knows are left out."""

    def requeue(self, job_id: int) -> None:
        """End the job and put it back into the queue, unless it has ended or is waiting.

        A job that is COMPLETING is refused: on a node that is DOWN, its requeue would end slurmctld (24.11.5 to
        26.05.3).
        """

    def run_again(self, job_id: int) -> None:
        """Put a failed job that Slurm remembers back into the queue, unless its processes still end."""

    def configure(
        self, job_id: int, geometry: Geometry, *, start: bool, time_limit_s: float | None = None
    ) -> None:
        """Give a waiting job another geometry.

        With `start`, also end the job's lease, so that it starts now. `time_limit_s` is rounded up to whole minutes;
        None keeps the time limit. After an error the request may be applied in part; repeating it is safe.
        """

    def release(self, job_id: int) -> None:
        """Give a job back its priority, which Slurm took (BadConstraints)."""

    def limit_time(self, job_id: int, seconds: float) -> None:
        """Give a job another time limit, rounded up to whole minutes."""

    def probe(self, job_id: int) -> None:
        """Update the job without a change: the site's hooks and rights may refuse that, as they would its moves."""

    def ask_limits(self) -> None:
        """Read the limits at the next observation, however new the last answer is: a training is to be stopped."""

    def can_shrink(self) -> bool:
        """Tell whether Slurm lets a running job give nodes back.

        This takes slurmdbd. Raises nothing. The answer is remembered, so that Slurm is asked seldom.
        """

    def shrink(self, job_id: int, nodes: Sequence[str]) -> None:
        """Shrink a running job to these of its nodes.

        The batch host must be among them. Slurm kills the job's processes on its other nodes at once. Does nothing
        where the job holds exactly these nodes.
        """

    def cancel(self, job_ids: Sequence[int]) -> None:
        """Cancel companions, waiting or running, and no other job; those that have ended are passed over."""

    def renew(self, job_ids: Sequence[int], until: float) -> None:
        """Keep waiting jobs back until this POSIX time; those that no longer wait are passed over."""
