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

    def submit(self, name: str, *lines: str, gpus: int = 0) -> int: ...

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
        gpus: that its user asks for.
        hook: when the site's hook refuses an update of the job: a condition in Lua on `desc`, `job` and `uid`.
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
    gpus: int = 2
    hook: str = ""
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


def _sacctmgr(kind: str, *words: str) -> Callable[[Hands], None]:
    """Change the limits of the row's QOS, of its account, or of its user."""

    def change(hands: Hands) -> None:
        of = {
            "qos": ("qos", f"q{hands.account[1:]}"),
            "account": ("account", hands.account),
            "user": ("user", "where", "name=nobody", f"account={hands.account}"),
        }
        hands.command("sacctmgr", "-i", "modify", *of[kind], "set", *words)

    return change


def _beside(*lines: str, gpus: int = 0) -> Callable[[Hands], None]:
    """Another job of the same user and account in the same partition, plain unless a line says `POLLUX`."""

    def submit(hands: Hands) -> None:
        hands.submit("beside", *lines, gpus=gpus)

    return submit


_COLLEAGUE = _beside(gpus=2)
_POLLUX_COLLEAGUE = _beside("SBATCH --open-mode=append", "POLLUX min-gpus=2 max-gpus=2", gpus=2)


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
    Row(
        "QOS UsageFactor of 2 and GrpTRESRunMins",
        lines=(SECONDS_OF_LIMIT,),
        qos=("UsageFactor=2", "flags=UsageFactorSafe", "GrpTRESRunMins=gres/gpu=300"),
    ),
    Row("QOS DenyOnLimit with MaxTRESPerJob", qos=("MaxTRESPerJob=gres/gpu=2", "flags=DenyOnLimit")),
    *(Row(name, lines=(SECONDS_OF_LIMIT,), account=(words,)) for name, words in _OF_ACCOUNT.items()),
    Row("user MaxTRESPerJob of GPUs", user=("MaxTRESPerJob=gres/gpu=2",)),
    Row("user GrpTRES of GPUs", user=("GrpTRES=gres/gpu=2",)),
    Row("memory per GPU fills the node", lines=("SBATCH --mem-per-gpu=1500",)),
    Row("--mem=0", lines=("SBATCH --mem=0",)),
    Row("--exclusive", lines=("SBATCH --exclusive",)),
    Row("--gres-flags=enforce-binding", lines=("SBATCH --gres-flags=enforce-binding",)),
    Row("free GPUs without CPUs", before=_beside("SBATCH --ntasks=6")),
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
        "licence that another job waits for",
        lines=("SBATCH --licenses=matlab:1",),
        during=_beside("SBATCH --licenses=matlab:1"),
    ),
    Row(
        "reservation of others begins now",
        during=_reservation("StartTime=now", "Duration=60", "Flags=IGNORE_JOBS"),
    ),
    Row("node whole that another job waits for", during=_beside("SBATCH --exclusive")),
    Row("memory that another job waits for", during=_beside("SBATCH --mem=0")),
    Row("CPUs that another job waits for", during=_beside("SBATCH --ntasks=8")),
    Row("QOS MaxJobsPerUser that another job waits for", qos=("MaxJobsPerUser=1",), during=_beside()),
    Row(
        "QOS GrpTRES of CPUs that another job waits for",
        qos=("GrpTRES=cpu=4",),
        during=_beside("SBATCH --ntasks=3"),
    ),
    Row("QOS MaxTRESPerJob lowered", during=_sacctmgr("qos", "MaxTRESPerJob=gres/gpu=2")),
    Row("QOS MaxWall lowered", lines=(SECONDS_OF_LIMIT,), during=_sacctmgr("qos", "MaxWall=00:10:00")),
    Row("QOS GrpJobs lowered to 0", during=_sacctmgr("qos", "GrpJobs=0")),
    Row("QOS GrpTRES lowered below what it holds", during=_sacctmgr("qos", "GrpTRES=gres/gpu=1")),
    Row("account MaxJobs lowered to 0", during=_sacctmgr("account", "MaxJobs=0")),
    Row("account GrpSubmitJobs lowered to 0", during=_sacctmgr("account", "GrpSubmitJobs=0")),
    Row("QOS taken from its user", during=_sacctmgr("user", "defaultqos=normal", "qos=normal")),
    Row(
        "node's features changed",
        lines=("SBATCH --constraint=ib",),
        during=_node("AvailableFeatures=eth", "ActiveFeatures=eth"),
    ),
    Row("partition made exclusive", during=_scontrol("OverSubscribe=EXCLUSIVE")),
    Row("requeue forbidden while it runs", during=_of_job("Requeue=0")),
    Row("site's hook refuses more GPUs", hook="desc.min_cpus == 4"),
    Row("site's hook refuses all updates", hook="uid ~= 0"),
    Row("node drained", during=_node("State=DRAIN", "Reason=row")),
    Row("node to reboot", during=_reboot),
    Row("--exclude of the other node", nodes=2, lines=("SBATCH --exclude={last}",)),
    Row("held by its user", during=_hold),
    Row("checkpoint folder made read-only", during=_lock),
    Row("trainer that starts at no other size", trainer="--saves-on-term --rigid"),
    Row("trainer that never saves", trainer="--save-every 1000000", wrap=""),
    Row("trainer that is deaf to the signal", trainer="--deaf"),
    Row("trainer that ends at the signal without saving", trainer="--unsaved"),
    Row("trainer that requeues itself", trainer="--saves-on-term --requeues"),
    Row("account's limit that a colleague needs", account=("GrpTRES=gres/gpu=4",), during=_COLLEAGUE),
    Row("two minutes left", lines=("SBATCH --time=2",)),
    Row("requeued by its user", during=_requeue),
)

