"""The rows: what refuses, and which act of polluxd it refuses.

Each row has a partition of its own, with one node or two of four GPUs, and an account and a QOS of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

SECONDS_OF_LIMIT = "SBATCH --time=60"


class Hands(Protocol):
    """What a row does to its cluster."""

    partition: str
    nodes: Sequence[str]
    account: str
    job_id: int

    def command(self, *words: str) -> str: ...

    def update(self, *words: str) -> None: ...

    def plain(self, name: str, *lines: str, gpus: int = 0) -> None: ...

    def lock_checkpoints(self) -> None: ...


def nothing(hands: Hands) -> None:
    """The cause is there from the beginning."""


class Row(NamedTuple):
    """One cause and one act.

    Args:
        lines: the job's own, of #SBATCH and #POLLUX.
        qos: limits of its QOS, for sacctmgr.
        account: limits of its account.
        user: limits of its user's association.
        before: done before the submission.
        during: done once the training has made steps.
        nodes: of its partition.
        trainer: options of the trainer.
        wrap: options of `pollux wrap`.
    """

    cause: str
    act: str = "grow"
    lines: Sequence[str] = ()
    qos: Sequence[str] = ()
    account: Sequence[str] = ()
    user: Sequence[str] = ()
    before: Callable[[Hands], None] = nothing
    during: Callable[[Hands], None] = nothing
    nodes: int = 1
    trainer: str = "--saves-on-term"
    wrap: str = "--signal TERM"
    grows: bool = False
    """Nothing refuses: the training is to grow, which shows that the other rows could see a move."""


def _each(*acts: Callable[[Hands], None]) -> Callable[[Hands], None]:
    """One act after the other."""

    def act(hands: Hands) -> None:
        for one in acts:
            one(hands)

    return act


def _hold(hands: Hands) -> None:
    hands.command("scontrol", "hold", str(hands.job_id))


def _requeue(hands: Hands) -> None:
    hands.command("scontrol", "requeue", str(hands.job_id))


def _reboot(hands: Hands) -> None:
    hands.command("scontrol", "reboot", "ASAP", hands.nodes[0])


def _lock(hands: Hands) -> None:
    hands.lock_checkpoints()


def _scontrol(*words: str) -> Callable[[Hands], None]:
    """An update of the partition."""
    return lambda hands: hands.update(f"PartitionName={hands.partition}", *words)


def _of_job(*words: str) -> Callable[[Hands], None]:
    return lambda hands: hands.update(f"JobId={hands.job_id}", *words)


def _node(*words: str) -> Callable[[Hands], None]:
    return lambda hands: hands.update(f"NodeName={hands.nodes[-1]}", *words)


def _reservation(*words: str) -> Callable[[Hands], None]:
    def reserve(hands: Hands) -> None:
        name = f"ReservationName=r_{hands.partition}_{hands.account}"
        where = f"Nodes={','.join(hands.nodes)}"
        hands.command("scontrol", "create", "reservation", name, where, "Users=root", *words)

    return reserve


def _colleague(hands: Hands) -> None:
    """A plain job of the same account wants GPUs."""
    hands.plain("colleague", gpus=2)


def _without_cpus(hands: Hands) -> None:
    """A plain job without GPUs takes most CPUs."""
    hands.plain("cpus", "SBATCH --ntasks=6")


def _waits_for_licence(hands: Hands) -> None:
    hands.plain("licensed", "SBATCH --licenses=matlab:1")


_MINUTES = {
    "QOS MaxTRESMinsPerJob of GPUs": ("MaxTRESMinsPerJob=gres/gpu=150", ()),
    "QOS GrpTRESRunMins of GPUs": ("GrpTRESRunMins=gres/gpu=150", ()),
    "QOS GrpTRESMins of GPUs": ("GrpTRESMins=gres/gpu=150", ()),
    "QOS GrpTRESRunMins of CPUs": ("GrpTRESRunMins=cpu=150", ()),
}
_OF_QOS = {
    "QOS MaxTRESPerJob of GPUs": "MaxTRESPerJob=gres/gpu=2",
    "QOS MaxTRESPerNode of GPUs": "MaxTRESPerNode=gres/gpu=2",
    "QOS MaxTRESPerUser of GPUs": "MaxTRESPerUser=gres/gpu=2",
    "QOS MaxTRESPerAccount of GPUs": "MaxTRESPerAccount=gres/gpu=2",
    "QOS GrpTRES of GPUs": "GrpTRES=gres/gpu=2",
    "QOS MaxTRESPerJob of CPUs": "MaxTRESPerJob=cpu=2",
    "QOS GrpTRES of CPUs": "GrpTRES=cpu=2",
    "QOS GrpTRES of memory": "GrpTRES=mem=1000M",
    "QOS MaxTRESPerJob of billing": "MaxTRESPerJob=billing=2",
    "QOS MaxJobsAccruePerUser": "MaxJobsAccruePerUser=1",
    "QOS MaxSubmitJobsPerUser": "MaxSubmitJobsPerUser=1",
    "QOS GrpJobs": "GrpJobs=1",
    "QOS MaxWall of an hour": "MaxWall=01:00:00",
}
_OF_ACCOUNT = {
    "account GrpTRES of GPUs": "GrpTRES=gres/gpu=2",
    "account MaxTRESPerJob of GPUs": "MaxTRESPerJob=gres/gpu=2",
    "account GrpTRESRunMins of GPUs": "GrpTRESRunMins=gres/gpu=150",
    "account MaxTRESMinsPerJob of GPUs": "MaxTRESMinsPerJob=gres/gpu=150",
}

GROW = (
    Row("none", grows=True),
    *(Row(name, lines=(SECONDS_OF_LIMIT, *more), qos=(words,)) for name, (words, more) in _MINUTES.items()),
    *(Row(name, lines=(SECONDS_OF_LIMIT,), qos=(words,)) for name, words in _OF_QOS.items()),
    Row("QOS DenyOnLimit with MaxTRESPerJob", qos=("MaxTRESPerJob=gres/gpu=2", "flags=DenyOnLimit")),
    *(Row(name, lines=(SECONDS_OF_LIMIT,), account=(words,)) for name, words in _OF_ACCOUNT.items()),
    Row("user MaxTRESPerJob of GPUs", user=("MaxTRESPerJob=gres/gpu=2",)),
    Row("user GrpTRES of GPUs", user=("GrpTRES=gres/gpu=2",)),
    Row("memory per GPU fills the node", lines=("SBATCH --mem-per-gpu=1500",)),
    Row("--mem=0", lines=("SBATCH --mem=0",)),
    Row("--exclusive", lines=("SBATCH --exclusive",)),
    Row("free GPUs without CPUs", before=_without_cpus),
    Row("two threads of a core for each GPU", lines=("SBATCH --cpus-per-task=4 --hint=nomultithread",)),
    Row("QOS MaxTRESPerJob of nodes", nodes=2, qos=("MaxTRESPerJob=node=1",)),
    Row("partition MaxNodes lowered", nodes=2, during=_scontrol("MaxNodes=1")),
    Row("partition MaxTime lowered", lines=(SECONDS_OF_LIMIT,), during=_scontrol("MaxTime=30")),
    Row("partition DOWN", during=_scontrol("State=DOWN")),
    Row("partition DRAIN", during=_scontrol("State=DRAIN")),
    Row("partition allows no account any more", during=_scontrol("AllowAccounts=root")),
    Row("partition allows no QOS any more", during=_scontrol("AllowQos=high")),
    Row(
        "reservation begins in 10 minutes",
        lines=(SECONDS_OF_LIMIT,),
        during=_reservation("StartTime=now+10minutes", "Duration=60", "Flags=IGNORE_JOBS"),
    ),
    Row(
        "maintenance begins in 5 minutes",
        lines=(SECONDS_OF_LIMIT,),
        during=_reservation("StartTime=now+5minutes", "Duration=60", "Flags=MAINT,IGNORE_JOBS"),
    ),
    Row(
        "licence that another job waits for", lines=("SBATCH --licenses=matlab:1",), during=_waits_for_licence
    ),
    Row("node drained", during=_node("State=DRAIN", "Reason=row")),
    Row("node to reboot", during=_reboot),
    Row("--exclude of the other node", nodes=2, lines=("SBATCH --exclude={last}",)),
    Row("held by its user", during=_hold),
    Row("checkpoint folder made read-only", during=_lock),
    Row("trainer that starts at no other size", trainer="--saves-on-term --rigid"),
    Row("trainer that never saves", trainer="--save-every 1000000", wrap=""),
    Row("account's limit that a colleague needs", account=("GrpTRES=gres/gpu=4",), during=_colleague),
    Row("two minutes left", lines=("SBATCH --time=2",)),
    Row("requeued by its user", during=_requeue),
)

_SHRUNK = {
    "a plain job needs GPUs": Row("", during=_colleague),
    "and QOS MaxTRESPerJob of GPUs": Row("", qos=("MaxTRESPerJob=gres/gpu=4",), during=_colleague),
    "and QOS GrpTRES of GPUs": Row("", qos=("GrpTRES=gres/gpu=4",), during=_colleague),
    "and QOS GrpTRESRunMins": Row(
        "", lines=(SECONDS_OF_LIMIT,), qos=("GrpTRESRunMins=gres/gpu=400",), during=_colleague
    ),
    "and account GrpTRES": Row("", account=("GrpTRES=gres/gpu=4",), during=_colleague),
    "and partition DRAIN": Row("", during=_each(_colleague, _scontrol("State=DRAIN"))),
    "and a hold": Row("", during=_each(_hold, _colleague)),
    "and a read-only checkpoint folder": Row("", during=_each(_lock, _colleague)),
    "and a trainer of one size": Row("", trainer="--saves-on-term --rigid", during=_colleague),
    "and a trainer that never saves": Row("", trainer="--save-every 1000000", wrap="", during=_colleague),
}
SHRINK = tuple(row._replace(cause=cause, act="shrink") for cause, row in _SHRUNK.items())
ROWS = (*GROW, *SHRINK)
