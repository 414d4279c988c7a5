"""A private Slurm and Postgres, both real, for the integration tests.

They live as long as the test run and listen on the loopback interface only.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, DevPostgres
from tests.integration.slurm_jobs import SlurmJobs


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """Create a folder with a short path that the user postgres can reach.

    The path is short because a socket's name has at most 107 characters. The folder is kept if a test failed.
    """
    folder = Path(tempfile.mkdtemp(prefix="pollux-it-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def dev_cluster(scratch: Path) -> Iterator[DevCluster]:
    """Start Slurm with 4 nodes of 4 stand-in GPUs, and Postgres.

    Slurm has the submission hook with a lease of 60 s. The whole session shares this cluster: a test cleans
    up its own jobs and leaves the daemons running.
    """
    with DevCluster(scratch / "cluster", lease_s=60) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def dev_postgres(scratch: Path) -> Iterator[DevPostgres]:
    """Postgres alone, with the roles and an empty database."""
    with DevPostgres(scratch / "postgres") as postgres:
        yield postgres


@pytest.fixture
def jobs(dev_cluster: DevCluster, scratch: Path) -> Iterator[SlurmJobs]:
    """Jobs of any user on the shared cluster; they end with the test."""
    folder = Path(tempfile.mkdtemp(prefix="jobs-", dir=scratch))
    folder.chmod(0o1777)
    made = SlurmJobs(dev_cluster, folder)
    yield made
    made.end()
