"""Fail where the agent, polluxd or an example opens, writes, renames or removes a file beside `pollux.private_folder`.

That module checks owner, mode and links. What is found is a call by its name: `open`, one of `os` that takes a path, a
method of `Path` that reaches the file, `shutil`, `tempfile`, and what writes files in numpy, torch and matplotlib.

    python contrib/checks/door.py [FILE...]
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("agent/pollux", "polluxd", "contrib/examples")

EXCEPTIONS = {
    "agent/pollux/private_folder.py": "the door",
    "agent/pollux/checkpoint/file.py": "torch.save and torch.load of files that the door opened",
    "agent/pollux/slurm_job/job_memory.py": "reads /proc and /sys/fs/cgroup",
    "agent/pollux/slurm_job/shared_folder.py": "reads /proc",
    "agent/pollux/slurm_job/runs.py": "reads /proc",
    "agent/pollux/launcher/batch_step.py": "reads /proc",
    "agent/pollux/scheduler/listener.py": "reads /proc/net and /etc/login.defs",
    "agent/pollux/slurm_job/allocation.py": "counts /dev/nvidia*",
    "agent/pollux/slurm_job/code_version.py": "lists the agent's own modules",
    "agent/pollux/selftest/checks.py": "in the folder that `temporary_folder` made",
    "agent/pollux/selftest/on_ranks.py": "in the folder that `temporary_folder` made",
    "agent/pollux/wrap/checkpoints.py": "looks at names, times and sizes of a trainer's files, and opens none",
    "contrib/examples/elastic/": "a user's script, which writes what any training script writes",
    "contrib/examples/emulated.py": "data that scikit-learn carries; the result goes by the door",
    "contrib/examples/plain/": "the same script without Pollux",
    "polluxd/config/config_file.py": "the configuration, of an administrator's",
    "polluxd/daemon.py": "the heartbeat, in polluxd's own folder",
    "polluxd/cli/database.py": "password files, in root's folder",
    "polluxd/site/": "what root installs in Slurm's and polluxd's folders, with guards of its own",
    "polluxd/sim/profiles.py": "lists the folder of --profiles; its files are read by the door",
    "polluxd/slurm/configuration.py": "reads Slurm's configuration, of root's",
    "polluxd/store/sqlfiles.py": "the SQL of the package",
}
"""Each with its reason. A name that ends in / stands for all files in it."""

REMEDY = "reach files by pollux.private_folder, or name a reason in contrib/checks/door.py"

_OS = frozenset(
    {
        "open",
        "rename",
        "renames",
        "replace",
        "unlink",
        "remove",
        "removedirs",
        "link",
        "symlink",
        "mkdir",
        "makedirs",
    }
    | {
        "mkfifo",
        "mknod",
        "rmdir",
        "truncate",
        "chmod",
        "chown",
        "lchown",
        "listdir",
        "scandir",
        "walk",
        "fwalk",
    }
)
_PATH = frozenset(
    {
        "read_text",
        "read_bytes",
        "write_text",
        "write_bytes",
        "unlink",
        "rename",
        "mkdir",
        "touch",
        "rmdir",
        "iterdir",
    }
    | {"symlink_to", "hardlink_to", "chmod", "lchmod", "glob", "rglob", "walk", "tofile"}
)
_LIBRARIES = frozenset(
    {
        "io.open",
        "codecs.open",
        "np.save",
        "np.savez",
        "np.savetxt",
        "np.load",
        "np.loadtxt",
        "zipfile.ZipFile",
        "logging.FileHandler",
        "np.genfromtxt",
        "np.fromfile",
    }
    | {"np.memmap", "torch.save", "torch.load", "sqlite3.connect"}
)
_NO_FILES = frozenset({"which", "get_terminal_size", "copyfileobj"})
"""Functions of shutil that open nothing."""
_NOT_PATHS = frozenset(
    {"os", "io", "codecs", "webbrowser", "Rendezvous", "_groups", "connector", "_connector"}
    | {"writer", "line", "coordinator"}
)
"""Objects of this project's with a method `open`, or `rename`."""
_FOLDER = "folder"
"""Name of each open `Folder`, whose `rename` is the door's own."""
_MODULES = ("shutil", "tempfile")
_HIDDEN = ("os", "io", *_MODULES)
"""Modules that keep their names, by which their functions are found."""


def faults(source: str, name: str) -> list[str]:
    """Return a line for each place that reaches a file otherwise than by the door."""
    tree = ast.parse(source, name)
    spared = {id(call.func) for call in ast.walk(tree) if isinstance(call, ast.Call) and _of_the_kernel(call)}
    found = []
    for node in ast.walk(tree):
        what = ""
        if isinstance(node, ast.Call) and id(node.func) not in spared:
            what = _method(node)
        elif isinstance(node, ast.Import):
            what = "".join(
                f"import {n.name} as {n.asname}" for n in node.names if n.asname and n.name in _HIDDEN
            )
        elif isinstance(node, ast.ImportFrom | ast.Name | ast.Attribute) and id(node) not in spared:
            what = _reaches(node)
        if what:
            found.append(f"{name}:{node.lineno}: {what}: {REMEDY}")  # type: ignore[attr-defined]
    return found


def _of_the_kernel(call: ast.Call) -> bool:
    """Whether a call reaches what no user can put there: /proc, or the null device."""
    whole = ast.unparse(call)
    return "(os.devnull" in whole or any(f"({quote}/proc" in whole for quote in ("'", 'f"', "f'"))


def _reaches(node: ast.ImportFrom | ast.Name | ast.Attribute) -> str:
    """Return what a node names that reaches a file; empty for all else."""
    match node:
        case ast.ImportFrom(module="os" | "shutil" | "tempfile" | "io" as module, names=names):
            all_of_it = module in _MODULES
            taken = [n.name for n in names if n.name in (*_OS, "open", "*") or all_of_it]
            taken = [each for each in taken if each not in _NO_FILES]
            return f"from {module} import {', '.join(taken)}" if taken else ""
        case ast.Name(id="open", ctx=ast.Load()):
            return "open"
        case ast.Attribute(value=ast.Name(id=module), attr=attr):
            reaches = (
                f"{module}.{attr}" in _LIBRARIES
                or (module == "os" and attr in _OS)
                or (module in _MODULES and attr not in _NO_FILES)
            )
            return f"{module}.{attr}" if reaches else ""
    return ""


def _method(call: ast.Call) -> str:
    """Return the method of `Path` that a call seems to be; empty for all else."""
    match call:
        case ast.Call(func=ast.Attribute(value=receiver, attr=attr), args=args, keywords=keywords):
            mine = ast.unparse(receiver).rpartition(".")[2]
            moved = attr == "replace" and len(args) == 1 and not keywords  # that of str takes two
            named = attr == "open" and mine not in _NOT_PATHS
            method = attr in _PATH and not (attr == "rename" and mine == _FOLDER) and mine != "os"
            return f".{attr}" if method or moved or named else ""
    return ""


def main(files: list[str]) -> int:
    paths = [Path(each).resolve() for each in files] or sorted(
        path for program in PROGRAMS for path in (ROOT / program).rglob("*.py")
    )
    found = []
    for path in paths:
        name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
        if not any(name == each or (each.endswith("/") and name.startswith(each)) for each in EXCEPTIONS):
            found += faults(path.read_text(), name)
    unused = [name for name in EXCEPTIONS if not files and not (ROOT / name).exists()]
    found += [
        f"contrib/checks/door.py: {name} is not there: remove it from the exceptions" for name in unused
    ]
    print(
        "\n".join(found) if found else f"door: {len(paths)} files reach files by pollux.private_folder alone"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
