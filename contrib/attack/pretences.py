"""Attacks by jobs that pretend to be another task, or lie in variables."""

from __future__ import annotations

import json
from contextlib import nullcontext

from contrib.attack.registry import Outcome, attack
from contrib.attack.report import report
from contrib.attack.site import Site
from contrib.attack.tokens import ANYBODY, AUTHORISE

KEEPS_THEIRS = """
do
  local ours = slurm_job_submit
  function slurm_job_submit(job, partitions, uid)
    local theirs = {}
    for _, name in ipairs({ "POLLUX_TICKET_DIR", "POLLUX_MODE", "POLLUX_SUBMITTED" }) do
      theirs[name] = job.environment and job.environment[name]
    end
    local status = ours(job, partitions, uid)
    for name, value in pairs(theirs) do
      job.environment[name] = value
    end
    return status
  end
end
"""


@attack("mallory", "further: the ticket of a task of an array reports for tasks of alice's array")
def other_task(site: Site, defended: bool) -> Outcome:
    """Every task has a job id of its own; the array's id is the last task's."""

    def tasks(user: str) -> list[int]:
        options = ("--gres=gpu:1", "--array=1-2")
        array, trouble = site.sbatch(user, site.script(f"array-{user}.sh", "#POLLUX max-gpus=1"), *options)
        if array is None:
            raise RuntimeError(trouble)
        known: list[int] = []

        def started() -> bool:
            known[:] = [
                job.job_id for job in site.slurm.observe().jobs if job.array and job.array[0] == array
            ]
            return len(known) == 2 and all(site.ticket_of(job_id) is not None for job_id in known)

        site.until(started, f"the tasks of {user}'s array", 60.0)
        return sorted(known)

    hers, his = tasks("alice"), tasks("mallory")
    ticket = site.ticket_of(his[0])
    site.until(lambda: site.publish("mallory", ticket=ticket).ok, "the report of his own task")
    body = json.dumps(report())
    targets = [(task, user) for task in hers for user in ("mallory", "alice")]
    with nullcontext() if defended else site.rewritten(AUTHORISE, *ANYBODY):
        statements = [
            f"SELECT pollux.publish_v1({{cluster}}, {task}, 0, {site.uid(user)}, {{token}}, '{body}'::pg_catalog.jsonb)"
            for task, user in targets
        ]
        answers = site.sql("mallory", *statements, ticket=ticket)
    return Outcome(any(a.ok for a in answers), "; ".join(a.text[:120] for a in answers))


@attack("mallory", "further: POLLUX_ variables of mallory's in the environment of a job")
def environment(site: Site, defended: bool) -> Outcome:
    """The submit hook sets every variable that a hook or the agent trusts."""
    seen = site.home("mallory") / "environment"
    seen.unlink(missing_ok=True)
    script = site.script(
        "environment.sh", "#POLLUX mode=observe", f"env > {seen}.new && mv {seen}.new {seen}"
    )
    given = {"POLLUX_TICKET_DIR": "/tmp/forged", "POLLUX_MODE": "enforce", "POLLUX_SUBMITTED": "1"}
    export = ",".join(["--export=ALL", *(f"{name}={value}" for name, value in given.items())])
    with nullcontext() if defended else site.hook(KEEPS_THEIRS):
        job_id, trouble = site.sbatch("mallory", script, "--gres=gpu:1", export)
        assert job_id is not None, trouble
    site.until(seen.exists, "the job's environment", 60.0)
    lines = dict(line.partition("=")[::2] for line in seen.read_text(errors="replace").splitlines())
    kept = {name: lines.get(name, "") for name in given}
    return Outcome(any(kept[name] == value for name, value in given.items()), f"the job has {kept}")
