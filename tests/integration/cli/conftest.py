"""polluxctl as a command, with a configuration of the module's cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polluxd.store import Store

POLLUXCTL = Path(sys.executable).with_name("polluxctl")


@pytest.fixture(scope="module")
def store(dev_postgres, request):
    """The store of the module's cluster, which it leads; nobody renews that, however slow the machine."""
    made = Store(dev_postgres.url, request.module.CLUSTER, lease_s=3600)
    made.migrate()
    assert made.lead() is not None
    yield made
    made.close()


@pytest.fixture
def config(store, dev_postgres, tmp_path, request):
    path = tmp_path / "polluxd.toml"
    cluster = request.module.CLUSTER
    path.write_text(f'[slurm]\ncluster = "{cluster}"\n[database]\nurl = "{dev_postgres.url}"\n')
    path.chmod(0o600)
    return path


@pytest.fixture
def polluxctl(config):
    def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env: dict[str, Any] = (
            os.environ | {"POLLUXD_CONFIG": str(config), "PYTHONHASHSEED": "random"} | environment
        )
        env.pop("COLUMNS", None)
        return subprocess.run(
            [str(POLLUXCTL), *words], capture_output=True, text=True, check=False, env=env, timeout=120
        )

    return run
