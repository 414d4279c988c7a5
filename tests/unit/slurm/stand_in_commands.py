"""Stand-ins for Slurm's commands, which answer what a test tells them to."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.unit.slurm.squeue_stand_in import PENDING, RUNNING

NODE = "NodeName=n1 CPUTot=8 Gres=gpu:4 State=IDLE Partitions=main\n"

STAND_IN = """#!{python} -S
import json, os, sys, time
folder = {folder!r}
with open(folder + "/calls", "a") as calls:
    print(json.dumps([[os.path.basename(sys.argv[0])] + sys.argv[1:], dict(os.environ)]), file=calls)
form = os.environ.get("SQUEUE_FORMAT2", "")
asked = ("node", "topology", "config", "partition", "reservation", "format=name,preempt")
shown = "show" in sys.argv and sys.argv[-1] in asked
name = "squeue" if form else "show-" + sys.argv[-1] if shown else "other"
answers = json.load(open(folder + "/answers"))
answer = answers.get(name) or dict()
time.sleep(answer.get("sleep", 0))
one = [job for word in sys.argv if word.startswith("--jobs=") for job in word[len("--jobs="):].split(",")]
jobs = [job for job in answers["jobs"] if not one or job["JobID"] in one]
if len(one) == 1 and not jobs:
    answer = dict(rc=1, err="slurm_load_jobs error: Invalid job id specified")
if form and "rc" not in answer:
    fields = [word.replace(":1<", ":<").split(":", 1) for word in form.split(",")]
    text = "".join("".join(job[n] + suffix for n, suffix in fields) + chr(10) for job in jobs)
    answer["out"] = text[: answer.get("cut")]
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("rc", 0))
"""


def job(job_id: int, state: str = "PENDING", eligible: int = 5, **other: str) -> dict[str, str]:
    there = RUNNING if state == "RUNNING" else PENDING
    words = {"JobID": str(job_id), "State": state, "EligibleTime": str(eligible)}
    return there | words | {"admin_comment": "pollux:v1 min-gpus=1"} | other


class Commands:
    """Stand-ins for Slurm's commands, first in PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("squeue", "scontrol", "scancel", "sacctmgr"):
            script = folder / name
            script.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
            script.chmod(0o755)
        self.answer()

    def answer(self, jobs: Sequence[dict[str, str]] | None = None, **answers: object) -> None:
        full = {"jobs": [job(7), job(8, "RUNNING")] if jobs is None else jobs, "show-node": {"out": NODE}}
        full |= {k.replace("_", "-"): v for k, v in answers.items()}
        (self.folder / "answers").write_text(json.dumps(full))

    @property
    def calls(self) -> list[tuple[list[str], dict[str, str]]]:
        return [tuple(json.loads(line)) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def last(self) -> list[str]:
        return self.calls[-1][0][1:]

    def since(self, before: int = 0) -> list[str]:
        """What each later call was: the command, or what it asked for."""
        return [
            "squeue"
            if "SQUEUE_FORMAT2" in environment
            else "words"
            if "SQUEUE_FORMAT" in environment
            else words[-1]
            if "show" in words
            else words[0]
            for words, environment in self.calls[before:]
        ]
