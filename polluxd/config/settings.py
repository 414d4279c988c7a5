"""Every setting, declared once: type, range, unit, default, help.

Each class is a section of polluxd.toml. `PolicySettings` can also be changed in the database at run time. Everything
else is derived from these classes: parsing (`config_file`), what the database may hold (`store.rows`), the
options of `polluxctl settings`, error messages, the example file (`settings_reference`), and the reference pages
(`contrib/man/generate.py`, `docs/generate.py`).

To add a setting, add a field with its default and a docstring. The first sentence of the docstring is the help text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from pydantic import BaseModel, ConfigDict, Field, StrictBool, model_validator
from pydantic.dataclasses import dataclass

from polluxd.config.value_types import (
    ClusterName,
    Count,
    Days,
    Duration,
    Exponent,
    FilePath,
    GatewayUrls,
    GpuRule,
    Gpus,
    JobId,
    Kappa,
    LeastGain,
    ListenAddress,
    Money,
    MovePaths,
    Names,
    NodeList,
    NodePrice,
    Objective,
    Owner,
    PostgresUrl,
    Power,
    PrometheusUrl,
    SbatchOptions,
    Seconds,
    Share,
    Speed,
    StartGpus,
    Weight,
    example,
    expected,
    run_time_only,
)

_SECTION = ConfigDict(extra="forbid", hide_input_in_errors=True, use_attribute_docstrings=True)


class _Section(BaseModel):
    # Strict: `"60"` for a number, or 1 for true, is a mistake to report, not to guess at.
    model_config = ConfigDict(**_SECTION, frozen=True, strict=True)


class SlurmSettings(_Section):
    """The cluster, and how polluxd talks to it."""

    cluster: Annotated[ClusterName, example("mycluster")]
    """ClusterName of slurm.conf."""
    conf: Annotated[FilePath | None, example("/etc/slurm/slurm.conf")] = None
    """Path of slurm.conf. Without it, Slurm's commands search for slurm.conf as usual."""
    client: Literal["auto", "scontrol", "pyslurm"] = "auto"
    """How polluxd reads Slurm. `auto` takes pyslurm where it is installed for Slurm's version, else scontrol."""
    timeout_s: Seconds = 10.0
    """Longest wait for one Slurm command. It must be below `cycle.leader_lease_s`."""
    lease_s: Seconds = 300.0
    """How long polluxd keeps a waiting job back at a time. Without polluxd, the job starts after this time. Where more
    jobs wait than 5 for each second of it, polluxd keeps them back for longer: a fifth of a second for each."""
    heartbeat_file: Annotated[FilePath | None, example("/run/polluxd/heartbeat")] = None
    """File that polluxd touches every cycle. The submit hook keeps jobs back only while this file is fresh."""
    canary_options: Annotated[SbatchOptions, example(["--account=staff", "--time=10"])] = ()
    """Options of sbatch that this site asks of every job. `polluxctl doctor` submits its held job with them, as
    polluxd's user."""
    racks: Annotated[Mapping[str, NodeList], example({"r1": "n[1-8]", "r2": "n[9-16]"})] = Field(
        default_factory=dict
    )
    """Node list of each rack, for nodes that Slurm's own topology does not place."""
    gpu_speeds: Annotated[Mapping[str, Speed], example({"a100": 2.5, "t4": 1.0})] = Field(
        default_factory=dict
    )
    """Relative speed of each GPU type. polluxd explores a type that has no entry by trying it."""


