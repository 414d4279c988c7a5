"""polluxd keeps to the limits of Slurm's accounting.

No job gives GPUs up for one that Slurm then refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from polluxd.model import JobState, Step

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture
def limited(scratch: Path, tmp_path: Path) -> Iterator[Loop]:
    """Start a cluster of two nodes whose account `lab` may hold five GPUs."""
    site = SiteLines(lines=("AccountingStorageEnforce=associations,limits,qos", "Licenses=matlab:1"))
    with DevCluster(
        scratch / "limited", nodes=2, lease_s=60, publish_interval_s=1.0, accounting=True, site=site
    ) as cluster:
        cluster.command("sacctmgr", "-i", "add", "account", "lab", "GrpTRES=gres/gpu=5")
        cluster.command("sacctmgr", "-i", "add", "user", "root", "account=lab")
        yield from loop_on(cluster, polluxd(cluster, tmp_path, cooldown=1.0), tmp_path)


def test_a_reached_limit_moves_nothing_and_is_named(limited: Loop) -> None:
    lab = "#SBATCH --account=lab"
    plain = limited.sbatch("plain", "sleep 600", directive=lab, gpus=3)
    trained = limited.train(
        "trained", 10000, directive=f"{lab}\n#POLLUX min-gpus=2 max-gpus=2 resize=requeue"
    )
    limited.until(lambda: limited.job(plain).state is JobState.RUNNING, why="the plain job's start")
    limited.until(
        lambda: [m.step for m in limited.store.moves(trained)] == [Step.TRAINING],
        why="the training's first step",
    )
    # Even without the training, the account has only two of its five GPUs left.
    waits = limited.sbatch("waits", "sleep 600", directive=f"{lab}\n#POLLUX min-gpus=3")
    limited.explained(waits, "gres/gpu=5 of account lab")
    licensed = [
        limited.sbatch(f"licensed{i}", "sleep 600", directive="#SBATCH --licenses=matlab\n#POLLUX max-gpus=1")
        for i in (1, 2)
    ]
    limited.explained(licensed[1], "license matlab is in use")
    # The license counts as in use from the moment that polluxd starts the first of the two.
    limited.until(
        lambda: limited.job(licensed[0]).state is JobState.RUNNING, 60, why="the licensed job's start"
    )
    assert limited.job(waits).state is JobState.PENDING
    assert not limited.store.moves(waits), "nothing is tried in vain"
    assert not limited.store.moves(licensed[1]), "nothing is tried in vain"
    moves = limited.store.moves(trained)
    assert [m.step for m in moves] == [Step.TRAINING], "it kept its GPUs"
    limited.cluster.command(
        "sacctmgr", "-i", "modify", "account", "where", "name=lab", "set", "GrpTRES=gres/gpu=8"
    )
    limited.cluster.command("scancel", str(plain))
    limited.until(lambda: limited.job(waits).state is JobState.RUNNING, 90, why="its start")
    assert all(m.step is not Step.FAILED for j in (trained, waits, *licensed) for m in limited.store.moves(j))
