"""Run every attack; write attack-out/attacks.json and attacks.md.

The exit status is 1 if an attack succeeds. An attempt that breaks proves nothing, and counts as a success. An attack
succeeds, too, where polluxd's own watch finds GPUs that idle beside a waiting job.

python -m contrib.attack [--only WORD] [--theme NAME] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from contrib.attack.private import site
from contrib.attack.registry import ATTACKS, Attack, Outcome
from contrib.attack.rents import SETTINGS
from contrib.attack.site import Site
from contrib.devcluster.interrupts import interruptible
from contrib.devcluster.polluxd import idle_notes, lost_gpu_s
from polluxd.printable import printable

THEMES = (
    *("slurm_text", "database", "tokens", "gateway", "pretences", "ranks", "files", "companions"),
    *("shares", "starts", "rents"),
)
"""Importing a theme adds its attacks to the list."""
SITES: dict[str, dict[str, Any]] = {
    "starts": {"nodes": 7, "gpus_per_node": 4, "interval_s": 10.0},
    "rents": {"nodes": 3, "settings": SETTINGS},
}
"""Of the themes that need another cluster than the usual one: several GPUs per node and few decisions; rented nodes."""


def tried(attack: Attack, place: Site) -> Outcome:
    """Make one attempt. One that breaks proves nothing: it counts as a success."""
    try:
        found = attack.attempt(place)
        if isinstance(found, Outcome):
            return found
        return Outcome(any(answer.ok for answer in found), "; ".join(answer.text for answer in found))
    except Exception as error:
        traceback.print_exc()
        print("the end of polluxd's log:", place.polluxd.log.read_text(errors="replace")[-1000:], flush=True)
        return Outcome(True, f"the attempt itself broke: {type(error).__name__}: {error}")
    finally:
        place.clear()


def row_of(attack: Attack, place: Site) -> dict[str, Any]:
    """Attack; print and return the row of the result."""
    since, began = time.time(), time.monotonic()
    outcome = tried(attack, place)
    for note in idle_notes(place.store, since)[-1:]:
        outcome = Outcome(True, f"{outcome.evidence}; polluxd's own watch: {note}")
    row = {
        "attack": attack.name,
        "actor": attack.actor,
        "seen to succeed at": attack.seen,
        "result": "succeeded" if outcome.succeeded else "prevented",
        "evidence": printable(outcome.evidence),
        "lost_gpu_s": lost_gpu_s(place.store.moves(), since),
    }
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{row['result']:<10} {row['attack']} ({took})\n           {row['evidence']}", flush=True)
    return row


def page(rows: list[dict[str, Any]], minutes: float) -> str:
    """Return the results as a page of Markdown."""
    prevented = sum(row["result"] == "prevented" for row in rows)
    head = f"# Attacks\n\n{prevented} of {len(rows)} attacks prevented, in {minutes:.0f} minutes.\n\n"
    columns = ("result", "seen to succeed at", "actor", "attack")
    lines = [columns, ["---"] * 4, *([row[name].replace("|", "/") for name in columns] for row in rows)]
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m contrib.attack", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="attacks with this word in their name")
    parser.add_argument("--theme", action="append", choices=THEMES, help="attacks of this theme")
    parser.add_argument("--out", type=Path, default=Path("attack-out"))
    arguments = parser.parse_args()
    themes = arguments.theme or THEMES
    for theme in themes:
        importlib.import_module(f"contrib.attack.{theme}")
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    chosen = [attack for attack in ATTACKS if arguments.only in attack.name and attack.theme in themes]
    for words in ({}, *SITES.values()):
        here = [attack for attack in chosen if SITES.get(attack.theme, {}) == words]
        if here:
            with site(**words) as place:
                rows += [row_of(attack, place) for attack in here]
    minutes = (time.monotonic() - began) / 60
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attacks.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.out / "attacks.md").write_text(page(rows, minutes))
    won = [row["attack"] for row in rows if row["result"] == "succeeded"]
    print(
        f"{len(rows) - len(won)} of {len(rows)} attacks prevented, in {minutes:.1f} minutes; succeeded: {won or 'none'}"
    )
    return 1 if not rows or won else 0


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
