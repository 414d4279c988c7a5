"""Draw sites and what happens there from seeds. Pure.

A site is a slurm.conf with accounts, a stream of plain and Pollux jobs, and acts of its administrators. The same seed
draws the same site. What was added to the draws later has a random generator of its own (`_more`), so that the older
half of each site stays what its seed gave before.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from contrib.devcluster import SiteLines
from contrib.sites.idle import Wish

STREAM_S = 30.0
"""Seconds in which the jobs of a stream are submitted."""
TRAINING = "pollux run contrib/examples/digits_mlp.py --epochs 6 --alpha 0.05 --beta 0.0005 --sync 0.01 0.02"


class DrawnJob(NamedTuple):
    """One submission."""

    name: str
    at: float
    """Seconds after the stream's begin."""
    head: str
    """#SBATCH line that asks for nodes and GPUs."""
    lines: tuple[str, ...]
    """Further lines of #SBATCH and #POLLUX, without their hash signs."""
    seconds: int
    wish: Wish
    trains: bool = False
    """It is a short training, which polluxd may resize. Others sleep, and never report."""

    @property
    def body(self) -> str:
        if self.trains:
            return TRAINING
        return f"sleep {self.seconds}"

    @property
    def pollux(self) -> bool:
        return any(line.startswith("POLLUX") for line in self.lines)


class Act(NamedTuple):
    """What an administrator does, and undoes after a while."""

    kind: str
    at: float
    seconds: float
    target: str = ""


@dataclass(frozen=True)
class DrawnSite:
    """A site."""

    seed: int
    nodes: int
    gpus_per_node: int
    site: SiteLines
    accounts: tuple[tuple[str, ...], ...]
    jobs: tuple[DrawnJob, ...]
    acts: tuple[Act, ...]

    @property
    def words(self) -> str:
        """What is unusual about it, on one line."""
        acts = ", ".join(f"{act.kind} {act.target}".strip() for act in self.acts)
        options = {
            w
            for job in self.jobs
            for line in job.lines
            if line.startswith("SBATCH")
            for w in line.split()[1:]
        }
        has = [*self.site.lines, *self.site.partitions.values(), *(f"cloud {n}" for n in self.site.cloud)]
        has += ["own job_submit.lua"] if "job_submit.lua" in self.site.files else []
        has += ["a training"] if any(job.trains for job in self.jobs) else []
        return f"{'; '.join(has)}; options: {' '.join(sorted(options))}; acts: {acts}"


def draw(seed: int) -> DrawnSite:
    """Return the site of a seed."""
    rng = random.Random(f"site {seed}")
    nodes, gpus = rng.randint(2, 4), rng.choice((2, 4))
    names = [f"n{i + 1}" for i in range(nodes)]
    types = {name: rng.choice(("a100", "t4")) for name in names} if rng.random() < 0.4 else {}
    if types and rng.random() < 0.4:
        types[names[-1]] = "a100+t4"
    features = {name: rng.choice(("old", "new")) for name in names}
    partitions = _partitions(rng, names)
    lines = _lines(rng)
    files = {}
    if rng.random() < 0.3:
        lines.append("TopologyPlugin=topology/tree")
        half = (nodes + 1) // 2
        files["topology.conf"] = (
            f"SwitchName=s1 Nodes={','.join(names[:half])}\nSwitchName=s2 Nodes={','.join(names[half:])}\n"
            "SwitchName=s0 Switches=s[1-2]\n"
        )
    accounting = rng.random() < 0.5
    accounts = _accounts(rng, lines) if accounting else ()
    by_qos = "PreemptType=preempt/qos" in lines
    site = SiteLines(
        lines=tuple(lines),
        gpu_types=types,
        nodes={name: f"Feature={feature}" for name, feature in features.items()},
        partitions=partitions,
        files=files,
    )
    hand = _Hand(rng, names, gpus, types, features, partitions, by_qos=by_qos and bool(accounts))
    jobs = tuple(hand.job(number) for number in range(rng.randint(10, 14)))
    drawn = DrawnSite(seed, nodes, gpus, site, accounts, jobs, _acts(rng, names, jobs))
    drawn = _more(random.Random(f"more of site {seed}"), drawn)
    return _reboot(random.Random(f"reboot at site {seed}"), drawn)


