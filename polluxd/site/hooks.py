"""Pollux' hooks on one machine: the files that Slurm reads there.

`wanted` says how the files should be, for the roles of the machine.
"""

from __future__ import annotations

import pwd
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from polluxd.errors import ConfigError

from .blocks import (
    LuaValue,
    cli_filter_block,
    job_submit_block,
    merged_slurm_conf,
    with_block,
    without_block,
)
from .files import FileState, read_text

LUA_FILES = (
    "job_submit.lua",
    "admin_comment.lua",
    "directives.lua",
    "heartbeat.lua",
    "companion.lua",
    "hostile_text.lua",
    "placement_options.lua",
    "cli_filter.lua",
)
"""What Slurm loads."""
PLUGINS = {"JobSubmitPlugins": "lua", "CliFilterPlugins": "lua"}
"""What slurm.conf needs."""


class Role(StrEnum):
    """What a machine does in the cluster. A machine may have several roles."""

    CONTROLLER = "controller"
    NODE = "node"
    LOGIN = "login"


_PROGRAM = {Role.CONTROLLER: "slurmctld", Role.NODE: "slurmd", Role.LOGIN: "sbatch"}


@dataclass(frozen=True)
class Site:
    """Where the files are, and what the hooks need to know.

    Args:
        slurm_conf: slurm.conf; the Lua scripts of the site are beside it.
        pollux: Pollux' folder, usually /etc/pollux.
        user: polluxd's user.
        submit: entries of `pollux_config` in job_submit.lua, except the user.
    """

    slurm_conf: Path
    pollux: Path = Path("/etc/pollux")
    user: str = "pollux"
    submit: Mapping[str, LuaValue] = field(default_factory=dict)

    @property
    def hooks(self) -> Path:
        """The folder of Pollux' scripts."""
        return self.pollux / "hooks"


def roles_here(which: Callable[[str], str | None] = shutil.which) -> tuple[Role, ...]:
    """Return the roles of this machine, by the Slurm programs installed. Raises ConfigError."""
    found = tuple(
        role for role, program in _PROGRAM.items() if which(program) or which(f"/usr/sbin/{program}")
    )
    if not found:
        raise ConfigError("neither slurmctld, slurmd nor sbatch is installed here: name the role with --role")
    return found


def source_folder() -> Path:
    """Return the folder with this version's hooks. Raises ConfigError."""
    package = Path(__file__).resolve().parent.parent
    for place in (package / "_slurm_hooks", package.parent / "slurm_hooks"):
        if (place / "job_submit.lua").is_file():
            return place
    raise ConfigError(f"expected Pollux' hooks in {package}/_slurm_hooks, found none: reinstall polluxd")


def wanted(site: Site, roles: Sequence[Role]) -> tuple[list[FileState], list[str]]:
    """Return the files as they should be, and what people must do themselves.

    Raises ConfigError: a file cannot be read, or polluxd's user does not exist.
    """
    states = [*own_files(site)]
    problems: list[str] = []
    if Role.CONTROLLER in roles:
        settings = {**site.submit, **trusted(site.user)}
        states.append(_script(site, "job_submit.lua", job_submit_block(str(site.hooks), settings)))
        if not site.submit.get("gateway"):
            problems.append(
                "no configuration names polluxd's gateway: copy polluxd.toml to this machine, or name it with --config"
            )
        conf, found = _slurm_conf(site)
        states += conf
        problems += found
    # Wherever CliFilterPlugins=lua holds and the script is missing, sbatch and srun fail.
    states.append(_script(site, "cli_filter.lua", cli_filter_block(str(site.hooks))))
    return states, problems


def unwanted(site: Site, roles: Sequence[Role]) -> tuple[list[FileState], list[str]]:
    """Return the files without Pollux, and what people must do themselves."""
    states: list[FileState] = []
    problems: list[str] = []
    for name, empty in _EMPTY.items():
        path = site.slurm_conf.with_name(name)
        if (text := read_text(path)) is not None:
            rest = without_block(text)
            # slurmctld does not start, and sbatch fails, where the plugin `lua` finds no script.
            states.append(_as_it_is(path, rest if rest.strip() else empty))
    text = read_text(site.slurm_conf)
    if text is not None:
        bare = without_block(text, "#")
        if Role.CONTROLLER in roles:
            states.append(_as_it_is(site.slurm_conf, bare))
            problems.append(
                f"{site.slurm_conf}: lists that `hooks install` completed stay as they are (JobSubmitPlugins, "
                "CliFilterPlugins): take words out that only Pollux needed, then restart slurmctld and slurmd"
            )
    problems.append(
        f"{site.hooks} stays: remove the folder when neither slurm.conf nor a script calls it on any machine, and "
        "every slurmd has been restarted"
    )
    return states, problems