_SHRUNK = {
    "a plain job needs GPUs": Row("", during=_COLLEAGUE),
    "several plain jobs need GPUs": Row("", during=_each(_COLLEAGUE, _COLLEAGUE, _COLLEAGUE)),
    "a Pollux job needs GPUs": Row("", gpus=4, during=_POLLUX_COLLEAGUE),
    "and QOS MaxTRESPerJob of GPUs": Row("", qos=("MaxTRESPerJob=gres/gpu=4",), during=_COLLEAGUE),
    "and QOS GrpTRES of GPUs": Row("", qos=("GrpTRES=gres/gpu=4",), during=_COLLEAGUE),
    "and QOS GrpTRESRunMins": Row(
        "", lines=(SECONDS_OF_LIMIT,), qos=("GrpTRESRunMins=gres/gpu=400",), during=_COLLEAGUE
    ),
    "and account GrpTRES": Row("", account=("GrpTRES=gres/gpu=4",), during=_COLLEAGUE),
    "and account GrpTRES lowered to 1": Row(
        "", during=_each(_sacctmgr("account", "GrpTRES=gres/gpu=1"), _POLLUX_COLLEAGUE)
    ),
    "and partition DRAIN": Row("", during=_each(_COLLEAGUE, _scontrol("State=DRAIN"))),
    "and partition DOWN": Row("", during=_each(_COLLEAGUE, _scontrol("State=DOWN"))),
    "and node drained": Row("", during=_each(_COLLEAGUE, _node("State=DRAIN", "Reason=row"))),
    "and a hold": Row("", during=_each(_hold, _COLLEAGUE)),
    "and a read-only checkpoint folder": Row("", during=_each(_lock, _COLLEAGUE)),
    "and the site's hook refuses updates": Row("", gpus=4, hook="uid ~= 0", during=_POLLUX_COLLEAGUE),
    "and a trainer of one size": Row("", gpus=4, trainer="--saves-on-term --rigid", during=_POLLUX_COLLEAGUE),
    "and a trainer that never saves": Row(
        "", gpus=4, trainer="--save-every 1000000", wrap="", during=_POLLUX_COLLEAGUE
    ),
    "and a trainer deaf to the signal": Row("", gpus=4, trainer="--deaf", during=_POLLUX_COLLEAGUE),
}
SHRINK = tuple(row._replace(cause=cause, act="shrink") for cause, row in _SHRUNK.items())
ROWS = (*GROW, *SHRINK)