_LINES = (
    "PrologFlags=Alloc",
    "PreemptExemptTime=00:00:10",
    "KillOnBadExit=1",
    "PriorityFlags=ACCRUE_ALWAYS",
)
_SCHEDULER = (
    *("default_queue_depth=4", "bf_max_job_test=6", "partition_job_depth=3", "bf_window=60"),
    *("max_rpc_cnt=20", "pack_serial_at_end", "bf_resolution=10", "preempt_youngest_first"),
)
_OPTIONS = (
    *("--nice=50", "--cpus-per-gpu=2", "--spread-job", "--constraint=old|new", "--prefer=old", "--mincpus=3"),
    *("--gres-flags=enforce-binding", "--use-min-nodes", "--signal=USR1@60", "--no-requeue", "--requeue"),
    *("--switches=1", "--oversubscribe", "--exclusive=user", "--threads-per-core=1", "--open-mode=truncate"),
    *("--dependency=singleton", "--delay-boot=0", "--overcommit", "--time-min=2", "--contiguous", "--tmp=1"),
    *("--deadline=now+2hours", "--distribution=cyclic", "--no-kill", "--wait-all-nodes=1", "--mem=0"),
)
_SUBMIT = """function slurm_job_submit(job, partitions, uid)
  job.admin_comment = "cost centre 7"
  return slurm.SUCCESS
end
function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end
return slurm.SUCCESS
"""
"""A job_submit.lua of the site's own."""


