"""List the shapes that a job may get now, or say why it gets none.

A job may hold at most twice the largest number of GPUs on which it was measured (Pollux, section 4.1, prior-driven
exploration): unmeasured terms of the model sit at their optimistic bound, so a job without a limit could get the whole
cluster because of a guess. A larger min-gpus overrides this cap.

The paper starts every job on one GPU. Here a job that was never measured may start on `policy.start_gpus` of one node:
most trainings scale within a node, and every doubling costs a move. All unmeasured jobs of a user together get at most
the user's equal share of the GPUs, because nobody has seen yet how well they use GPUs (`cycle.trusted_reports`). On a
crowded cluster they start on `min-gpus`. Jobs that must keep their GPUs, and have not reported a training step in their
present attempt, count against the share: otherwise a user could exceed it by jobs that never report, or report once and
are requeued, one after another.

A trainer with a loop of its own starts on the size that its user asked for, if that is possible, and stays there until
it reports: it may never, and its batch size may follow from its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import ceil

from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Node, SnapshotJob
from polluxd.policy.domains import Domain, Layout, eligible, gpu_types, is_rack_aware, partitions_of, racks
from polluxd.policy.shapes import ANY, ANYWHERE, ONE_RACK, OVER_RACKS, Shape, Stock, available, bare, stock

GROWTH = 2
CROWDED = 0.75
"""Part of the GPUs that smallest sizes, by user within the equal share, take on a crowded cluster: most larger starts
would park running jobs there."""


def measured_on(job: SnapshotJob) -> int:
    """Return the most GPUs that the job was measured on; 0: none yet."""
    # The sizes at which earlier runs of the same training were measured count, until this run contradicts them.
    return max(job.report.explored_gpus, job.report.prior_gpus) if job.report is not None else 0


def _seen_to_train(job: SnapshotJob, attempt: int) -> bool:
    """Return whether this attempt, or a later one, reported a training step."""
    report = job.report
    return report is not None and report.attempt >= attempt and report.first_step_at is not None


def _own_size(job: SnapshotJob) -> int | None:
    """Return the GPUs on which a trainer starts that polluxd knows nothing of: what its user asked for."""
    return job.spec.own_size if job.report is None else None


class Caps:
    """The most GPUs that measurements justify, for the jobs of a domain."""

    def __init__(self, domain: Domain, settings: PolicySettings) -> None:
        smallest = Counter[str]()
        for job in domain.jobs:
            smallest[job.user] += max(job.spec.min_gpus, 1)
        share = ceil(domain.capacity / max(len(smallest), 1))
        # A job of an absurd size must not make the cluster crowded for other users.
        crowded = sum(min(gpus, share) for gpus in smallest.values()) > CROWDED * domain.capacity
        most = 1 if crowded else min(settings.start_gpus, domain.gpus_per_node)
        silent = Counter[str]()
        dividing: dict[str, list[int]] = {}
        for job in domain.jobs:
            if job.pinned and job.placement and not _seen_to_train(job, job.attempt):
                silent[job.user] += job.placement.gpus
            elif not measured_on(job):
                dividing.setdefault(job.user, []).append(job.job_id)
        self._start: dict[int, int] = {}
        for user, jobs in dividing.items():
            each, rest = divmod(max(share - silent[user], 0), len(jobs))
            self._start |= {job_id: min(most, each + (n < rest)) for n, job_id in enumerate(jobs)}

    def of(self, job: SnapshotJob) -> int:
        """Return the job's cap, which is never below its min-gpus.

        An unmeasured job starts on min-gpus if its batch size is fixed, since nobody knows yet how it divides, or if it
        is not preemptible, since it would keep what it starts with.
        """
        measured, spec = measured_on(job), job.spec
        if own_size := _own_size(job):
            return max(own_size, spec.min_gpus)
        if job.attempt and not job.placement and not _seen_to_train(job, job.attempt - 1):
            # Its last attempt held GPUs, and reported no training step on them, whatever earlier ones reported.
            return max(spec.min_gpus, 1)
        if job.report is not None and measured:
            most = min(GROWTH * measured, job.report.most_gpus or GROWTH * measured)
            return max(most, spec.min_gpus)
        start = self._start.get(job.job_id, 1) if spec.adaptive and spec.preemptible else 1
        if job.report is not None:
            # The job has started, but has no fit, or its fit was rejected: it gets no more GPUs than before.
            start = min(start, job.report.gpus)
        return max(start, spec.min_gpus, 1)


NOTHING = Shape(0, 0)


def present(job: SnapshotJob) -> Shape:
    """The shape of what the job holds."""
    return Shape(len(job.placement.nodes), job.placement.gpus_per_node)


def _order(shape: Shape) -> tuple[int, int, str, int]:
    return shape.gpus, shape.nodes, shape.gpu_type or "", shape.racks


def is_pinned(job: SnapshotJob) -> bool:
    """Whether this plan must leave the job as it is."""
    return job.pinned or (not job.spec.preemptible and bool(job.placement))


class FeasibleShapes:
    """Shapes per job over one domain; jobs of equal demands share the work."""

    def __init__(self, domain: Domain, settings: PolicySettings) -> None:
        self._nodes = domain.nodes
        self.layout = Layout(domain.nodes)
        self._by_name = {n.name: n for n in domain.nodes}
        self.types = gpu_types(domain)
        """GPU types to tell apart; none where they make no difference."""
        self.racks = racks(domain.nodes)
        """Racks to tell apart, for jobs that do; none where there is but one."""
        self.roomiest = max(
            (sum(n.rack == r and n.gpus > 0 for n in domain.nodes) for r in self.racks), default=0
        )
        """Nodes of the largest rack."""
        self._partial = settings.partial_nodes
        self._rule = settings.gpu_counts
        self._eligible: dict[frozenset[str], list[Node]] = {}
        self._stocks: dict[tuple[object, ...], Stock] = {}
        self._known: dict[tuple[object, ...], list[Shape]] = {}

    def nodes(self, job: SnapshotJob) -> list[Node]:
        """Nodes that the job's partitions allow, in or out of service."""
        partitions = partitions_of(job)
        if partitions not in self._eligible:
            self._eligible[partitions] = [n for n in self._nodes if eligible(partitions, n)]
        return self._eligible[partitions]

    def may_stay(self, job: SnapshotJob) -> bool:
        """Return whether the job can keep what it holds.

        Its nodes are in service, in its partition, and have GPUs left to Pollux.
        """
        if job.gives_back and job.spec.max_gpus is not None and job.placement.gpus > job.spec.max_gpus:
            return False
        partitions = partitions_of(job)
        held = [self._by_name.get(name) for name in job.placement.nodes]
        return bool(held) and all(
            n is not None and n.capacity >= job.placement.gpus_per_node and eligible(partitions, n)
            for n in held
        )

    def shapes(self, job: SnapshotJob, most: int, *, stays: bool) -> list[Shape]:
        """Return the shapes that the job may be given.

        `most`: GPUs that the job's measurements justify. If the job can stay, its present shape is one of the shapes,
        also above `most`.
        """
        spec = job.spec
        found = self._between(job, spec.min_gpus, most if spec.max_gpus is None else min(most, spec.max_gpus))
        if not found:
            # The least that is possible from min-gpus up (a whole node more) is granted like min-gpus itself.
            larger = self._between(job, spec.min_gpus, spec.max_gpus)
            found = [s for s in larger if s.gpus == larger[0].gpus]
        elif self._rules(job) and found[-1].gpus * GROWTH <= most:
            # The cap may lie below the next allowed count. This count is then the next step.
            found = found + self._between(job, found[-1].gpus + 1, spec.max_gpus)[:1]
        if _own_size(job):
            found = [s for s in found if s.gpus == found[-1].gpus]
        if not measured_on(job):
            # A start on several nodes would be a guess about the network, too.
            found = [s for s in found if s.nodes == 1] or [s for s in found if s.gpus == found[0].gpus]
        if job.max_nodes is not None:
            found = [s for s in found if s.nodes <= job.max_nodes]
        now = self.present(job)
        if stays and now not in found:
            return sorted([*found, now], key=_order)
        return found

    def present(self, job: SnapshotJob) -> Shape:
        """Return the shape that the job holds.

        GPU type and racks are part of it where they make a difference.
        """
        shape = present(job)
        if not self.types and not self.racks:
            return shape
        held = [n for n in map(self._by_name.get, job.placement.nodes) if n is not None]
        kinds, over = {n.gpu_type for n in held}, {n.rack for n in held}
        if self.types and len(kinds) == 1:
            shape = shape._replace(gpu_type=kinds.pop())
        if shape.nodes > 1 and over and self.by_rack(job):
            shape = shape._replace(racks=ONE_RACK if len(over) == 1 else OVER_RACKS)
        return shape

    def by_rack(self, job: SnapshotJob) -> bool:
        """Whether the job is offered one rack and several as different shapes."""
        return bool(self.racks) and is_rack_aware(job)

    def _rules(self, job: SnapshotJob) -> tuple[str, ...]:
        return tuple(rule for rule in (self._rule, job.spec.gpu_counts) if rule != ANY)

    def _stock(self, job: SnapshotJob, kind: str | None, rack: str | None = None) -> Stock:
        spec = job.spec
        key = (partitions_of(job), spec.cpus_per_gpu, spec.one_thread, spec.mem_per_gpu_mb, kind, rack)
        if key not in self._stocks:
            nodes = [
                n
                for n in self.nodes(job)
                if (kind is None or n.gpu_type == kind) and (rack is None or n.rack == rack)
            ]
            self._stocks[key] = stock(nodes, spec)
        return self._stocks[key]

    def _between(self, job: SnapshotJob, lowest: int, highest: int | None) -> list[Shape]:
        by_rack = self.by_rack(job)
        spec = job.spec
        own = spec.cpus_per_gpu, spec.one_thread, spec.mem_per_gpu_mb, spec.gpu_counts
        key = (partitions_of(job), *own, lowest, highest, by_rack)
        if key not in self._known:

            def here(kind: str | None, rack: str | None = None) -> list[Shape]:
                return available(
                    self._stock(job, kind, rack),
                    partial=self._partial,
                    lowest=lowest,
                    highest=highest,
                    rules=self._rules(job),
                )

            found: set[Shape] = set()
            for kind in self.types or (None,):
                found.update(
                    shape._replace(
                        gpu_type=kind, racks=OVER_RACKS if by_rack and shape.nodes > 1 else ANYWHERE
                    )
                    for shape in here(kind)
                )
                for rack in self.racks if by_rack else ():
                    found.update(
                        shape._replace(gpu_type=kind, racks=ONE_RACK)
                        for shape in here(kind, rack)
                        if shape.nodes > 1
                    )
            self._known[key] = sorted(found, key=_order)
        return self._known[key]

    def why_none(self, job: SnapshotJob) -> str:
        """Say why a job has no shape.

        `infeasible:` it can never run; `waits:` it must wait.
        """
        spec, nodes = job.spec, self.nodes(job)
        where = f"partition {job.partition}" if job.partition else "the cluster"
        if not nodes:
            return f"infeasible: no node of {where} is known; check the partition's name and its nodes"
        if spec.max_gpus is not None and spec.max_gpus < spec.min_gpus:
            bound = job.max_gpus_rule or f"max-gpus={spec.max_gpus}"
            return f"infeasible: {bound} is below min-gpus={spec.min_gpus}"
        whole = stock([bare(n) for n in nodes], spec)
        ever = available(whole, partial=self._partial)
        top = max((s.gpus for s in ever), default=0)
        if top < spec.min_gpus:
            return _too_large(spec, where, top, sum(n.gpus for n in nodes))
        rules = self._rules(job)
        if rules and not available(
            whole,
            partial=self._partial,
            lowest=spec.min_gpus,
            highest=spec.max_gpus,
            rules=rules,
        ):
            most = top if spec.max_gpus is None else spec.max_gpus
            return (
                f"infeasible: no placement of {spec.min_gpus} to {most} GPUs has a count that "
                f"gpu-counts={' and '.join(rules)} allows"
            )
        if not any(spec.min_gpus <= s.gpus <= (spec.max_gpus or top) for s in ever):
            return (
                f"infeasible: no placement has between {spec.min_gpus} and {spec.max_gpus} GPUs: beyond one "
                "node, jobs get whole nodes; change min-gpus or max-gpus"
            )
        return (
            f"waits: needs {spec.min_gpus} GPUs at once, and too few nodes of {where} are in service "
            "and free of other jobs"
        )


def _too_large(spec: JobSpec, where: str, top: int, total: int) -> str:
    hint = "lower min-gpus"
    if top < total:
        memory = f" or its {spec.mem_per_gpu_mb} MB of memory per GPU" if spec.mem_per_gpu_mb else ""
        what = "CPUs or memory" if memory else "CPUs"
        hint += f", or cpus-per-gpu={spec.cpus_per_gpu}{memory}: {what} run out before GPUs"
    return f"infeasible: min-gpus={spec.min_gpus}, but {where} could never give more than {top} GPUs; {hint}"


def why_no_batch(job: SnapshotJob, shapes: Sequence[Shape]) -> str:
    """For a job whose batch limits allow no batch size at any of its shapes."""
    least = min((s.gpus for s in shapes if s.gpus), default=job.spec.min_gpus)
    limits = job.report.limits if job.report is not None else None
    if limits is None:
        return f"infeasible: no batch size is possible on {least} GPUs"
    top = limits.maximum if job.spec.adaptive else limits.initial
    return (
        f"infeasible: on {least} GPUs the batch size would be at least {least * limits.local_min}, "
        f"and {top} is the most; lower min-gpus or the least batch per GPU"
    )
