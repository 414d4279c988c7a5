"""The repository's Slurm hooks, installed as a site would."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Sequence
from pathlib import Path

from polluxd.site.blocks import LuaValue, job_submit_block, with_block
from polluxd.site.files import apply, differences
from polluxd.site.hooks import Role, Site, trusted, wanted

from .errors import DevClusterError
from .slurmconf import Layout


class Hooks:
    """The files that submission reads.

    Args:
        daemon_user: polluxd's account, which the submission hook trusts.
        gateways: addresses of the gateways.
        lease_s, heartbeat_stale_s: as in `DevCluster`.
    """

    def __init__(
        self,
        layout: Layout,
        daemon_user: pwd.struct_passwd,
        gateways: Sequence[str],
        *,
        lease_s: float,
        heartbeat_stale_s: float | None,
    ) -> None:
        self._layout = layout
        self._daemon_user = daemon_user
        self._lease_s = lease_s
        self._heartbeat_stale_s = heartbeat_stale_s
        self._gateways = tuple(gateways)
        self._submit_hook_time = 0.0

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

    def write(self) -> None:
        """Install all hooks again.

        `polluxctl hooks install` does the same at a site.
        """
        states, problems = wanted(self.site(), (Role.CONTROLLER, Role.NODE))
        if problems:
            raise DevClusterError("; ".join(problems))
        apply(differences(states))
        self.write_submit_hook()

    def site(self) -> Site:
        """Describe this cluster as `polluxctl hooks` sees it."""
        layout = self._layout
        return Site(
            slurm_conf=layout.etc / "slurm.conf",
            pollux=layout.etc,
            user=self._daemon_user.pw_name,
            submit=self._submit_settings(),
        )

    def _submit_settings(self) -> dict[str, LuaValue]:
        settings: dict[str, LuaValue] = {
            "gateway": ",".join(self._gateways),
            "lease_s": self._lease_s,
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
        script.write_text(
            with_block(script.read_text(), job_submit_block(str(self._layout.etc / "hooks"), settings))
        )
        # slurmctld reads the script again only if its modification time, in whole seconds, is newer.
        self._submit_hook_time = max(self._submit_hook_time + 1, time.time() + 1)
        os.utime(script, (self._submit_hook_time, self._submit_hook_time))