_EMPTY = {
    "job_submit.lua": "function slurm_job_submit(job, partitions, uid) return slurm.SUCCESS end\n"
    "function slurm_job_modify(job, record, partitions, uid) return slurm.SUCCESS end\n",
    "cli_filter.lua": "function slurm_cli_setup_defaults(options, early) return slurm.SUCCESS end\n"
    "function slurm_cli_pre_submit(options, offset) return slurm.SUCCESS end\n"
    "function slurm_cli_post_submit(offset, job, step) return slurm.SUCCESS end\n",
}


def own_files(site: Site) -> list[FileState]:
    """Return Pollux' scripts, which no site edits."""
    source = source_folder()
    return [FileState(site.hooks / name, (source / name).read_text(), kept=False) for name in LUA_FILES]


def _script(site: Site, name: str, block: str) -> FileState:
    path = site.slurm_conf.with_name(name)
    return _as_it_is(path, with_block(read_text(path) or "", block))


def _as_it_is(path: Path, text: str) -> FileState:
    """Give a site's file this text; its owner stays, and everybody may read it."""
    if not path.exists():
        return FileState(path, text)
    found = path.stat()
    return FileState(path, text, (found.st_mode & 0o7777) | 0o444, found.st_uid, found.st_gid)


def _slurm_conf(site: Site) -> tuple[list[FileState], list[str]]:
    text = read_text(site.slurm_conf)
    if text is None:
        raise ConfigError(f"{site.slurm_conf}: no such file: name slurm.conf with --slurm-conf")
    included = text_of_includes(site.slurm_conf, text)
    if missing := _missing_plugins(text + included):
        return [], [
            f"{site.slurm_conf} stays as it is: slurmctld would not start, since {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed; install Slurm's Lua plugins (Debian: "
            "slurm-wlm-basic-plugins; elsewhere: Slurm built with Lua)"
        ]
    merged, problems = merged_slurm_conf(text, PLUGINS, included)
    return [_as_it_is(site.slurm_conf, merged)], [f"{site.slurm_conf}: {problem}" for problem in problems]


def text_of_includes(path: Path, text: str) -> str:
    """Return the text of the files that slurm.conf includes, by names relative to its folder (slurm.conf(5))."""
    names = re.findall(r"^\s*include\s+(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return "\n".join(read_text(path.parent / name) or "" for name in names)


def _missing_plugins(conf: str) -> list[str]:
    """Return the Lua plugins that no plugin folder has; none where no folder is found."""
    named = re.search(r"^\s*PluginDir\s*=\s*(\S+)", conf, re.MULTILINE | re.IGNORECASE)
    folders = [Path(word) for word in named[1].split(":")] if named else list(_plugin_folders())
    present = [folder for folder in folders if any(folder.glob("select_*.so"))]
    names = ("job_submit_lua.so", "cli_filter_lua.so")
    return [name for name in names if present and not any((folder / name).exists() for folder in present)]


def _plugin_folders() -> Iterator[Path]:
    for pattern in (
        "usr/lib/slurm*",
        "usr/lib64/slurm",
        "usr/lib/*/slurm*",
        "usr/local/lib/slurm",
        "opt/slurm/lib*/slurm",
    ):
        yield from Path("/").glob(pattern)


def trusted(user: str) -> dict[str, LuaValue]:
    """Return polluxd's user as job_submit.lua knows it: by name where /etc/passwd has the user, else by number."""
    if user == "root":
        return {}
    if re.search(rf"^{re.escape(user)}:", read_text(Path("/etc/passwd")) or "", re.MULTILINE):
        return {"trusted_users": [user]}
    try:
        return {"trusted_uids": [pwd.getpwnam(user).pw_uid]}
    except KeyError:
        raise ConfigError(
            f"polluxd's user {user} does not exist: make it (`useradd --system --no-create-home {user}`), or name "
            "another one with --user"
        ) from None
