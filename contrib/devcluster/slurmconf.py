"""The configuration files of the private cluster, as text.

A line whose reason is not plain carries the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Accounting:
    """How slurmdbd and MariaDB are reached: loopback ports and the password."""

    slurmdbd_port: int
    mariadb_port: int
    password: str


@dataclass(frozen=True)
class SiteLines:
    """What a site adds to slurm.conf."""

    lines: tuple[str, ...] = ()
    """Whole lines, such as `Licenses=matlab:2`."""
    gpu_types: Mapping[str, str] = field(default_factory=dict)
    """The type of a node's GPUs, or two that share them (`a100+t4`); other nodes have the cluster's."""
    nodes: Mapping[str, str] = field(default_factory=dict)
    """Further words of a node's line, such as `Feature=nvlink`."""
    partitions: Mapping[str, str] = field(default_factory=dict)
    """Further partitions: the rest of the line, such as `Nodes=n1 PriorityTier=5`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files beside slurm.conf, such as topology.conf."""
    cloud: Sequence[str] = ()
    """Nodes that are off until Slurm boots them."""


@dataclass(frozen=True)
class Layout:
    """The folders, ports and sizes of the cluster."""

    directory: Path
    cluster_name: str
    hostname: str
    nodes: tuple[str, ...]
    gpus_per_node: int
    cpus_per_node: int
    memory_mb: int
    gpu_type: str
    slurmctld_port: int
    slurmd_ports: tuple[int, ...]
    site: SiteLines

    @property
    def etc(self) -> Path:
        return self.directory / "etc"

    @property
    def logs(self) -> Path:
        return self.directory / "log"

    @property
    def state(self) -> Path:
        return self.directory / "state"

    @property
    def munge_socket(self) -> Path:
        return self.directory / "munge" / "socket"

    @property
    def devices(self) -> Path:
        return self.directory / "dev"


def slurm_conf(layout: Layout, accounting: Accounting | None = None) -> str:
    lines = [
        f"ClusterName={layout.cluster_name}",
        f"SlurmctldHost={layout.hostname}(127.0.0.1)",
        f"SlurmctldPort={layout.slurmctld_port}",
        "SlurmUser=root",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={layout.munge_socket}",
        f"StateSaveLocation={layout.state}/slurmctld",
        f"SlurmdSpoolDir={layout.state}/%n",
        f"SlurmctldPidFile={layout.state}/slurmctld.pid",
        f"SlurmdPidFile={layout.state}/%n.pid",
        f"SlurmctldLogFile={layout.logs}/slurmctld.log",
        f"SlurmdLogFile={layout.logs}/slurmd-%n.log",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        # No cgroups and no task binding: works in any container, as root, without systemd.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        *_accounting_lines(layout, accounting),
        "PropagateResourceLimits=NONE",
        # The nodes are imaginary: believe this file, not the machine.
        "SlurmdParameters=config_overrides",
        "ReturnToService=2",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        # React within a second instead of batching for throughput.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=5",
        "JobRequeue=1",
        # A worker deaf to TERM is killed soon; the default of 30 s would dominate a move.
        "KillWait=5",
        "SlurmdTimeout=60",
        "MessageTimeout=10",
        # Ended jobs stay visible to scontrol, so that a summary written later still finds them.
        "MinJobAge=7200",
        "JobSubmitPlugins=lua",
        "CliFilterPlugins=lua",
    ]
    lines += [
        f"NodeName={name} NodeHostname={layout.hostname} NodeAddr=127.0.0.1 Port={port} "
        f"CPUs={layout.cpus_per_node} RealMemory={layout.memory_mb} Gres={_gres(layout, name)} "
        f"State={'CLOUD' if name in layout.site.cloud else 'UNKNOWN'} {layout.site.nodes.get(name, '')}"
        for name, port in zip(layout.nodes, layout.slurmd_ports, strict=True)
    ]
    nodes = ",".join(layout.nodes)
    lines.append(f"PartitionName=main Nodes={nodes} Default=YES MaxTime=UNLIMITED State=UP")
    # Above `main`: Slurm offers GPUs that a move frees to this partition's jobs first, not to other waiting jobs.
    lines.append(f"PartitionName=pollux Nodes={nodes} PriorityTier=10 MaxTime=UNLIMITED State=UP")
    lines += [f"PartitionName={name} {rest}" for name, rest in layout.site.partitions.items()]
    lines += layout.site.lines
    return "\n".join(lines) + "\n"


def _gpu_type(layout: Layout, node: str) -> str:
    return layout.site.gpu_types.get(node, layout.gpu_type)


def _gres(layout: Layout, node: str) -> str:
    types = _gpu_type(layout, node).split("+")
    each = layout.gpus_per_node // len(types)
    return ",".join(":".join(filter(None, ("gpu", kind, str(each)))) for kind in types)


def _accounting_lines(layout: Layout, accounting: Accounting | None) -> list[str]:
    if accounting is None:
        return ["AccountingStorageType=accounting_storage/none"]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={accounting.slurmdbd_port}",
        # Not a password: the munge socket that clients use to talk to slurmdbd.
        f"AccountingStoragePass={layout.munge_socket}",
        "AccountingStorageTRES=gres/gpu",
    ]


def slurmdbd_conf(layout: Layout, accounting: Accounting) -> str:
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            "DbdHost=localhost",
            "DbdAddr=127.0.0.1",
            f"DbdPort={accounting.slurmdbd_port}",
            "SlurmUser=root",
            f"LogFile={layout.logs}/slurmdbd.log",
            f"PidFile={layout.state}/slurmdbd.pid",
            "StorageType=accounting_storage/mysql",
            "StorageHost=127.0.0.1",
            f"StoragePort={accounting.mariadb_port}",
            "StorageUser=slurm",
            f"StoragePass={accounting.password}",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )


def gres_conf(layout: Layout) -> str:
    by_type: dict[str, list[str]] = {}
    for node in layout.nodes:
        by_type.setdefault(_gpu_type(layout, node), []).append(node)
    lines = []
    for named, nodes in by_type.items():
        types = named.split("+")
        each = layout.gpus_per_node // len(types)
        for number, kind in enumerate(types):
            files = ",".join(f"{layout.devices}/gpu{i}" for i in range(number * each, (number + 1) * each))
            lines.append(f"NodeName={','.join(nodes)} Name=gpu {f'Type={kind} ' if kind else ''}File={files}")
    return "\n".join(["AutoDetect=off", *lines]) + "\n"
