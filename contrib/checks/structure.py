"""Measure how tangled the code is, and write bench-out/structure.json.

    python contrib/checks/structure.py [--json FILE] [--list] [--check]

`polluxd` and `agent/pollux` are measured together, from the syntax tree; nothing is imported. `--check` (`make lint`)
fails where a figure is above its limit in `limits.json`. A limit may only fall: `--lower` writes what was reached.

cycles                 groups of modules that import each other, directly or through others. An import counts wherever
                       it stands: in a function, or under TYPE_CHECKING.
largest_room           modules that lie directly in one package folder, without its `__init__`
modules                all modules
private_test_accesses  in tests: `other._name`, and constants of modules that a test replaces
longest_module         lines
max_constructor_args   arguments of an `__init__` besides self; records (dataclasses, pydantic models) do not count
duplicate_names        names that two classes, or two modules, share; `ONE_MEANING` names the exceptions
test_imports           imports of one test module by another
lines_product          lines of `polluxd` and `agent/pollux`
lines_core             of them, without the rooms that the core must not import (contracts in pyproject.toml)
lines_tests            lines of `tests`
lines_launcher_and_ranks  lines of these two rooms of the agent
flat_modules           modules of `polluxd` that lie in no room
most_complex           cyclomatic complexity of the worst function, as radon counts it: conditions in expressions too
lines_contrib          lines of all text files of `contrib`
words                  of README.md and docs, as `wc -w` counts them, without what a build generates or includes
ideas                  what a maintainer has to hold, as `ideas.md` beside this file lists it
contrib_cycles         as `cycles`, of `contrib` and the tests' benchmarks
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "polluxd", ROOT / "agent" / "pollux")
TESTS = ROOT / "tests"
LIMITS = Path(__file__).with_name("limits.json")
# Module names with one meaning in several rooms: the errors of a distribution, the fake of a protocol, the state
# machine of a room, the program that `python -m` runs.
ONE_MEANING = {"errors", "fake", "machine", "__main__"}
# Its modules have the names of their commands.
COMMANDS = "polluxd.cli."
# Underscored, and documented all the same: os._exit, sys._getframe, and the methods of named tuples.
DOCUMENTED = {"_exit", "_getframe", "_replace", "_asdict", "_fields", "_make", "_field_defaults"}


def modules(packages: tuple[Path, ...] = PACKAGES) -> dict[str, Path]:
    """Map the dotted name of each module to its file."""
    found = {}
    for package in packages:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the known modules that one module imports, anywhere in its text.

    `from package import name` imports the submodule of that name if there is one, and else the package itself. What the
    package re-exports is reached through the package's own imports.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                if submodule in known:
                    yield submodule
                elif base in known:
                    yield base


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components that hold a cycle."""
    reached = {start: _reachable(start, graph) for start in graph}
    groups = {tuple(sorted(a for a in reached[b] if b in reached[a])) for b in graph}
    return sorted([*group] for group in groups if group)


def _reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph[node]
    return seen


