"""Mutate the code many times and count how often a unit test fails.

    python -m contrib.mutation [--mutants N] [--again | --new] [--minutes N] [--seed N] [--jobs N] [--json FILE]
                               [--page FILE] [ROOM ...]

The run draws a seeded sample of each module's mutants (`mutants.py`). It runs the unit tests of the module's room once
without a mutant, and notes which statements each test runs (`marks.py`); tests marked `slow` do not run. It writes each
mutant into a copy of the repository and runs the tests of the changed statement there, the quickest first, until one
fails. A mutant whose tests take `SLOWER` times as long as they take without it counts as killed. `equivalent.txt` lists
mutants that change nothing that a test could see, with the reason; they are not drawn.

With `--again`, only the survivors of the last run are tried, to see whether new tests kill them. With `--new`, only
modules without a result are tried. With `--minutes`, the run begins no mutant after that time; a module whose mutants
were not all tried keeps its last result. So a long run can be made in pieces.

The JSON file keeps the results of rooms that were not asked for. The page is written from it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from contrib.mutation.marks import MarkedRoom, mark, read
from contrib.mutation.mutants import Mutant, mutants
from contrib.mutation.server import ROOT, Server

PASSED = ("0", "5")
"""Pytest's exit statuses without a failure; 5: every test was marked `slow`."""
NOT_TRIED = "not tried"
SLOWER = 5.0
LEAST_S = 60.0
"""Shortest time limit of a mutant's tests."""
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
ROOMS = {
    "polluxd/apply": "tests/unit/apply",
    "polluxd/policy": "tests/unit/policy",
    "agent/pollux/data": "tests/unit/agent/data",
    "agent/pollux/checkpoint": "tests/unit/agent/checkpoint",
    "agent/pollux/resize": "tests/unit/agent/resize",
    "agent/pollux/learning_rate": "tests/unit/agent/learning_rate",
    "agent/pollux/noise": "tests/unit/agent/noise",
}
# Tests of a room that are in the folder of another.
ELSEWHERE = {
    "tests/unit/agent/checkpoint": (
        "tests/unit/agent/loop/test_bad_input.py",
        "tests/unit/agent/loop/test_resuming.py",
    ),
    "tests/unit/agent/learning_rate": ("tests/unit/agent/optimizers/test_optimizer_families.py",),
}


def test_files(folder: str) -> list[str]:
    """Return the test files of a room."""
    found = [*sorted((ROOT / folder).rglob("test_*.py")), *map(ROOT.joinpath, ELSEWHERE.get(folder, ()))]
    return [str(path.relative_to(ROOT)) for path in found]


def equivalents() -> set[tuple[str, str]]:
    """Read the known equivalent mutants as pairs of module and mutant.

    In `equivalent.txt` the reason stands below each mutant.
    """
    lines = [line for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith(("#", " "))]
    return {(module, mutant) for module, mutant in (line.split(" ", 1) for line in lines)}


def sample(module: str, most: int, seed: int, known: set[tuple[str, str]]) -> list[Mutant]:
    """Draw mutants of one module; a seed always draws the same mutants."""
    found = [m for m in mutants((ROOT / module).read_bytes()) if (module, str(m)) not in known]
    drawn = random.Random(f"{seed} {module}").sample(found, min(most, len(found)))
    return sorted(drawn, key=lambda mutant: mutant.start)


def left_of(module: str, names: list[str], known: set[tuple[str, str]]) -> list[Mutant]:
    """Return all mutants of these names; several may share one."""
    left = {name for name in names if (module, name) not in known}
    return [mutant for mutant in mutants((ROOT / module).read_bytes()) if str(mutant) in left]


