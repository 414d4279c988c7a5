"""Attacks by size: texts and numbers that one user makes long for all."""

from __future__ import annotations

import time
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from polluxd.slurm.queue import jobs_query

_LONG_COMMENT = """
local submit = slurm_job_submit
slurm_job_submit = function(job, ...)
  local answer, types = submit(job, ...), string.match(job.script, "# types=(%S+)")
  if types then
    job.admin_comment = job.admin_comment .. " gpu-types=" .. types
  end
  return answer
end
"""
"""An administrator may write any AdminComment."""


_LARGE = 1_000_000
"""Bytes of a snapshot; the site's own has some kilobytes."""
_LONG = 2000
"""Bytes of squeue for each job; usual are some hundred."""


@attack("mallory", "row 23: a comment of 3.5 MB holds slurmctld up")
def endless_comment(site: Site) -> Outcome:
    def seconds(script: Path) -> tuple[float, str]:
        began = time.monotonic()
        _, trouble = site.sbatch("mallory", script, "--ntasks=1")
        return time.monotonic() - began, trouble

    text = "#SBATCH --comment=" + "=" * 3_500_000
    comment, command_first = site.script("comment.sh", text), site.script("first.sh", "true", text)
    # The comment counts only at the head of a script: this is what the transfer of such a script takes by itself.
    usual = min(seconds(command_first)[0] for _ in range(3))
    took, trouble = min(seconds(comment) for _ in range(3))
    return Outcome(
        took > 3 * usual, f"sbatch took {took:.2f} s, {usual:.2f} s without a comment; sbatch: {trouble}"
    )


@attack("mallory", "row 24: GPU types of 60 kB in each decision")
def endless_types(site: Site) -> Outcome:
    types = ",".join(f"{letter}{'x' * 4000}" for letter in "abcdefghijklmno")
    script = site.script("types.sh", f"#POLLUX gpu-types={types}")
    job_id, refused = site.sbatch("mallory", script, "--gres=gpu:1")
    if job_id is not None:
        return Outcome(True, "the hook let the types pass")
    script = site.script("types.sh", "#POLLUX max-gpus=1", f"# types={types}")
    with site.hook(_LONG_COMMENT):
        since = site.cycles()
        job_id, trouble = site.sbatch("mallory", script, "--gres=gpu:1", "--array=0-29")
        assert job_id is not None, trouble

        def largest() -> int:
            found = site.query("SELECT max(length(snapshot::text)) FROM pollux.cycle WHERE id > %s", since)
            return int(found[0][0] or 0)

        site.until(lambda: site.cycles() >= since + 3, "three cycles of polluxd")
        size = largest()
    return Outcome(size > _LARGE, f"the largest snapshot has {size} bytes; the hook: {refused}")


@attack("mallory", "row 25: lists of dependencies in each look at the queue")
def endless_dependencies(site: Site) -> Outcome:
    script, plain = site.script("waits.sh"), ("--ntasks=1", "--hold", "--array=0-199")
    arrays: list[int] = []
    for _ in range(4):
        waits = [f"--dependency=afterok:{':'.join(f'{arrays[0]}_{i}' for i in range(200))}"] if arrays else []
        job_id, trouble = site.sbatch("mallory", script, *plain, *waits)
        assert job_id is not None, trouble
        arrays.append(job_id)
    query = jobs_query()
    form = query.format
    words = (
        f"squeue --local --all --noheader --states=all --array --jobs={','.join(map(str, arrays))}".split()
    )
    answer = site.run("alice", *words, SQUEUE_FORMAT2=form).stdout
    jobs = answer.count(query.end)
    assert jobs == 800, answer[:400]
    waiting = [j.dependent for j in site.slurm.observe().jobs if j.array and j.array[0] == arrays[-1]]
    assert waiting, "the last array is not in the queue"
    assert all(waiting), "polluxd takes a job that waits for others as one that may start"
    return Outcome(
        len(answer) > _LONG * jobs,
        f"squeue prints {len(answer)} bytes for {jobs} jobs, {len(answer) // jobs} for each",
    )


@attack("mallory", "row 26: a number that polluxd cannot read")
def endless_number(site: Site) -> Outcome:
    script = site.script("limit.sh", "#POLLUX min-gpus=1")
    words = ("--gres=gpu:1", "--hold", "--array=0-1%999999999999")
    job_id, trouble = site.sbatch("mallory", script, *words)
    # Other attacks leave records of their own.
    unreadable = {job: why for job, why in site.slurm.observe().unreadable.items() if "array-limit" in why}
    return Outcome(
        job_id is not None and bool(unreadable), f"unreadable: {unreadable or 'none'}; sbatch: {trouble}"
    )
