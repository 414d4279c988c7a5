"""Write polluxd's configuration for a private cluster.

It names the cluster's own files and database. The caller sets the pace of polluxd.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .cluster import DevCluster


def write_configuration(
    cluster: DevCluster,
    path: Path,
    *,
    slurm: Mapping[str, object] = MappingProxyType({}),
    cycle: Mapping[str, object] = MappingProxyType({}),
    moves: Mapping[str, object] = MappingProxyType({}),
    policy: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Write a configuration in mode `enforce`.

    Only the cluster's `daemon_user` can read it.

    Args:
        slurm, cycle, moves, policy: further keys of these sections, by polluxd's names (polluxd(8)).

    Raises:
        DevClusterError: the cluster has no Postgres.
    """
    sections: Mapping[str, Mapping[str, object]] = {
        "database": {"url": cluster.database_url},
        "slurm": {
            "cluster": cluster.cluster_name,
            "conf": str(cluster.slurm_conf),
            "heartbeat_file": str(cluster.hooks.heartbeat_file),
            **slurm,
        },
        "cycle": cycle,
        "moves": moves,
        "policy": policy,
        "gateway": cluster.gateways.settings(),
        "metrics": {"listen": ""},  # several clusters share a machine
    }
    lines = [
        "# Everything quicker than on a real cluster, where the defaults are meant.",
        'mode = "enforce"',
    ]
    for name, entries in sections.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
    path.touch()
    path.chmod(0o600)  # it holds the database's password
    path.write_text("\n".join(lines) + "\n")
    os.chown(path, cluster.daemon_user.pw_uid, cluster.daemon_user.pw_gid)
