"""The repository's Slurm hooks, installed as a site would."""

from __future__ import annotations

import os
import pwd
import time
from pathlib import Path

from polluxd.site.blocks import LuaValue, job_submit_block, with_block
from polluxd.site.files import apply, differences
from polluxd.site.hooks import Role, Site, trusted, wanted

from .errors import DevClusterError
from .slurmconf import Layout


class Hooks:
    """The files that submission, prolog and epilog read.

    Args:
        daemon_user: polluxd's account: it may read the tickets' secret, and the submission hook trusts it.
        lease_s, heartbeat_stale_s, publish_interval_s: as in `DevCluster`.
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
        """Install all hooks again, with a new secret.

        `polluxctl hooks install` does the same at a site.

        Args:
            dsn: the agents' connection string to Postgres; "" for none.
        """
        for path in (self.secret_file, self._layout.etc / "hooks.json"):
            path.unlink(missing_ok=True)
        states, problems = wanted(self.site(dsn), (Role.CONTROLLER, Role.NODE))
        if problems:
            raise DevClusterError("; ".join(problems))
        apply(differences(states))
        self.write_submit_hook()

    def site(self, dsn: str) -> Site:
        """Describe this cluster as `polluxctl hooks` sees it."""
        layout = self._layout
        return Site(
            slurm_conf=layout.etc / "slurm.conf",
            pollux=layout.etc,
            user=self._daemon_user.pw_name,
            submit=self._submit_settings(),
            node={
                "cluster": layout.cluster_name,
                "ticket_dir": str(self.ticket_dir),
                "secret_file": str(self.secret_file),
                "dsn": dsn,
                "publish_interval_s": self._publish_interval_s,
            },
            secret_file=self.secret_file,
        )

    def _submit_settings(self) -> dict[str, LuaValue]:
        layout = self._layout
        settings: dict[str, LuaValue] = {
            "ticket_dir": str(self.ticket_dir),
            "lease_s": self._lease_s,
            "cluster_gpus": len(layout.nodes) * layout.gpus_per_node,
        }
        if self._heartbeat_stale_s is not None:
            settings |= {
                "heartbeat_file": str(self.heartbeat_file),
                "heartbeat_stale_s": self._heartbeat_stale_s,
            }
        return settings

    def write_submit_hook(self, **overrides: str | float | int) -> None:
        """Write the site's job_submit.lua, with these settings over the defaults.

        The script is in force from the next submission on.
        """
        settings = {**self._submit_settings(), **trusted(self._daemon_user.pw_name), **overrides}
        script = self._layout.etc / "job_submit.lua"
        script.write_text(with_block("", job_submit_block(str(self._layout.etc / "hooks"), settings)))
        # slurmctld reads the script again only if its modification time, in whole seconds, is newer.
        self._submit_hook_time = max(self._submit_hook_time + 1, time.time() + 1)
        os.utime(script, (self._submit_hook_time, self._submit_hook_time))