def private_accesses(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and text of each private access and replaced constant."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if _private(node.attr) and owner not in ("self", "cls"):
                found.append((node.lineno, ast.unparse(node)))
            elif isinstance(node.ctx, ast.Store) and _constant(node.attr) and owner not in ("self", "cls"):
                found.append((node.lineno, f"{ast.unparse(node)} = ..."))
        elif isinstance(node, ast.Call) and (replaced := _replaced(node)):
            found.append((node.lineno, ast.unparse(node)[:60] if len(replaced) > 60 else replaced))
    return sorted(found)


def _replaced(call: ast.Call) -> str:
    """Return what a call of setattr or mock.patch replaces, if it counts."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name not in ("setattr", "patch", "object"):
        return ""
    texts = [a.value for a in call.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    last = texts[0].rsplit(".", 1)[-1] if texts else ""
    return f"{name}({last})" if last and (_private(last) or _constant(last)) else ""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def _constant(name: str) -> bool:
    return len(name) > 1 and name.isupper()


def crossings(tree: ast.AST) -> list[tuple[int, str]]:
    """Return line and name of each test module that a module imports from."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = f"{node.module}." if node.module else ""
            names = [module[:-1], *(module + alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found += [(node.lineno, name) for name in names if _test_module(name)]
    return found


def _test_module(name: str) -> bool:
    package, _, last = name.rpartition(".")
    return last.startswith("test_") and (not package or package.startswith("tests"))


def constructors(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each class that has an `__init__`: its arguments, its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                    given = member.args
                    yield len(given.posonlyargs + given.args + given.kwonlyargs) - 1, node.name


def functions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each function: its cyclomatic complexity, its name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield 1 + sum(map(_branches, ast.walk(node))), node.name


def _branches(node: ast.AST) -> int:
    match node:
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.For() | ast.AsyncFor() | ast.While():
            return 1 + bool(node.orelse)
        case ast.Try():
            return len(node.handlers) + bool(node.orelse)
        case ast.If() | ast.IfExp() | ast.Assert() | ast.Lambda() | ast.match_case():
            return 1
        case _:
            return 0


def duplicates(known: dict[str, Path]) -> dict[str, list[str]]:
    """Map each name of several classes, or of several modules, to its owners.

    A package and its modules may share a name.
    """
    classes, stems = defaultdict(list), defaultdict(list)
    for module, path in known.items():
        if path.name != "__init__.py":
            stems[path.stem] += [] if module.startswith(COMMANDS) else [module]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(f"{module}.{node.name}")
    named = [*classes.items(), *((name, owners) for name, owners in stems.items() if name not in ONE_MEANING)]
    return {name: owners for name, owners in named if len(owners) > 1}


def optional() -> tuple[str, ...]:
    """Return the beginnings of the names of all modules in rooms that the core must not import."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rooms = (one["forbidden_modules"] for one in contracts if one["name"].startswith("the core of"))
    return tuple(f"{name}." for names in rooms for name in names)


def ideas(text: str) -> int:
    """Count the ideas of a list by room."""
    rooms = (line.partition("**: ")[2] for line in text.splitlines() if line.startswith("- **"))
    return sum(len(room.split("; ")) for room in rooms)


def lines(folder: Path) -> int:
    """Count the lines of the Python files in a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def exceeded(figures: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Return a message for each figure above its limit."""
    return [
        f"{name} is {figures[name]}, at most {limit} (contrib/checks/limits.json): take something away"
        for name, limit in limits.items()
        if figures[name] > limit
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how tangled the code is.")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-out" / "structure.json")
    parser.add_argument("--list", action="store_true", help="also name the worst places")
    parser.add_argument("--check", action="store_true", help="fail where a figure is above its limit")
    parser.add_argument(
        "--lower", action="store_true", help="lower each limit to the figure that was reached"
    )
    arguments = parser.parse_args()

    known = modules()
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    circles = cycles({name: {*imports(name, path, known)} for name, path in known.items()})
    rooms = Counter(
        str(path.parent.relative_to(ROOT)) for path in known.values() if path.name != "__init__.py"
    )
    lengths = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    built = sorted(
        (count, f"{name}.{owner}") for name, tree in trees.items() for count, owner in constructors(tree)
    )
    called = sorted(
        (count, f"{name}.{owner}") for name, tree in trees.items() for count, owner in functions(tree)
    )
    tested = {path: ast.parse(path.read_text()) for path in sorted(TESTS.rglob("*.py"))}
    private = {path: private_accesses(tree) for path, tree in tested.items()}
    crossed = {path: crossings(tree) for path, tree in tested.items()}

    shared = duplicates(known)
    programs = modules((ROOT / "contrib", ROOT / "tests" / "benchmarks"))
    command = ["git", "ls-files", "contrib", "README.md", "docs/*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    texts = {name: (ROOT / name).read_text() for name in listed if (ROOT / name).is_file()}

    figures = {
        "cycles": len(circles),
        "largest_room": max(rooms.values()),
        "modules": len(known),
        "private_test_accesses": sum(map(len, private.values())),
        "longest_module": max(lengths.values()),
        "max_constructor_args": built[-1][0],
        "duplicate_names": len(shared),
        "test_imports": sum(map(len, crossed.values())),
        "lines_product": sum(lengths.values()),
        "lines_core": sum(count for name, count in lengths.items() if not f"{name}.".startswith(optional())),
        "lines_tests": lines(TESTS),
        "lines_launcher_and_ranks": sum(
            lines(ROOT / "agent" / "pollux" / room) for room in ("launcher", "ranks")
        ),
        "flat_modules": rooms["polluxd"],
        "most_complex": called[-1][0],
        "lines_contrib": sum(len(text.splitlines()) for name, text in texts.items() if name[:3] == "con"),
        "words": sum(len(text.split()) for name, text in texts.items() if name[:3] != "con"),
        "ideas": ideas(LIMITS.with_name("ideas.md").read_text()),
        "contrib_cycles": len(
            cycles({name: {*imports(name, path, programs)} for name, path in programs.items()})
        ),
    }
    limits = json.loads(LIMITS.read_text())
    if arguments.lower:
        limits = {name: min(limit, figures[name]) for name, limit in limits.items()}
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n")
    if arguments.check:
        above = exceeded(figures, limits)
        print(*above, sep="\n", end="\n" if above else "")
        sys.exit(bool(above))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures, indent=2))
    if arguments.list:
        for circle in circles:
            print("cycle:", " ".join(circle))
        for count, owner in built[-10:]:
            print(f"constructor: {count:3} {owner}")
        for count, owner in called[-5:]:
            print(f"function: complexity {count:3} {owner}")
        for name in sorted(lengths, key=lengths.__getitem__)[-10:]:
            print(f"module: {lengths[name]:4} lines {name}")
        for folder, count in rooms.most_common(5):
            print(f"room: {count:3} modules {folder}")
        for name, owners in shared.items():
            print(f"name: {name}: {', '.join(owners)}")
        for kind, places in (("private", private), ("test import", crossed)):
            for path, found in places.items():
                for line, text in found:
                    print(f"{kind}: {path.relative_to(ROOT)}:{line}: {text}")


if __name__ == "__main__":
    main()