class DatabaseSettings(_Section):
    """The connection to Postgres, and what polluxd keeps there."""

    address: Annotated[
        PostgresUrl, example("postgresql://pollux_daemon@db.example.org/pollux?sslmode=verify-full")
    ] = Field(alias="url", repr=False)
    """Address of the database. Keep the password in `passfile`."""
    passfile: Annotated[FilePath | None, example("/etc/pollux/pgpass")] = None
    """libpq's password file, mode 0600, owned by polluxd's user."""
    connect_timeout_s: Seconds = 3.0
    """Longest wait for a connection."""
    statement_timeout_s: Seconds = 5.0
    """Longest run of one statement."""
    history_days: Days = 14.0
    """polluxd deletes older reports, cycles and decisions."""

    @property
    def url(self) -> str:
        """Return the SQLAlchemy URL. It may hold a secret: do not print it."""
        return self._with(self.passfile)

    @property
    def waits(self) -> dict[str, float]:
        """Return the bounds of time [s] as the store takes them."""
        return {"connect_timeout": self.connect_timeout_s, "statement_timeout": self.statement_timeout_s}

    def gateway_url(self, passfile: Path | None) -> str:
        """Return the URL of role pollux_gateway, without polluxd's own password."""
        parts = urlsplit(self.address)
        place = parts.netloc.rpartition("@")[2]
        return self._with(passfile, netloc=f"pollux_gateway@{place}")

    def _with(self, passfile: Path | None, **changes: str) -> str:
        parts = urlsplit(self.address)._replace(**changes)
        query = parse_qsl(parts.query) + ([] if passfile is None else [("passfile", str(passfile))])
        return urlunsplit(parts._replace(query=urlencode(query)))


class CycleSettings(_Section):
    """How often polluxd looks and decides."""

    interval_s: Seconds = 60.0
    """Time between two decisions."""
    floor_s: Seconds = 10.0
    """Shortest time between two decisions, also when jobs arrive or end."""
    poll_s: Seconds = 5.0
    """Time between two looks at Slurm while no move is under way."""
    busy_poll_s: Seconds = 1.0
    """Time between two looks at Slurm while a move is under way."""
    leader_lease_s: Seconds = 15.0
    """How long a leader acts without hearing from the database. After a crash, a standby waits this long."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.floor_s > self.interval_s:
            raise ValueError(f"floor_s ({self.floor_s:g}) must not be above interval_s ({self.interval_s:g})")
        if self.busy_poll_s > self.poll_s:
            raise ValueError(f"busy_poll_s ({self.busy_poll_s:g}) must not be above poll_s ({self.poll_s:g})")
        return self


# Not strict as a whole: pydantic would then take no table for a dataclass. Its numbers and switches are.
@dataclass(frozen=True, slots=True, config=_SECTION)
class PolicySettings:
    """How the cluster is shared.

    `polluxctl settings set` overrides these defaults at run time.
    """

    objective: Objective = "completion-time"
    """What a plan optimises: `completion-time` at a price per GPU, or `fair-share`, the p-mean of speedups."""
    kappa: Kappa = 2.0
    """Completion time: the last jobs to end count as much as this many further jobs, and as much again for each ten
    jobs."""
    power: Power = -1.0
    """Fair share: exponent p of the p-mean fitness; 1 mean, 0 geometric mean, -1 harmonic mean, -inf max-min."""
    fairness_per: Owner = "job"
    """Who has an equal share: each job, each user or each account. A user's or account's jobs divide the share."""
    account_weights: Annotated[Mapping[str, Weight], example({"physics": 2.0})] = field(default_factory=dict)
    """Weight of an account's jobs. A job's weight is the product of all that apply; each is 1 by default."""
    user_weights: Annotated[Mapping[str, Weight], example({"ada": 2.0})] = field(default_factory=dict)
    """Weight of a user's jobs."""
    qos_weights: Annotated[Mapping[str, Weight], example({"high": 4.0})] = field(default_factory=dict)
    """Weight of the jobs of a Slurm QOS."""
    job_weights: Annotated[
        Mapping[JobId, Weight],
        run_time_only(
            "polluxctl settings set --job-weight", expected_name="a Slurm job id", name_metavar="ID"
        ),
    ] = field(default_factory=dict)
    """Weight of one job, by job id."""
    slurm_priority: Share = 0.0
    """How much Slurm's priority weighs a job: its ratio to the median of all users' highest, to this power."""
    paused: Annotated[StrictBool, run_time_only("polluxctl pause")] = False
    """polluxd records decisions and starts, moves and stops nothing."""
    partial_nodes: StrictBool = False
    """Allow a multi-node job equal parts of nodes instead of whole nodes."""
    account_ceilings: Annotated[Mapping[str, Gpus], example({"interns": 8})] = field(default_factory=dict)
    """Most GPUs that an account's jobs hold together."""
    user_ceilings: Annotated[Mapping[str, Gpus], example({"bob": 4})] = field(default_factory=dict)
    """Most GPUs that a user's jobs hold together."""
    account_guarantees: Annotated[Mapping[str, Gpus], example({"physics": 16})] = field(default_factory=dict)
    """GPUs kept for an account's jobs whenever they can use them."""
    user_guarantees: Annotated[Mapping[str, Gpus], example({"ada": 4})] = field(default_factory=dict)
    """GPUs kept for a user's jobs whenever they can use them."""
    gpu_counts: GpuRule = "any"
    """Numbers of GPUs that any job may be given."""
    waiting_power: Exponent = 2.0
    """Exponent of a waiting job's slowdown in its weight: its wait and its length over its length; 0 turns it off."""
    start_gpus: StartGpus = 4
    """Most GPUs, of one node, that a job starts with before it was measured; `min-gpus` may ask for more."""
    least_gain: LeastGain = 0.0
    """A GPU has to add this share of what each adds at the job's most efficient size, or is left idle; for
    `completion-time`."""
    hysteresis: Share = 0.05
    """A running job moves only where its predicted goodput rises by more than this share."""
    cloud_prices: Annotated[Mapping[str, NodePrice], example({"p4d": 32.8, "p4d-spot": 12.5})] = field(
        default_factory=dict
    )
    """Price of a node for an hour, by a Slurm feature of the node or by its GPU type. Nodes with a price are rented:
    polluxd uses them where that is worth the price."""
    cloud_hour_value: Money = 0.0
    """What it is worth that one job ends an hour sooner. At 0, no node is rented."""
    cloud_month_budgets: Annotated[Mapping[str, Money], example({"physics": 4000.0})] = field(
        default_factory=dict
    )
    """Most that the jobs of an account may cost in a month, in UTC, on rented nodes. The entry `*` holds for each
    account that has none of its own."""
    cloud_boot_s: Duration = 300.0
    """How long a boot takes, until polluxd has measured one."""
    cloud_return_s: Duration = 600.0
    """How long a node costs money after polluxd has begun to vacate it: a move, and Slurm's `SuspendTime`."""

    def conflicts(self) -> list[str]:
        """Return each pair of values that contradict each other, as a message."""
        return [
            f"{kind}_guarantees.{name} ({gpus}) must not be above {kind}_ceilings.{name} ({ceilings[name]})"
            for kind, floors, ceilings in (
                ("account", self.account_guarantees, self.account_ceilings),
                ("user", self.user_guarantees, self.user_ceilings),
            )
            for name, gpus in sorted(floors.items())
            if gpus > ceilings.get(name, gpus)
        ]


