"""polluxd obeys Slurm's own rules on a real cluster.

polluxd takes GPUs from no job that Slurm would not start again.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polluxd.model import JobState, Step

from .conftest import Loop
from .elastic import Elastic

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


def test_no_job_is_taken_from_its_gpus_while_a_rule_forbids_its_start(elastic_loop: Loop) -> None:
    loop = elastic_loop
    command = loop.cluster.command
    job = Elastic(loop, "ruled", "#POLLUX max-gpus=2 resize=requeue")
    job.begin()
    command("scontrol", "update", f"JobId={job.job_id}", "TimeLimit=120")
    partition = job.slurm.partition
    forbid: dict[str, tuple[Callable[[], str], Callable[[], str]]] = {
        "reservation maint begins": (
            lambda: command(
                *("scontrol", "create", "reservation", "ReservationName=maint", "StartTime=now+30minutes"),
                *("Duration=60", "Nodes=ALL", "Users=root", "Flags=maint,ignore_jobs"),
            ),
            lambda: command("scontrol", "delete", "ReservationName=maint"),
        ),
        f"partition {partition} is DOWN": (
            lambda: command("scontrol", "update", f"PartitionName={partition}", "State=DOWN"),
            lambda: command("scontrol", "update", f"PartitionName={partition}", "State=UP"),
        ),
    }
    for rule, (begin, end) in forbid.items():
        attempt = job.slurm.restart_count
        begin()
        waiting = loop.sbatch("waits", "sleep 600", directive="#POLLUX max-gpus=1")
        loop.explained(waiting, rule)
        # polluxd knows the rule by now: it had read Slurm's state before, if the move came in the same moment.
        refused = job.moved(job.order("requeue", ("n4",)))
        assert refused.step is Step.FAILED
        assert rule in refused.detail, refused.detail
        assert Step.REQUEUED not in refused.times
        assert loop.job(waiting).state is JobState.PENDING
        assert not loop.store.moves(waiting), "nothing is tried in vain"
        shown = job.slurm
        assert (shown.state, shown.restart_count) == (JobState.RUNNING, attempt), "it trained on"
        end()
        loop.until(lambda j=waiting: loop.job(j).state is JobState.RUNNING, 60, why="its start afterwards")  # type: ignore[misc]
        command("scancel", str(waiting))
    target = next(name for name in ("n5", "n4") if name not in job.nodes)
    job.go("requeue", target)
