"""A companion is submitted with all that Slurm and a site's filters have counted of its parent."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines

from .conftest import Loop, loop_on, polluxd
from .elastic import Elastic

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

SAID = "--partition=short --time=30 --nice=7 --reservation=course --exclusive --constraint=fast"


@pytest.fixture
def particular(scratch: Path, tmp_path: Path) -> Iterator[Loop]:
    """Start a cluster whose partition has a DefaultTime of a minute."""
    site = SiteLines(
        partitions={"short": "Nodes=ALL DefaultTime=00:01:00"},
        nodes={f"n{number}": "Feature=fast" for number in (1, 2, 3)},
    )
    with DevCluster(
        scratch / "particular",
        nodes=3,
        gpus_per_node=1,
        lease_s=60,
        publish_interval_s=1.0,
        accounting=True,
        site=site,
    ) as cluster:
        cluster.command(
            *("scontrol", "create", "reservation", "reservationname=course", "users=root"),
            *("nodes=ALL", "starttime=now", "duration=600", "flags=ignore_jobs"),
        )
        daemon = polluxd(cluster, tmp_path, training_timeout=150.0, cooldown=1.0)
        yield from loop_on(cluster, daemon, tmp_path)


def test_a_companion_has_its_parents_time_and_options(particular: Loop) -> None:
    job = Elastic(particular, "asked", f"#SBATCH {SAID} --comment='hello big world'\n#POLLUX max-gpus=1")
    job.begin()
    (first,) = job.nodes
    others = [name for name in particular.cluster.node_names if name != first]
    job.go("resize", first, others[0])
    (companion,) = job.companions()
    assert companion.time_limit_s is not None
    assert 25 * 60 < companion.time_limit_s <= 30 * 60
    shown = particular.cluster.command("scontrol", "-o", "show", "job", str(companion.job_id))
    words = dict(re.findall(r" (Nice|Reservation|OverSubscribe|Features|Partition)=(\S*)", shown))
    assert words == {
        "Nice": "7",
        "Reservation": "course",
        "OverSubscribe": "NO",
        "Features": "fast",
        "Partition": "short",
    }
    assert " Comment=hello big world " in shown

    particular.cluster.command("scontrol", "update", f"jobid={job.job_id}", "TimeLimit=60")
    particular.until(
        lambda: (job.companions()[0].time_limit_s or 0) > 50 * 60, why="the companion's longer time limit"
    )
    assert job.end().launches == 1
