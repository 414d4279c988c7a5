"""Checks of a running Slurm."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from pollux.slurm_job.access import ADDRESSES, CA
from polluxd.config.config_file import Config
from polluxd.config.settings import MoveSettings
from polluxd.errors import PolluxError, SlurmError
from polluxd.gateway.client import user_client
from polluxd.slurm.configuration import Slurm
from polluxd.slurm.node_records import parse_nodes
from polluxd.slurm.rules import parse_partitions, parse_reservations
from polluxd.slurm.site_defaults import kept_off_s, protections

from .findings import Finding, clock, fault, ok, warning
from .hooks import Role, Site

OLDEST = (22, 5)
NEWEST = (26, 5)
"""Releases that the hooks and the reader of Slurm were run with."""
CRASHES_FROM, CRASHES_TO = (24, 11, 5), (26, 5, 3)
"""Releases of Slurm that crash on the requeue of a job that is COMPLETING on a node that is DOWN."""
AHEAD_S = 86400.0
SHORTEST_MEMORY_S = 60
"""slurmctld forgets ended jobs after MinJobAge (slurm.conf(5): 300 s). polluxd may miss some looks in a row."""
SHORTEST_DELAY_S = 30
"""A requeued job that starts by itself sooner comes before polluxd's placement."""


def cluster(slurm: Slurm, site: Site, config: Config | None, roles: Sequence[Role]) -> Iterator[Finding]:
    """Check Slurm: all that needs slurmctld's answer."""
    try:
        settings = slurm.settings()
    except SlurmError as error:
        yield fault("slurmctld", str(error), "start slurmctld and munge; look at slurmctld's log")
        return
    yield from _version(settings)
    yield from _clock(settings)
    if config is not None:
        yield _cluster_name(settings, config)
    yield from _plugins(settings, site)
    yield from _gpus(settings)
    yield from _isolation(settings)
    if Role.CONTROLLER in roles:
        yield from _rights(slurm, settings, site)
        yield from _requeue(settings)
        for question in (_nodes, _partitions, _reservations):
            try:
                yield from question(slurm)
            except SlurmError as error:
                yield fault("slurmctld", str(error), "look at slurmctld's log")


def gateway(slurm: Slurm, config: Config | None = None) -> Iterator[Finding]:
    """Check that jobs and users of this machine reach polluxd's gateway.

    With a configuration, at the addresses that the submission hook gives to jobs.
    """
    environ: Mapping[str, str] = os.environ
    if config is not None:
        environ = {ADDRESSES: ",".join(config.gateway.urls), CA: str(config.gateway.ca or "")}
    try:
        user_client(slurm.ask("scontrol", "show", "config"), environ).ask("/v1/top")
    except SlurmError:
        return  # reported by `slurmctld`
    except PolluxError as error:
        yield warning(
            "gateway",
            f"jobs and users of this machine do not reach the gateway: {error}",
            "systemctl enable --now polluxd-gateway on the controller, and let its port through (gateway.listen)",
        )
    else:
        yield ok("gateway", "the gateway answers")


def munge(slurm: Slurm, settings: Mapping[str, str]) -> Iterator[Finding]:
    """Check that munged answers on this machine."""
    socket = re.search(r"socket=([^,\s]+)", settings.get("AuthInfo", ""))
    where = ("--socket", socket[1]) if socket else ()
    try:
        slurm.ask("unmunge", *where, given=slurm.ask("munge", "--no-input", *where))
    except SlurmError as error:
        yield fault(
            "munge",
            f"munge makes no valid credential here: {error}",
            "start munge; give all machines one munge.key",
        )
    else:
        yield ok("munge", "munge makes and reads credentials")