def _more(rng: random.Random, drawn: DrawnSite) -> DrawnSite:
    """Add what a site may have besides: hooks, cloud nodes, rare settings and options, trainings, further acts."""
    site = drawn.site
    depth = [word for word in _SCHEDULER if rng.random() < 0.15]
    lines = [
        ",".join((line, *depth)) if line.startswith("SchedulerParameters=") else line for line in site.lines
    ]
    preempts = any(line.startswith("PreemptType=") for line in lines)
    lines += [line for line in _LINES if rng.random() < 0.15 and (preempts or "Preempt" not in line)]
    files = dict(site.files)
    if rng.random() < 0.4:
        files["job_submit.lua"] = _SUBMIT
        lines += ["Prolog=/bin/true", "Epilog=/bin/true", "TaskProlog=/bin/true"]
    cloud = (f"n{drawn.nodes}",) if rng.random() < 0.25 else ()
    jobs = list(drawn.jobs)
    for at in rng.sample(range(len(jobs)), len(jobs) // 3):
        option = rng.choice(_OPTIONS)
        if option != "--mem=0" or "Memory" in "".join(lines):
            jobs[at] = jobs[at]._replace(lines=(*jobs[at].lines, f"SBATCH {option}"))
    if rng.random() < 0.6:
        most = rng.choice((2, drawn.gpus_per_node, 2 * drawn.gpus_per_node))
        asked = (f"POLLUX min-gpus=1 max-gpus={most}", "SBATCH --time=20")
        head = "SBATCH --nodes=1 --ntasks-per-node=1 --gres=gpu:1"
        jobs.append(DrawnJob("training", rng.uniform(0, 5), head, asked, 0, Wish(1), trains=True))
    kinds = ["slurmd restart", "suspend", "requeue", "time limit"] + (["limit"] if drawn.accounts else [])
    acts = list(drawn.acts)
    for kind in rng.sample(kinds, 1):
        target = f"n{rng.randint(1, drawn.nodes - len(cloud))}" if "slurmd" in kind else rng.choice(jobs).name
        acts.append(Act(kind, rng.uniform(5, STREAM_S), rng.uniform(4, 10), target))
    return replace(
        drawn,
        site=replace(site, lines=tuple(lines), files=files, cloud=cloud),
        jobs=tuple(sorted(jobs, key=lambda job: job.at)),
        acts=tuple(sorted(acts, key=lambda act: act.at)),
    )


def _reboot(rng: random.Random, drawn: DrawnSite) -> DrawnSite:
    """Add, at one site of three, the reboot of a node."""
    if rng.random() < 0.67:
        return drawn
    always_on = drawn.nodes - len(drawn.site.cloud)
    act = Act("reboot", rng.uniform(5, STREAM_S), 0.0, f"n{rng.randint(1, always_on)}")
    return replace(
        drawn,
        site=replace(drawn.site, lines=(*drawn.site.lines, "RebootProgram=/bin/true")),
        acts=tuple(sorted((*drawn.acts, act), key=lambda one: one.at)),
    )


def _partitions(rng: random.Random, names: list[str]) -> dict[str, str]:
    found = {}
    if rng.random() < 0.5:
        some = ",".join(rng.sample(names, rng.randint(1, len(names))))
        words = [f"Nodes={some}", f"PriorityTier={rng.choice((1, 1, 5))}"]
        if rng.random() < 0.3:
            words.append(f"DefMemPerGPU={rng.choice((200, 700))}")
        if rng.random() < 0.3:
            words.append("MaxTime=60")
        if rng.random() < 0.2:
            words.append("OverSubscribe=NO")
        found["extra"] = " ".join(words)
    return found


def _lines(rng: random.Random) -> list[str]:
    select = rng.choice(("CR_Core", "CR_Core_Memory", "CR_CPU_Memory", "CR_Core_Memory,CR_LLN", "CR_CPU"))
    lines = [f"SelectTypeParameters={select}"]
    if "Memory" in select:
        # Without any default, Slurm gives each job that says nothing all memory of its nodes.
        lines.append(
            rng.choice(("DefMemPerGPU=500", "DefMemPerGPU=900", "DefMemPerCPU=300", "DefMemPerNode=800"))
        )
    if rng.random() < 0.3:
        lines.append(f"DefCpuPerGPU={rng.choice((1, 2))}")
    preempt = rng.choice(("none", "none", "qos", "partition_prio"))
    if preempt != "none":
        lines += [f"PreemptType=preempt/{preempt}", "PreemptMode=REQUEUE"]
    if rng.random() < 0.5:
        lines += ["PriorityType=priority/multifactor", f"PriorityWeightAge={rng.choice((0, 1000))}"]
    scheduler = [
        "batch_sched_delay=0",
        f"sched_interval={rng.choice((1, 3))}",
        f"bf_interval={rng.choice((2, 5))}",
    ]
    scheduler += [
        word for word in ("defer", "bf_continue", "sched_min_interval=1000000") if rng.random() < 0.3
    ]
    lines.append(f"SchedulerParameters={','.join(scheduler)}")
    lines += [
        f"Licenses=matlab:{rng.choice((1, 2))}",
        f"MaxArraySize={rng.choice((11, 1001))}",
        # A plain job that is preempted and may not be requeued is lost, with polluxd and without it.
        f"JobRequeue={rng.choice((0, 1, 1)) if preempt == 'none' else 1}",
        f"CompleteWait={rng.choice((0, 0, 2))}",
        f"EnforcePartLimits={rng.choice(('NO', 'ALL', 'ANY'))}",
        "ReconfigFlags=KeepPartState",
    ]
    if rng.random() < 0.3:
        lines.append("PrivateData=jobs,usage")
    return lines


def _accounts(rng: random.Random, lines: list[str]) -> tuple[tuple[str, ...], ...]:
    lines.append("AccountingStorageEnforce=associations,limits,qos")
    limit = rng.choice(((), (f"GrpTRES=gres/gpu={rng.choice((2, 4))}",), ("MaxJobs=3",)))
    urgent = ("Preempt=normal",) if rng.random() < 0.6 else ()
    return (
        ("add", "account", "lab", *limit),
        ("add", "account", "open"),
        ("add", "qos", "urgent", "Priority=1000", *urgent),
        ("add", "user", "nobody", "account=lab"),
        ("add", "user", "nobody", "account=open"),
        ("modify", "user", "where", "name=nobody", "set", "qos=normal,urgent", "DefaultAccount=open"),
    )


@dataclass
class _Asked:
    """What a submission asks for."""

    gpus: int
    """On each node."""
    on: set[str]
    """Nodes that its options allow."""
    lines: list[str]
    nodes: int = 1
    at_once: int = 1
    kind: str = ""
    in_all: bool = False
    """It gives the number of GPUs in all (--gpus)."""

    @property
    def head(self) -> str:
        if self.in_all:
            return f"SBATCH --ntasks=1 --gpus={self.gpus}"
        gres = ":".join(filter(None, ("gpu", self.kind, str(self.gpus))))
        return f"SBATCH --nodes={self.nodes} --ntasks-per-node=1 --gres={gres}"


class _Hand:
    """Draws submissions of users of one site."""

    def __init__(
        self,
        rng: random.Random,
        names: list[str],
        gpus: int,
        types: dict[str, str],
        features: dict[str, str],
        partitions: dict[str, str],
        *,
        by_qos: bool,
    ) -> None:
        self._rng, self._names, self._gpus = rng, names, gpus
        self._types, self._features, self._partitions = types, features, partitions
        self._options: list[Callable[[_Asked], None]] = [
            *(self._exclusive, self._constraint, self._exclude, self._nodelist, self._array, self._memory),
            *(self._in_all, self._two_nodes, lambda asked: None),
            *map(
                self._adding,
                ("--licenses=matlab:1", "--mem-per-gpu=100", "--mem-per-gpu=400", "--begin=now+5"),
            ),
            *([self._partition] if partitions else []),
            *([self._typed] if types else []),
            *([self._adding("--qos=urgent")] if by_qos else []),
        ]

    def job(self, number: int) -> DrawnJob:
        """Return a submission; what it can use is what its options say."""
        rng = self._rng
        asked = _Asked(
            rng.randint(1, self._gpus), set(self._names), [f"SBATCH --time={rng.choice((5, 20, 120))}"]
        )
        pollux = rng.random() < 0.6
        rng.choice(self._options)(asked)
        if pollux:
            # As many as the plain job would have: what a job that never trains may be given is no matter here.
            gpus = asked.gpus * asked.nodes
            more = "" if rng.random() < 0.7 else " preemptible=no"
            asked.lines.append(f"POLLUX min-gpus={gpus} max-gpus={gpus}{more}")
        wish = Wish(asked.gpus, asked.nodes, frozenset(asked.on), asked.at_once)
        return DrawnJob(
            f"j{number}", rng.uniform(0, STREAM_S), asked.head, tuple(asked.lines), rng.randint(4, 12), wish
        )

    def _exclusive(self, asked: _Asked) -> None:
        asked.lines.append("SBATCH --exclusive")
        asked.gpus = self._gpus

    def _constraint(self, asked: _Asked) -> None:
        feature = self._rng.choice(sorted(set(self._features.values())))
        asked.lines.append(f"SBATCH --constraint={feature}")
        asked.on = {name for name in asked.on if self._features[name] == feature}

    def _exclude(self, asked: _Asked) -> None:
        node = self._rng.choice(self._names)
        asked.lines.append(f"SBATCH --exclude={node}")
        asked.on.discard(node)

    def _nodelist(self, asked: _Asked) -> None:
        asked.on = {self._rng.choice(self._names)}
        asked.lines.append(f"SBATCH --nodelist={','.join(asked.on)}")

    def _partition(self, asked: _Asked) -> None:
        asked.lines.append("SBATCH --partition=extra")
        asked.on = set(self._partitions["extra"].split("Nodes=")[1].split()[0].split(","))

    def _array(self, asked: _Asked) -> None:
        asked.lines.append("SBATCH --array=0-3%2")
        asked.at_once = 2

    def _memory(self, asked: _Asked) -> None:
        cpus = self._rng.choice((1, 2))
        asked.lines.append(f"SBATCH --mem={self._rng.choice((300, 900))} --cpus-per-task={cpus}")

    def _typed(self, asked: _Asked) -> None:
        asked.kind = self._rng.choice(sorted(set(self._types.values()) - {"a100+t4"}) or ["a100"])
        asked.on = {name for name in asked.on if self._types[name] == asked.kind}

    def _two_nodes(self, asked: _Asked) -> None:
        asked.nodes, asked.gpus = 2, self._gpus

    def _in_all(self, asked: _Asked) -> None:
        asked.in_all = True

    @staticmethod
    def _adding(line: str) -> Callable[[_Asked], None]:
        return lambda asked: asked.lines.append(f"SBATCH {line}")


def _acts(rng: random.Random, names: list[str], jobs: tuple[DrawnJob, ...]) -> tuple[Act, ...]:
    kinds = ["drain", "reconfigure", "restart", "hold", "reservation", "partition", "comment"]
    kinds += ["pause", "polluxd killed", "hooks removed"]
    found = []
    for kind in rng.sample(kinds, rng.randint(2, 3)):
        target = rng.choice(names) if kind in ("drain", "reservation") else ""
        target = rng.choice(jobs).name if kind in ("hold", "comment") else target
        found.append(Act(kind, rng.uniform(5, STREAM_S), rng.uniform(4, 10), target))
    return tuple(sorted(found, key=lambda act: act.at))
