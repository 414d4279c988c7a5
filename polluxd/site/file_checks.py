"""Checks of files; they need neither Slurm nor the database."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from polluxd.config.config_file import Config
from polluxd.errors import ConfigError

from .files import differences, read_text
from .findings import Finding, fault, ok, warning
from .hooks import Role, Site, text_of_includes, wanted

GATEWAY_USER = "pollux-gateway"
"""Who runs `polluxd gateway`, where the packages made this user."""


def configuration_files(config: Config, path: Path, user: str) -> Iterator[Finding]:
    """Check the files that polluxd.toml is and names, for polluxd's user."""
    database = config.database
    gateway = config.gateway
    theirs = GATEWAY_USER if _exists(GATEWAY_USER) else user
    for name, file, reader in (
        ("configuration", path, user),
        ("configuration", path, theirs),
        ("passfile", database.passfile, user),
        ("passfile", gateway.passfile, theirs),
        ("tls", gateway.tls_certificate, theirs),
        ("tls", gateway.tls_key, theirs),
    ):
        if file is not None:
            yield _readable(name, file, reader)
    for passfile in (database.passfile, gateway.passfile):
        if passfile is not None and passfile.exists() and passfile.stat().st_mode & 0o077:
            yield fault(
                "passfile",
                f"{passfile} has mode {_mode(passfile)}: libpq ignores such a file",
                f"chmod 600 {passfile}",
            )
    if gateway.tls_key is not None and gateway.tls_key.exists() and gateway.tls_key.stat().st_mode & 0o007:
        yield fault(
            "tls",
            f"{gateway.tls_key} has mode {_mode(gateway.tls_key)}: any user could pose as the gateway",
            f"chmod o= {gateway.tls_key}",
        )


def _exists(user: str) -> bool:
    try:
        pwd.getpwnam(user)
    except KeyError:
        return False
    return True


def _readable(name: str, path: Path, user: str) -> Finding:
    try:
        found = path.stat()
    except OSError as error:
        return fault(name, f"{path}: {error.strerror}", f"make {path}, readable for the user {user}")
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return fault(
            "user", f"polluxd's user {user} does not exist", f"useradd --system --no-create-home {user}"
        )
    groups = {account.pw_gid, *(g.gr_gid for g in grp.getgrall() if user in g.gr_mem)}
    bit = 0o400 if found.st_uid == account.pw_uid else 0o040 if found.st_gid in groups else 0o004
    if account.pw_uid == 0 or found.st_mode & bit:
        return ok(name, f"{path} is readable for {user}")
    return fault(
        name,
        f"{user} cannot read {path} (mode {_mode(path)}, owner {found.st_uid}:{found.st_gid})",
        f"chown root:{grp.getgrgid(account.pw_gid).gr_name} {path} && chmod 640 {path}",
    )


def hook_files(site: Site, roles: Sequence[Role]) -> Iterator[Finding]:
    """Check that the hooks are in place, current and readable."""
    try:
        states, problems = wanted(site, roles)
        found = differences(states)
    except ConfigError as error:
        yield fault("hooks", str(error), "correct the call or the file, and run `polluxctl doctor` again")
        return
    for difference in found:
        yield fault(
            "hooks",
            f"{difference.wanted.path}: {difference.faults}",
            "run `polluxctl hooks install` on this machine",
        )
    for problem in problems:
        result, _, remedy = problem.partition(": call ")
        yield warning(
            "hooks", result, f"call {remedy}" if remedy else "do that, and run `polluxctl hooks check`"
        )
    if not found:
        yield ok("hooks", f"{len(states)} files are in place and current")
    for folder in (site.pollux, site.hooks):
        if folder.exists() and (folder.stat().st_uid or folder.stat().st_mode & 0o022):
            yield fault(
                "hooks",
                f"{folder} belongs to user {folder.stat().st_uid} with mode {_mode(folder)}; root runs its files",
                f"chown root:root {folder} && chmod 755 {folder}",
            )


def gpu_devices(site: Site, names: Sequence[str] = ()) -> Iterator[Finding]:
    """Check the device files that gres.conf names for this machine.

    Args:
        names: host names of this machine; by default its own, whole and short.
    """
    text = read_text(site.slurm_conf.with_name("gres.conf")) or ""
    host = socket.gethostname()
    here = _node_names(site, names or (host, host.partition(".")[0]))
    missing = [
        device
        for line in text.splitlines()
        for device in _expanded(_gpu_files(line, here))
        if not _is_device(device)
    ]
    if missing:
        yield fault(
            "devices",
            f"gres.conf names {', '.join(missing)}: no such character device on this machine",
            "load the GPU's driver, or correct File= in gres.conf, and restart slurmd",
        )
    elif text:
        yield ok(
            "devices",
            "the device files of gres.conf exist, or are found by Slurm itself; `pollux selftest` here tests whether "
            "trainings work on these GPUs",
        )


def _node_names(site: Site, hosts: Sequence[str]) -> frozenset[str]:
    """Return the host names, and the NodeNames that slurm.conf gives them."""
    conf = read_text(site.slurm_conf) or ""
    found = set(hosts)
    for line in f"{conf}\n{text_of_includes(site.slurm_conf, conf)}".splitlines():
        words = _words(line)
        nodes = list(_expanded(words.get("nodename", "")))
        machines = list(_expanded(words.get("nodehostname", ""))) or nodes
        # One NodeHostname may serve several slurmd (slurm.conf(5)).
        machines *= len(nodes) if len(machines) == 1 else 1
        found.update(node for node, machine in zip(nodes, machines, strict=False) if machine in hosts)
    return frozenset(found)


def _words(line: str) -> dict[str, str]:
    """Return the words KEY=VALUE of a line of Slurm's configuration."""
    words = (word.partition("=") for word in line.partition("#")[0].split())
    return {key.lower(): value for key, _, value in words}


def _gpu_files(line: str, here: frozenset[str]) -> str:
    """Return File= of a line on GPUs; empty where it is of other nodes."""
    words = _words(line)
    if words.get("name", "").lower() != "gpu":
        return ""
    # One gres.conf serves the whole cluster: a node has the lines without NodeName, and its own (gres.conf(5)).
    mine = "nodename" not in words or not here.isdisjoint(_expanded(words["nodename"]))
    return words.get("file", "") if mine else ""


def _expanded(pattern: str) -> Iterator[str]:
    """The names that `/dev/gpu[0-3]` stands for (gres.conf(5))."""
    from ClusterShell.NodeSet import NodeSet, NodeSetException  # noqa: PLC0415 - takes a while to import

    try:
        yield from NodeSet(pattern)
    except NodeSetException:
        yield pattern


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False


def _mode(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"
