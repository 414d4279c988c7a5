"""What one job holds beyond its own request gives way to others, and an administrator's word counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from polluxd.model import JobState

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def shared_site(scratch: Path) -> Iterator[DevCluster]:
    """Start a cluster of two nodes with slurmdbd, for two users."""
    site = SiteLines(lines=("AccountingStorageEnforce=associations,limits,qos",))
    with DevCluster(
        scratch / "rights", nodes=2, lease_s=60, publish_interval_s=1.0, accounting=True, site=site
    ) as cluster:
        for words in (
            ("add", "account", "lab", "GrpTRES=gres/gpu=6"),
            ("add", "account", "open"),
            ("add", "user", "root", "account=lab,open"),
            ("add", "user", "nobody", "account=lab,open"),
        ):
            cluster.command("sacctmgr", "-i", *words)
        yield cluster


@pytest.fixture
def shared(shared_site: DevCluster, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Loop]:
    folder = scratch / f"shared-{request.node.name}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield from loop_on(shared_site, polluxd(shared_site, folder, cooldown=1.0), folder)


def gpus(loop: Loop, job_id: int) -> int:
    return sum(loop.job(job_id).gpus_per_node_held.values())


def test_a_hold_keeps_no_more_than_the_equal_share(shared: Loop) -> None:
    grown = shared.train("grown", 10000, directive="#SBATCH --account=open\n#POLLUX")
    shared.until(lambda: gpus(shared, grown) == 8, why="the growth over both nodes")
    shared.cluster.command("scontrol", "hold", str(grown))
    shared.user = "nobody"
    other = shared.sbatch("other", "sleep 600", directive="#SBATCH --account=open\n#POLLUX max-gpus=2")
    shared.until(lambda: shared.job(other).state is JobState.RUNNING, 90, why="the other user's start")
    assert gpus(shared, grown) <= 4


def test_growth_into_an_accounts_limit_gives_way_to_a_plain_job(shared: Loop) -> None:
    grown = shared.train("within", 10000, directive="#SBATCH --account=lab\n#POLLUX min-gpus=1")
    shared.until(lambda: gpus(shared, grown) >= 4, why="the growth into the account's limit")
    shared.user = "nobody"
    plain = shared.sbatch("plain", "sleep 600", directive="#SBATCH --account=lab", gpus=4)
    shared.until(lambda: shared.job(plain).state is JobState.RUNNING, 90, why="the plain job's start")
    assert gpus(shared, grown) <= 2
