"""A real Slurm and a real Postgres for the integration tests, private to the run and on loopback."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, DevPostgres


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A short path (a socket's name has 107 characters) that user postgres can reach; kept if a test failed."""
    folder = Path(tempfile.mkdtemp(prefix="pollux-it-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def dev_cluster(scratch: Path) -> Iterator[DevCluster]:
    """Slurm with 4 nodes of 4 stand-in GPUs, the submission hook with a lease of 60 s, and Postgres.

    Shared by the whole session: a test cleans up its own jobs and leaves the daemons running.
    """
    with DevCluster(scratch / "cluster", lease_s=60) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def dev_postgres(scratch: Path) -> Iterator[DevPostgres]:
    """Postgres alone, with the roles and an empty database."""
    with DevPostgres(scratch / "postgres") as postgres:
        yield postgres
