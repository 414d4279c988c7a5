"""The repository's Slurm hooks, installed as a site would."""

from __future__ import annotations

import json
import os
import pwd
import secrets
import time
from pathlib import Path

from .slurmconf import Layout, cli_filter_lua, hook_script, job_submit_lua


class Hooks:
    """The files that submission, prolog and epilog read.

    Args:
        daemon_user: polluxd's account: it may read the tickets' secret, and the submission hook trusts it.
        lease_s, heartbeat_stale_s, publish_interval_s: as of `DevCluster`.
    """

    def __init__(
        self,
        layout: Layout,
        daemon_user: pwd.struct_passwd,
        *,
        lease_s: float,
        heartbeat_stale_s: float | None,
        publish_interval_s: float,
    ) -> None:
        self._layout = layout
        self._daemon_user = daemon_user
        self._lease_s = lease_s
        self._heartbeat_stale_s = heartbeat_stale_s
        self._publish_interval_s = publish_interval_s
        self._submit_hook_time = 0.0

    @property
    def ticket_dir(self) -> Path:
        return self._layout.directory / "tickets"

    @property
    def secret_file(self) -> Path:
        """The file of the tickets' HMAC secret, as hexadecimal text.

        It belongs to root, and polluxd may read it.
        """
        return self._layout.etc / "ticket.secret"

    @property
    def daemon_folder(self) -> Path:
        """polluxd's own: its account may write here."""
        return self._layout.directory / "polluxd"

    @property
    def heartbeat_file(self) -> Path:
        """The file that polluxd touches as its sign of life.

        The submission hook looks at it when `heartbeat_stale_s` is set.
        """
        return self.daemon_folder / "heartbeat"

    def write(self, dsn: str) -> None:
        """Write all hooks again, with a new secret.

        Args:
            dsn: the agents' connection string to Postgres; "" for none.
        """
        layout = self._layout
        (layout.etc / "cli_filter.lua").write_text(cli_filter_lua(layout))
        self.write_submit_hook()
        self.secret_file.touch(mode=0o600)
        self.secret_file.write_text(secrets.token_hex(32) + "\n")
        if self._daemon_user.pw_uid:
            os.chown(self.secret_file, 0, self._daemon_user.pw_gid)
            self.secret_file.chmod(0o640)
        config = layout.etc / "hooks.json"
        config.touch(mode=0o600)  # the connection string holds the agents' password
        settings = {
            "cluster": layout.cluster_name,
            "ticket_dir": str(self.ticket_dir),
            "secret_file": str(self.secret_file),
            "dsn": dsn,
            "publish_interval_s": self._publish_interval_s,
        }
        config.write_text(json.dumps(settings, indent=2))
        for name in ("prolog", "epilog"):
            script = layout.etc / name
            script.write_text(hook_script(layout, name, config))
            script.chmod(0o755)

    def write_submit_hook(self, **overrides: str | float | int) -> None:
        """Write the site's job_submit.lua, with these settings over the defaults.

        The script is in force from the next submission on.
        """
        layout = self._layout
        settings: dict[str, str | float | int | list[int]] = {
            "ticket_dir": str(self.ticket_dir),
            "lease_s": self._lease_s,
            "cluster_gpus": len(layout.nodes) * layout.gpus_per_node,
        }
        if self._daemon_user.pw_uid:
            settings["trusted_uids"] = [self._daemon_user.pw_uid]
        if self._heartbeat_stale_s is not None:
            settings |= {
                "heartbeat_file": str(self.heartbeat_file),
                "heartbeat_stale_s": self._heartbeat_stale_s,
            }
        script = layout.etc / "job_submit.lua"
        script.write_text(job_submit_lua(layout, {**settings, **overrides}))
        # slurmctld reads the script again only if its modification time, in whole seconds, is newer.
        self._submit_hook_time = max(self._submit_hook_time + 1, time.time() + 1)
        os.utime(script, (self._submit_hook_time, self._submit_hook_time))