class MoveSettings(_Section):
    """Limits on moves, and how long polluxd waits for each step."""

    cooldown_s: Duration = 30.0
    """Longest time for which polluxd leaves a job alone after a move; never longer than the move took.

    A job that was resized in place may be resized again at once.
    """
    max_concurrent: Count = 0
    """Most moves under way at one time; 0 means no limit."""
    restarts_per_hour: Count = 0
    """Most job restarts per hour, cluster-wide; 0 means no limit. A resize in place is not a restart."""
    user_restarts_per_hour: Count = 0
    """Most restarts per hour of one user's jobs; 0 means no limit. It leaves `restarts_per_hour` to other users."""
    default_cost_s: Duration = 30.0
    """Expected cost of a move until the job's own moves are measured (the constant of the paper)."""
    own_loop_rest: Count = 20
    """A trainer of its own loop (`pollux wrap`) trains for so many times the cost of its moves between two of them,
    and before it gets fewer GPUs than its user asked for, within an hour. 0: no such rest."""
    paths: MovePaths = ("resize", "requeue")
    """How polluxd may move running jobs. It takes the fastest path that a job supports."""
    planned_timeout_s: Seconds = 60.0
    """Longest wait for the GPUs of the target to come free."""
    drain_timeout_s: Seconds = 30.0
    """Longest wait for the agent to acknowledge a checkpoint."""
    requeued_timeout_s: Seconds = 120.0
    """Longest wait for the GPUs of a requeued job to come free."""
    start_timeout_s: Seconds = 30.0
    """Longest wait for Slurm to start a placed job."""
    training_timeout_s: Seconds = 120.0
    """Longest wait for the first training step after a start or a resize."""
    recruit_timeout_s: Seconds = 60.0
    """Longest wait for the companion job of a job that grows in place."""
    give_back_timeout_s: Seconds = 60.0
    """Longest wait for Slurm to take back the nodes of a job that shrank in place."""