def _version(settings: Mapping[str, str]) -> Iterator[Finding]:
    version = settings.get("SLURM_VERSION", "")
    numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    release = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if release < OLDEST:
        yield fault(
            "slurm-version",
            f"Slurm is {version or 'of no known version'}",
            "polluxd needs Slurm 22.05 or newer",
        )
    elif release > NEWEST:
        yield warning(
            "slurm-version",
            f"Slurm is {version}: newer than polluxd was tested with",
            "start in mode observe",
        )
    else:
        yield ok("slurm-version", f"Slurm {version}")
    configuration = "\n".join(f"{name} = {value or '(null)'}" for name, value in settings.items())
    if met := protections(configuration):
        yield warning(
            "restarts",
            f"Slurm {version} with {' and '.join(met)}: a job that starts again on a node of its last attempt "
            "would get no Prolog and no container there, so polluxd waits "
            f"{kept_off_s(configuration):.0f} s before such a start",
            "use Slurm 24.11 or newer, or set a shorter cred_expire in AuthInfo",
        )
    if CRASHES_FROM <= (*release, int(numbers[3] or 0) if numbers else 0) <= CRASHES_TO:
        yield warning(
            "requeue-crash",
            f"Slurm {version} crashes when a job is requeued that is COMPLETING on a node that is DOWN: polluxd never "
            "does that, and `scontrol requeue` of a person can",
            "use a release after 26.05.3, and tell operators",
        )


def _clock(settings: Mapping[str, str]) -> Iterator[Finding]:
    at = settings["at"]
    try:
        then = float(at) if at.isdigit() else datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return
    # The answer has whole seconds, and takes a moment.
    yield clock(time.time() - then, "this machine's clock", "slurmctld's")


def _cluster_name(settings: Mapping[str, str], config: Config) -> Finding:
    name, ours = settings["ClusterName"], config.slurm.cluster
    if name == ours:
        return ok("cluster-name", f"cluster {name}")
    return fault(
        "cluster-name",
        f"Slurm's cluster is {name!r}, polluxd.toml says {ours!r}",
        f'set cluster = "{name}" in [slurm]',
    )


def _plugins(settings: Mapping[str, str], site: Site) -> Iterator[Finding]:
    for key, why in (
        ("JobSubmitPlugins", "no #POLLUX line is read"),
        ("CliFilterPlugins", "each move empties a job's output file"),
    ):
        if "lua" not in _words(settings.get(key, "")):
            found = settings.get(key) or "not set"
            say = fault if key == "JobSubmitPlugins" else warning
            yield say(
                "plugins",
                f"{key} is {found}: {why}",
                f"{key}=lua in {site.slurm_conf}; then restart slurmctld",
            )


def _words(text: str) -> list[str]:
    return [word.strip().lower().rpartition("/")[2] for word in text.split(",")]


def _gpus(settings: Mapping[str, str]) -> Iterator[Finding]:
    if "gpu" not in _words(settings.get("GresTypes", "")):
        yield fault(
            "gres",
            f"GresTypes is {settings.get('GresTypes') or 'not set'}",
            "GresTypes=gpu in slurm.conf, and restart Slurm",
        )
    if "cons_tres" not in settings.get("SelectType", ""):
        yield fault(
            "gres",
            f"SelectType is {settings.get('SelectType')}: Slurm gives jobs no single GPUs",
            "SelectType=select/cons_tres in slurm.conf, and restart Slurm",
        )