def modules(asked: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each module that is asked for, with the test folder of its room."""
    for room, folder in ROOMS.items():
        for path in sorted((ROOT / room).glob("*.py")):
            module = str(path.relative_to(ROOT))
            if path.name != "__init__.py" and (not asked or room in asked or module in asked):
                yield module, folder


def page(results: dict[str, dict[str, int]], survivors: dict[str, list[str]]) -> str:
    """Write the summary as Markdown."""
    text = [
        "# Mutants that the unit tests notice",
        "",
        "`make mutation` changes the code a little (a comparison, a sign, a condition, a returned value) and runs the",
        "unit tests of the module's room, without those marked `slow`. A failing test kills the mutant. A seeded",
        f"sample of each module's mutants is drawn: {_drawn(results)}.",
        "`contrib/mutation/equivalent.txt` names equivalent mutants, which are not drawn.",
        "Survivors of the first draw got tests, and were then tried again (`--again`). Among mutants that were not",
        "drawn, the share that the tests kill may be lower.",
        "",
        "| room | modules | mutants | killed | survived | killed, % |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for room in ROOMS:
        of = {name: counts for name, counts in results.items() if name.rpartition("/")[0] == room}
        made, killed = (sum(counts[key] for counts in of.values()) for key in ("mutants", "killed"))
        if made:
            tried = f"{len(of)} of {len(list(modules([room])))}"
            figures = f"{made} | {killed} | {made - killed} | {100 * killed / made:.0f}"
            text.append(f"| {room} | {tried} | {figures} |")
    unknown = [room for room in ROOMS if not any(name.rpartition("/")[0] == room for name in results)]
    text += ["", f"Not run: {', '.join(unknown)}."] if unknown else []
    text += ["", "## Survivors", ""]
    text += [f"- `{name}`: `{mutant}`" for name in sorted(survivors) for mutant in survivors[name]]
    return "\n".join(text) + "\n"


def _drawn(results: dict[str, dict[str, int]]) -> str:
    """Say how many of all mutants the figures rest on."""
    whole = sum(len(mutants((ROOT / name).read_bytes())) for name in results if (ROOT / name).exists())
    return f"{sum(counts['mutants'] for counts in results.values())} of {whole}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Count the mutants that the unit tests notice.")
    parser.add_argument("asked", nargs="*", help=f"rooms or files; all by default: {', '.join(ROOMS)}")
    parser.add_argument("--mutants", type=int, default=12, help="at most so many of each module (12)")
    parser.add_argument("--again", action="store_true", help="try the survivors of the last run alone")
    parser.add_argument("--new", action="store_true", help="try the modules without a result alone")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no mutant after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument(
        "--limit", type=float, default=600.0, help="seconds for a room's tests without a mutant (600)"
    )
    parser.add_argument("--json", type=Path, default=ROOT / "bench-out" / "mutation.json")
    parser.add_argument("--page", type=Path, default=ROOT / "tests" / "benchmarks" / "mutation.md")
    return parser.parse_args()


def _run(work: list[tuple[str, str, Mutant]], given: argparse.Namespace) -> list[tuple[str, Mutant, str]]:
    """Run the tests of each module's mutant; return how each run ended."""
    free: SimpleQueue[Server] = SimpleQueue()
    servers = [Server() for _ in range(given.jobs)]
    for server in servers:
        free.put(server)
    rooms: dict[str, MarkedRoom] = {}
    stop_at = math.inf

    def run_unchanged(folder: str) -> str:
        """Find which statements each test of a room runs."""
        server = free.get()
        sources = {m: (server.folder / m).read_bytes() for m, of in modules([]) if of == folder}
        rooms[folder] = mark(sources, server.marks)
        ended = server.run(rooms[folder].modules, test_files(folder), given.limit, record=True)
        if ended in PASSED:
            rooms[folder].tests = read(server.ran)
        else:
            print(server.output(), file=sys.stderr)
        free.put(server)
        return ended

    def run(job: tuple[str, str, Mutant]) -> tuple[str, Mutant, str]:
        module, folder, mutant = job
        if time.monotonic() > stop_at:
            return module, mutant, NOT_TRIED
        tests = rooms[folder].tests_of(module, mutant)
        limit = max(SLOWER * sum(test.seconds for test in tests), LEAST_S)
        server = free.get()
        changed = mutant.apply((server.folder / module).read_bytes())
        ended = server.run({module: changed}, [test.name for test in tests], limit)
        free.put(server)
        print(f"{'SURVIVED' if ended in PASSED else 'killed  '} {module} {mutant}", flush=True)
        return module, mutant, ended

    with ThreadPoolExecutor(given.jobs) as pool:
        # A room whose tests fail without any mutant proves nothing.
        folders = list({folder: None for _, folder, _ in work})
        for folder, ended in zip(folders, pool.map(run_unchanged, folders), strict=True):
            if ended not in PASSED:
                sys.exit(f"the tests in {folder} fail without a mutant ({ended}): see make unit")
            seconds = sum(test.seconds for test in rooms[folder].tests)
            print(f"{folder}: {seconds:.0f} s without a mutant", flush=True)
        stop_at = time.monotonic() + 60.0 * given.minutes
        ran = list(pool.map(run, work))
    for server in servers:
        server.close()
    return ran


def main() -> None:
    given = options()
    known = equivalents()
    survivors_file = given.json.with_name("mutation_survivors.json")
    results, survivors = _read(given.json), _read(survivors_file)
    asked = [
        (m, folder)
        for m, folder in modules(given.asked)
        if (survivors.get(m) or not given.again) and not (given.new and m in results)
    ]
    work = [
        (m, folder, mutant)
        for m, folder in asked
        for mutant in (
            left_of(m, survivors[m], known) if given.again else sample(m, given.mutants, given.seed, known)
        )
    ]
    ran = _run(work, given)

    results, survivors = _read(given.json), _read(survivors_file)  # another run may have ended since
    cut_short = {module for module, _, ended in ran if ended == NOT_TRIED}
    for module, _ in asked:
        if module in cut_short:
            continue
        tried = Counter(str(mutant) for name, mutant, _ in ran if name == module)
        alive = Counter(str(mutant) for name, mutant, ended in ran if name == module and ended in PASSED)
        if given.again:
            # Of several mutants of one name, the survivor may be any: it is dead once all of them are.
            tried &= Counter(survivors[module])
            alive &= tried
        killed = tried.total() - alive.total() + (results[module]["killed"] if given.again else 0)
        survivors[module] = sorted(alive.elements())
        results[module] = {
            "mutants": killed + alive.total(),
            "killed": killed,
            "survived": alive.total(),
        }
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    survivors_file.write_text(json.dumps(survivors, indent=2, sort_keys=True) + "\n")
    given.page.write_text(page(results, survivors))


if __name__ == "__main__":
    main()