class ScopeSettings(_Section):
    """The Pollux jobs that polluxd acts on in mode enforce. Without any name: every one. Other jobs are plain ones."""

    partitions: Annotated[Names, example(["gpu-test"])] = ()
    """Partitions whose jobs polluxd manages. A job with several has to be in these alone."""
    accounts: Annotated[Names, example(["vision"])] = ()
    """Accounts whose jobs polluxd manages, whatever their partition."""
    users: Annotated[Names, example(["alice"])] = ()
    """Users whose jobs polluxd manages, whatever their partition and account."""


class LogSettings(_Section):
    """Lines that polluxd writes to standard error, for the journal."""

    format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object per line. Both have the ids of job, move and cycle."""


class MetricsSettings(_Section):
    """The endpoint for Prometheus."""

    listen: ListenAddress = "127.0.0.1:9850"
    """Where polluxd serves `/metrics`; empty: nowhere. Whoever reaches the address can read, so keep users off it."""
    prometheus: Annotated[PrometheusUrl, example("http://127.0.0.1:9090")] = ""
    """The Prometheus that `polluxctl status` asks which GPUs of running jobs do nothing; empty: it asks none."""
    idle_query: Annotated[str, expected("a query of Prometheus", "PROMQL")] = (
        'count by (hpc_job) ((max_over_time(DCGM_FI_DEV_GPU_UTIL{hpc_job!=""}[30m]) == 0) '
        'and (DCGM_FI_DEV_GPU_UTIL{hpc_job!=""} offset 30m))'
    )
    """What it asks: by job id, the GPUs that have done nothing for long. The default is for NVIDIA's dcgm-exporter with
    its mapping of GPUs to jobs."""


class GatewaySettings(_Section):
    """The gateway, which jobs and `polluxctl` of ordinary users talk to."""

    listen: ListenAddress = "127.0.0.1:9851"
    """Where `polluxd gateway` listens. Any address but a loopback one needs a certificate."""
    tls_certificate: Annotated[FilePath | None, example("/etc/pollux/gateway.crt")] = None
    """PEM file of the certificate, with the chain to its authority."""
    tls_key: Annotated[FilePath | None, example("/etc/pollux/gateway.key")] = None
    """PEM file of the certificate's key, readable for the gateway's user alone."""
    addresses: Annotated[GatewayUrls, example(["https://head.example.org:9851"])] = ()
    """URLs that jobs and users reach the gateways at, in the order of preference. Without any: from `listen`."""
    ca: Annotated[FilePath | None, example("/etc/pollux/ca.crt")] = None
    """Path, on every node, of the certificates that vouch for the gateways. Without it: those of the system."""
    publish_interval_s: Seconds = 30.0
    """Time between two reports of a job."""
    passfile: FilePath | None = Path("/etc/pollux/gateway.pgpass")
    """libpq's password file of role pollux_gateway, mode 0600, owned by the gateway's user."""

    @model_validator(mode="after")
    def _certified(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key must be given together")
        host = self.listen.rpartition(":")[0].strip("[]")
        if self.tls_certificate is None and not (host in ("localhost", "::1") or host.startswith("127.")):
            raise ValueError(
                f"listen ({self.listen}) is not a loopback address: tokens would cross the network in the clear; give "
                "tls_certificate and tls_key"
            )
        return self

    @property
    def urls(self) -> tuple[str, ...]:
        """Where jobs and users reach the gateways."""
        scheme = "http" if self.tls_certificate is None else "https"
        return self.addresses or (f"{scheme}://{self.listen}",)


SECTIONS: Mapping[str, Any] = {
    "slurm": SlurmSettings,
    "database": DatabaseSettings,
    "cycle": CycleSettings,
    "policy": PolicySettings,
    "moves": MoveSettings,
    "scope": ScopeSettings,
    "log": LogSettings,
    "metrics": MetricsSettings,
    "gateway": GatewaySettings,
}
"""The sections of polluxd.toml, by name."""