def _isolation(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Say what the site's isolation asks of users' jobs; nothing is wrong with it."""
    container, flags = settings.get("JobContainerType", ""), settings.get("PrologFlags", "")
    if container and not container.endswith("none"):
        said = f"JobContainerType is {container}: a job has its own /tmp on each node, so data and checkpoints must"
        yield ok("isolation", f"{said} lie in a folder that the nodes share")
    if settings.get("ConstrainRAMSpace", "").lower() == "yes":
        said = "ConstrainRAMSpace is yes: Slurm kills a job that needs more than its --mem, and the agent's copies of a"
        yield ok("isolation", f"{said} training (POLLUX_MEMORY_SHARE) count there")
    if {"alloc", "contain", "x11"} & set(_words(flags)):
        said = f"PrologFlags is {flags}: slurmd runs the Prolog before each start of a job,"
        yield ok(
            "isolation", f"{said} and so in each move through the queue, which takes longer by that time"
        )


def _rights(slurm: Slurm, settings: Mapping[str, str], site: Site) -> Iterator[Finding]:
    slurm_user = settings.get("SlurmUser", "").partition("(")[0]
    dbd = settings.get("AccountingStorageType") == "accounting_storage/slurmdbd"
    if site.user in ("root", slurm_user):
        yield ok("rights", f"polluxd's user {site.user} has all rights in Slurm")
    elif not dbd:
        yield fault(
            "rights",
            f"{site.user} may not requeue jobs of others: without slurmdbd only {slurm_user} and root may",
            f"run polluxd as {slurm_user} (User= of the unit, --user), or set up slurmdbd",
        )
    else:
        query = ("sacctmgr", "-n", "-P", "show", "user", site.user, "format=adminlevel")
        try:
            level = slurm.ask(*query).strip()
        except SlurmError as error:
            yield fault("rights", str(error), "start slurmdbd")
            return
        if level in ("Operator", "Administrator"):
            yield ok("rights", f"{site.user} is {level} in Slurm")
        else:
            yield fault(
                "rights",
                f"{site.user} is {level or 'unknown'} in Slurm, and may not requeue jobs of others",
                f"sacctmgr -i add user {site.user} account=root adminlevel=operator cluster={settings['ClusterName']} "
                "(known users: modify user ... set)",
            )
    if not dbd:
        yield warning(
            "slurmdbd",
            "no slurmdbd: no job can give nodes back in place",
            "set up slurmdbd for resizes in place",
        )


def _requeue(settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings.get("JobRequeue") == "0":
        yield warning(
            "requeue",
            "JobRequeue is 0: jobs are not started again when a node fails",
            "JobRequeue=1 in slurm.conf",
        )
    expire = re.search(r"cred_expire=(\d+)", settings.get("AuthInfo", ""))
    delay = int(expire[1]) if expire else 120
    if delay > 300:
        yield warning(
            "requeue",
            f"cred_expire is {delay} s: a job that polluxd could not place again waits so long",
            "lower cred_expire in AuthInfo (default: 120)",
        )


def _nodes(slurm: Slurm) -> Iterator[Finding]:
    found = parse_nodes(slurm.ask("scontrol", "--local", "-a", "-o", "-d", "show", "node"))
    for name, why in found.unreadable.items():
        yield warning("gres", f"polluxd cannot use node {name}: {why}", f"scontrol show node {name}")
    with_gpus = [node for node in found.nodes if node.gpus]
    if with_gpus:
        yield ok("gres", f"{len(with_gpus)} of {len(found.nodes)} nodes have GPUs")
    else:
        yield fault(
            "gres", "no node has GPUs in Slurm", "Gres=gpu:N on the nodes in slurm.conf, and gres.conf"
        )
    for node in with_gpus:
        if "+" in node.gpu_type:
            yield warning(
                "gres",
                f"node {node.name} has GPUs of several types ({node.gpu_type}): polluxd counts them as one type, and "
                "places no job there that asks for one of them",
                "nothing, if that is wanted",
            )
        if not node.schedulable:
            yield warning(
                "nodes",
                f"node {node.name} takes no jobs",
                f"scontrol show node {node.name}; scontrol update state=resume",
            )


def _partitions(slurm: Slurm) -> Iterator[Finding]:
    found, _ = parse_partitions(slurm.ask("scontrol", "--local", "-a", "-o", "show", "partition"))
    shown = parse_nodes(slurm.ask("scontrol", "--local", "-a", "-o", "-d", "show", "node")).nodes
    named = frozenset[str]().union(*(partition.nodes for partition in found.values()))
    if hidden := sorted(named - {node.name for node in shown}):
        yield warning(
            "nodes",
            f"Slurm shows polluxd nothing of {len(hidden)} nodes of partitions ({', '.join(hidden[:3])}, ...): "
            "it hides cloud nodes that are powered down",
            "PrivateData=cloud in slurm.conf (beside what stands there), and restart slurmctld",
        )
    for partition in found.values():
        if not partition.starts:
            yield warning(
                "partition",
                f"partition {partition.name} is {partition.state}: polluxd moves no job of it",
                f"scontrol update partitionname={partition.name} state=up",
            )


def _reservations(slurm: Slurm) -> Iterator[Finding]:
    found, _ = parse_reservations(slurm.ask("scontrol", "--local", "-a", "-o", "show", "reservation"))
    now = time.time()
    for each in found:
        if each.meets(now, now + AHEAD_S):
            nodes = "all nodes" if each.nodes is None else f"{len(each.nodes)} nodes"
            yield warning(
                "reservation",
                f"reservation {each.name} keeps {nodes} within a day: polluxd places no job there that would meet it",
                f"nothing, if that is wanted; else scontrol delete reservation={each.name}",
            )


def pace(settings: Mapping[str, str], config: Config | None) -> Iterator[Finding]:
    """Check intervals, delays and what slurmdbd counts."""
    moves = config.moves if config is not None else MoveSettings()
    yield from _memory(settings)
    yield from _scheduler(settings, moves)
    yield from _script_times(settings, moves)
    yield from _requeue_delay(settings)
    dbd = settings.get("AccountingStorageType") == "accounting_storage/slurmdbd"
    if dbd and "gres/gpu" not in settings.get("AccountingStorageTRES", "").split(","):
        yield warning(
            "accounting",
            f"AccountingStorageTRES is {settings.get('AccountingStorageTRES') or 'not set'}: Slurm counts no GPUs, and "
            "limits on gres/gpu hold nobody back",
            "AccountingStorageTRES=gres/gpu in slurm.conf, and restart slurmctld",
        )


def _memory(settings: Mapping[str, str]) -> Iterator[Finding]:
    age = _seconds(settings.get("MinJobAge", ""))
    if age is not None and age < SHORTEST_MEMORY_S:
        yield warning(
            "memory",
            f"MinJobAge is {age:g} s: slurmctld forgets a job before polluxd has seen its end, and the job counts as "
            "GONE",
            "MinJobAge=300 in slurm.conf, and scontrol reconfigure",
        )


def _scheduler(settings: Mapping[str, str], moves: MoveSettings) -> Iterator[Finding]:
    found = dict(re.findall(r"(\w+)=(\d+)", settings.get("SchedulerParameters", "")))
    # In microseconds (slurm.conf(5)).
    least = int(found.get("sched_min_interval", 2)) / 1e6
    slowest = max(least, float(found.get("batch_sched_delay", 3)))
    if slowest > moves.start_timeout_s / 3:
        yield warning(
            "scheduler",
            f"slurmctld may wait {slowest:g} s before it starts a job (SchedulerParameters), and polluxd gives a start "
            f"up after moves.start_timeout_s = {moves.start_timeout_s:g} s",
            f"lower sched_min_interval and batch_sched_delay, or set start_timeout_s = {3 * slowest:g} in [moves]",
        )


def _script_times(settings: Mapping[str, str], moves: MoveSettings) -> Iterator[Finding]:
    """Compare the time of the site's own scripts with polluxd's; without a limit they may take any time."""
    if not any(settings.get(key) for key in ("Prolog", "Epilog", "PrologSlurmctld", "TaskProlog")):
        return
    limit = _seconds(settings.get("PrologEpilogTimeout", ""))
    if limit is not None and 0 < limit < 65534 and limit > moves.training_timeout_s:
        yield warning(
            "scripts",
            f"PrologEpilogTimeout is {limit:g} s, and a start without a training step counts as failed after "
            f"moves.training_timeout_s = {moves.training_timeout_s:g} s",
            f"lower PrologEpilogTimeout, or set training_timeout_s = {limit + 60:g} in [moves]",
        )
    elif limit is not None and 0 < limit < 10:
        yield warning(
            "scripts",
            f"PrologEpilogTimeout is {limit:g} s: a prolog that a busy node delays drains the node",
            "PrologEpilogTimeout=60 or more in slurm.conf, and scontrol reconfigure",
        )


def _requeue_delay(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Slurm 25.11 and newer: how soon a requeued job starts again by itself."""
    words = ",".join(settings.get(key, "") for key in ("SchedulerParameters", "SlurmctldParameters"))
    found = re.search(r"\brequeue_delay=(\d+)", words)
    if found and int(found[1]) < SHORTEST_DELAY_S:
        yield warning(
            "requeue",
            f"requeue_delay is {found[1]} s: a requeued job starts again by itself, before polluxd has placed it",
            f"requeue_delay={SHORTEST_DELAY_S} or more in slurm.conf, or leave it out",
        )


def _seconds(text: str) -> float | None:
    """Seconds of `300 sec` or `300`; None: not set, or unlimited."""
    found = re.match(r"(\d+)\b", text)
    return float(found[1]) if found else None
