"""Play every case; write sites-out/sites.json.

The exit status is 1 if a case fails. slurmctld is disturbed in the middle of each case: reconfigured, restarted, or a
node that nobody uses drained and resumed, in turn.

Then ten sites that seeds draw (`generated`), each played without polluxd and beside it (`control`).

python -m contrib.sites [--only WORD ...] [--seeds FIRST-LAST] [--out FOLDER] [--page FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from contrib.commit import COMMIT
from contrib.devcluster import DevClusterError
from contrib.devcluster.interrupts import interruptible
from contrib.devcluster.polluxd import idle_notes, lost_gpu_s
from contrib.sites.cases import CASES, Case
from contrib.sites.control import play
from contrib.sites.page import with_row
from contrib.sites.place import Place, place
from polluxd.printable import printable

SEEDS = "1-10"
_DISTURBED_AFTER_S = 6.0
_LONGEST_IDLE_S = 20.0
"""A cycle of 5 s, slurmctld's restart, and the start of a job."""


def reconfigure(site: Place) -> None:
    site.command("scontrol", "reconfigure")


def restart(site: Place) -> None:
    site.restart_slurmctld()


def drain(site: Place) -> None:
    site.command("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=sites")
    time.sleep(3)
    site.command("scontrol", "update", "NodeName=n4", "State=RESUME")


DISTURBANCES: tuple[Callable[[Place], None], ...] = (reconfigure, drain, restart)


def row_of(case: Case, site: Place, disturb: Callable[[Place], None]) -> dict[str, object]:
    """Play a case, disturbed in its middle; return the result's row."""
    started = time.time()
    site.jobs_of_case.clear()
    assert site.control is not None
    site.idle.restart()
    site.control.idle.restart()
    wrong: list[str] = []

    def disturbed() -> None:
        try:
            disturb(site)
        except DevClusterError as error:
            wrong.append(f"{disturb.__name__}: {error}")

    timer = threading.Timer(_DISTURBED_AFTER_S, disturbed)
    timer.start()
    try:
        told, result = case.play(site), "ok"
    except Exception as error:
        traceback.print_exc()
        told, result = f"{type(error).__name__}: {error}", "failed"
    timer.join()
    idle, control = site.idle.measured, site.control.idle.measured
    if idle.longest_s > _LONGEST_IDLE_S:
        wrong.append(f"GPUs that a job could use were idle for {idle.longest_s:.0f} s")
    if watched := idle_notes(site.store, started):
        wrong.append(f"polluxd's own watch: {watched[-1]}")
    if wrong:
        told, result = "; ".join([told, *wrong]), "failed"
    moves = [move for job_id in site.jobs_of_case for move in site.moves(job_id)]
    site.idle.restart()  # GPUs that the clean-up leaves free do not count as idle
    try:
        site.clear()
    except Exception as error:
        told, result = f"{told}; {error}", "failed"
    row: dict[str, object] = {
        "case": case.name,
        "result": result,
        "idle_gpu_s_beside_waiting": round(idle.gpu_s, 1),
        "idle_gpu_s_in_control": round(control.gpu_s, 1),
        "longest_idle_s": round(idle.longest_s, 1),
        "moves": len(moves),
        "lost_gpu_s": lost_gpu_s(moves),
        "what_the_user_saw": printable(told),
    }
    return row | {"disturbed_by": disturb.__name__, "seconds": round(time.time() - started, 1)}


def play_cases(cases: Sequence[Case], done: Callable[[dict[str, object]], None]) -> None:
    """Play the cases on one site, and the same submissions and acts at the same time on one without polluxd."""
    failed = False
    with place() as control, place() as site:
        site.start()
        site.control = control
        for each in (control, site):
            each.idle.start()
        for number, case in enumerate(cases):
            row = row_of(case, site, DISTURBANCES[number % len(DISTURBANCES)])
            failed |= row["result"] != "ok"
            done(row | {"folder": str(site.folder.parent)})
    if not failed:
        for each in (control, site):
            shutil.rmtree(each.folder.parent)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m contrib.sites", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], help="cases with one of these words in their name")
    parser.add_argument("--seeds", help="generated sites alone: one seed, or FIRST-LAST")
    parser.add_argument("--out", type=Path, default=Path("sites-out"))
    parser.add_argument("--page", type=Path, help="page whose rows of the drawn sites are replaced")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []

    def done(row: dict[str, object]) -> None:
        rows.append(row)
        print(f"{row['result']:7}{row['case']} ({row['seconds']} s)", flush=True)
        (arguments.out / "sites.json").write_text(json.dumps(rows, indent=2) + "\n")

    chosen = [case for case in CASES if any(word in case.name for word in arguments.only)]
    if not chosen:
        print(f"sites: no case has any of {arguments.only} in its name", file=sys.stderr)
        return 1
    if arguments.seeds is None:
        play_cases(chosen, done)
    if arguments.seeds is not None or arguments.only == [""]:
        first, _, last = (arguments.seeds or SEEDS).partition("-")
        for seed in range(int(first), int(last or first) + 1):
            row = play(seed)
            done(row)
            if arguments.page is not None:
                former = arguments.page.read_text() if arguments.page.exists() else ""
                arguments.page.write_text(with_row(former, row, COMMIT))
    failed = [str(row["case"]) for row in rows if row["result"] != "ok"]
    if failed:
        print(
            f"sites: {', '.join(failed)} failed; folder of logs: {arguments.out}/sites.json", file=sys.stderr
        )
    return int(bool(failed))


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
