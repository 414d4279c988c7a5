"""Run every attack and write attack-out/attacks.json.

The exit status is 1 if an attack succeeds, or fails without the defence too.

python -m contrib.attack [--only WORD] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from pathlib import Path

from contrib.attack import slurm_text
from contrib.attack.registry import ATTACKS, Attack, Outcome
from contrib.attack.site import Site, site
from polluxd.printable import printable

THEMES = (slurm_text,)
"""The themes. Importing one adds its attacks to the list."""


def tried(attack: Attack, place: Site, *, defended: bool) -> Outcome:
    """Make one attempt.

    An attempt that breaks proves nothing: it counts as a success with the defence, and as a failure without it.
    """
    try:
        return attack.attempt(place, defended)
    except Exception as error:
        traceback.print_exc()
        return Outcome(defended, f"the attempt itself broke: {type(error).__name__}: {error}")
    finally:
        place.clear()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m contrib.attack", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="attacks with this word in their name")
    parser.add_argument("--out", type=Path, default=Path("attack-out"))
    arguments = parser.parse_args()
    rows = []
    with site() as place:
        for attack in ATTACKS:
            if arguments.only not in attack.name:
                continue
            without, with_it = (tried(attack, place, defended=defended) for defended in (False, True))
            held = without.succeeded and not with_it.succeeded
            evidence = f"with the defence: {with_it.evidence} | without: {without.evidence}"
            if not without.succeeded:
                evidence = f"proves nothing, it fails without the defence too. {evidence}"
            rows.append(
                {
                    "attack": attack.name,
                    "actor": attack.actor,
                    "result": "prevented" if held else "succeeded",
                    "evidence": printable(evidence),
                }
            )
            print(f"{rows[-1]['result']:<10} {attack.name}\n           {rows[-1]['evidence']}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "attacks.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if not rows or any(row["result"] == "succeeded" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
