"""Fail where the agent, polluxd or an example opens, writes, renames or removes a file beside `pollux.private_folder`.

That module checks owner, mode and links. What is found is a name, under whatever name its module was imported: `open`,
what takes a path in `os`, the library, numpy and torch, a method of `Path` that reaches the file, a shell, and code
that is made at run time.

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
    "agent/pollux/slurm_job/call_site.py": "a line of the script, as a traceback shows it",
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
    "polluxd/cli/hooks.py": "the time of job_submit.lua, in Slurm's own folder",
    "polluxd/cli/database.py": "password files, in root's folder",
    "polluxd/site/": "what root installs in Slurm's and polluxd's folders, with guards of its own",
    "polluxd/sim/profiles.py": "lists the folder of --profiles; its files are read by the door",
    "polluxd/slurm/configuration.py": "reads Slurm's configuration, of root's",
    "polluxd/store/sqlfiles.py": "the SQL of the package",
}
"""Each with its reason. A name that ends in / stands for all files in it."""

REMEDY = "reach files by pollux.private_folder, or name a reason in contrib/checks/door.py"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OS = _words(
    "open rename renames replace unlink remove removedirs link symlink mkdir makedirs mkfifo mknod rmdir truncate "
    "chmod chown lchown utime setxattr removexattr listdir scandir walk fwalk system popen"
)
_MODULES = _words("shutil tempfile posix fileinput linecache dbm shelve sqlite3 tarfile gzip bz2 lzma")
"""All of whose functions reach files, except `_NO_FILES`."""
_LIBRARIES = _words(
    "io.open io.FileIO io.open_code codecs.open builtins.open zipfile.ZipFile logging.FileHandler logging.handlers.* "
    "numpy.save* numpy.load* numpy.fromfile numpy.genfromtxt numpy.memmap torch.save torch.load "
    "importlib.util.spec_from_file_* importlib.machinery.*"
)
"""A star stands for any end."""
_NO_FILES = frozenset({"shutil.which", "shutil.get_terminal_size", "shutil.copyfileobj"})
_METHODS = _words("unlink rename mkdir rmdir chmod glob rglob walk")
"""Of Path, where they are called: other objects have some of them, too."""
_METHODS_OF_FILES = _words(
    "read_text read_bytes write_text write_bytes touch iterdir symlink_to hardlink_to link_to lchmod tofile savefig "
    "to_csv to_parquet to_pickle"
)
"""Wherever they are named."""
_BUFFER = "drawn"
"""Name of each BytesIO that a figure is drawn into."""
_NOT_PATHS = frozenset(
    {"os", "io", "codecs", "webbrowser", "Rendezvous", "_groups", "connector", "_connector"}
    | {"writer", "line", "coordinator"}
)
"""Objects of this project's with a method `open`, or `rename`."""
_FOLDER = "folder"
"""Name of each open `Folder`, whose `rename` is the door's own."""
_CODE = frozenset({"open", "exec", "eval"})
"""Built-in functions: what they run, nobody has looked at."""
_USUAL = {"np": "numpy", "plt": "matplotlib.pyplot", "pd": "pandas"}


def _forbidden(name: str) -> bool:
    """Whether a function of this full name reaches a file."""
    module, _, function = name.rpartition(".")
    return name not in _NO_FILES and (
        (module == "os" and function in _OS)
        or name.partition(".")[0] in _MODULES
        or any(name.startswith(each[:-1]) if each[-1] == "*" else name == each for each in _LIBRARIES)
    )


class _Faults(ast.NodeVisitor):
    """Collects what a module reaches, by the names under which it has imported modules."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self._modules = dict(_USUAL)

    def _add(self, node: ast.AST, what: str) -> None:
        self.found.append((node.lineno, what))  # type: ignore[attr-defined]

    def _named(self, node: ast.AST) -> str:
        """Return the full name of what a node names; empty: none."""
        match node:
            case ast.Name(id=name):
                return self._modules.get(name, name)
            case ast.Attribute(value=value, attr=attr) if before := self._named(value):
                return f"{before}.{attr}"
        return ""

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            if each.asname and each.name in ("os", "io", *_MODULES):
                self._add(node, f"import {each.name} as {each.asname}")
            elif each.asname:
                self._modules[each.asname] = each.name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for each in node.names:
            name = f"{node.module}.{each.name}"
            if _forbidden(name) or (each.name == "*" and node.module in ("os", "io")):
                self._add(node, f"from {node.module} import {each.name}")
            self._modules[each.asname or each.name] = name

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in _CODE and isinstance(node.ctx, ast.Load):
            self._add(node, node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in _METHODS_OF_FILES or _forbidden(self._named(node)):
            self._add(node, f".{node.attr}")
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        whole, words = ast.unparse(node), {each.arg: each.value for each in node.keywords}
        if "(os.devnull" in whole or any(f"({quote}/proc" in whole for quote in ("'", 'f"', "f'")):
            return  # no user can put anything there
        if isinstance(node.func, ast.Attribute) and [ast.unparse(each) for each in node.args] == [_BUFFER]:
            return
        shell = words.get("shell")
        match node.func:
            case ast.Attribute(value=receiver, attr=attr):
                mine = ast.unparse(receiver).rpartition(".")[2]
                # That of str takes two words.
                moved = attr == "replace" and (
                    words.keys() == {"target"} or (len(node.args) == 1 and not words)
                )
                named = attr == "open" and mine not in _NOT_PATHS
                method = attr in _METHODS and not (attr == "rename" and mine == _FOLDER) and mine != "os"
                if (method or moved or named) and not _forbidden(self._named(node.func)):
                    self._add(node, f".{attr}")
            case ast.Name(id="getattr") if node.args and self._named(node.args[0]) in (
                "os",
                "io",
                "builtins",
                *_MODULES,
            ):
                self._add(node, "getattr")
        if isinstance(shell, ast.Constant) and shell.value:
            self._add(node, "shell=True")
        if "filename" in words and self._named(node.func) == "logging.basicConfig":
            self._add(node, "logging.basicConfig(filename=)")
        self.generic_visit(node)


def faults(source: str, name: str) -> list[str]:
    """Return a line for each place that reaches a file otherwise than by the door."""
    visitor = _Faults()
    visitor.visit(ast.parse(source, name))
    return [f"{name}:{line}: {what}: {REMEDY}" for line, what in visitor.found]


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
