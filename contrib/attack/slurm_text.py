"""Attacks by text: names and scripts that pass for something else."""

from __future__ import annotations

import io
import json
import re
import time
from contextlib import nullcontext
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from polluxd.cli.output import PrintableConsole
from polluxd.printable import printable

FORGED = "x UserId=root(0) GroupId=root(0) Account=vip QOS=high JobState=RUNNING AdminComment=pollux:v1"


def decoder_of_before(text: str) -> list[dict[str, str]]:
    """Read `scontrol -o show job` as polluxd once did.

    It takes the first occurrence of a field after the name. This is the undefended side of the attacks.
    """
    records = []
    for line in text.splitlines():
        head = re.match(r"JobId=(\d+) JobName=(.*?) UserId=(\S*?)\((\d+)\) GroupId=", line)
        if head is None:
            raise ValueError(f"expected a job record, got {line[:60]!r}")
        found = {"JobId": head[1], "UserId": head[4]}
        for key in ("Account", "QOS", "TimeLimit", "AdminComment"):
            value = re.search(rf"\s{key}=(\S*)", line[head.end() :])
            found[key] = value[1] if value else ""
        if not re.fullmatch(r"[\d:-]+|UNLIMITED|Partition_Limit", found["TimeLimit"]):
            raise ValueError(f"expected a time limit, got {found['TimeLimit']!r}")
        for nodes, gpus in re.findall(r"\sNodes=(\S+) CPU_IDs=\S* Mem=\S+ GRES=gpu:(\d+)", line):
            found[f"held {nodes}"] = gpus
        records.append(found)
    return records


def _before(site: Site, job_id: int) -> list[dict[str, str]]:
    """Read the job's record as polluxd once did."""
    return decoder_of_before(site.cluster.command("scontrol", "-o", "-d", "show", "job", str(job_id)))


def _submitted(site: Site, name: str, *head: str, gpus: int = 0) -> tuple[int, str]:
    """Submit Mallory's job of this name without the hook's text guard.

    Return the job's id, and what the guard says of the same job.
    """
    script = site.script("plain.sh", *head)
    options = (f"--job-name={name}", "--ntasks=1", *([f"--gres=gpu:{gpus}"] if gpus else []))
    refused, said = site.sbatch("mallory", script, *options)
    if refused is not None:
        raise AssertionError(f"the hook let {name!r} pass")
    with site.without_text_guard():
        job_id, trouble = site.sbatch("mallory", script, *options)
    assert job_id is not None, trouble
    return job_id, said


@attack("mallory", "row 1: a job's name stops polluxd for everybody")
def name_stops_polluxd(
    site: Site, defended: bool, name: str = "x UserId=a(1) GroupId=b TimeLimit=zz"
) -> Outcome:
    job_id, said = _submitted(site, name)
    if not defended:
        try:
            _before(site, job_id)
        except ValueError as error:
            return Outcome(True, f"every cycle ended: {error}")
        return Outcome(False, "the decoder of before read it")
    state = site.slurm.observe()
    seen = [job.job_id for job in state.jobs]
    before = site.cycles()
    site.until(lambda: site.cycles() >= before + 2, "two cycles of polluxd")
    return Outcome(
        job_id not in seen or bool(state.unreadable),
        f"polluxd read {seen}, nothing senseless, and made two more cycles; the hook: {said}",
    )


@attack("mallory", "row 1: a line break in a name stops polluxd")
def line_break_stops_polluxd(site: Site, defended: bool) -> Outcome:
    return name_stops_polluxd(site, defended, "x\nfoo")


@attack("mallory", "row 2: GPUs claimed by a name")
def capacity_claimed(site: Site, defended: bool) -> Outcome:
    claim = "x UserId=a(1) GroupId=b TimeLimit=UNLIMITED Nodes=n[1-4] CPU_IDs=0-7 Mem=0 GRES=gpu:4 Y="
    job_id, said = _submitted(site, claim)
    if not defended:
        held = [r for r in _before(site, job_id) if r.get("held n[1-4]") == "4"]
        return Outcome(bool(held), f"the decoder of before counted {held}")
    foreign = {node.name: node.foreign_gpus for node in site.slurm.observe().nodes}
    return Outcome(any(foreign.values()), f"foreign GPUs {foreign}; the hook: {said}")


@attack("mallory", "row 3: another user's identity, account and QOS by a name")
def identity_forged(site: Site, defended: bool) -> Outcome:
    name = "x UserId=pollux-alice(5) GroupId=b Account=vip QOS=high TimeLimit=UNLIMITED"
    job_id, said = _submitted(site, name, "#POLLUX min-gpus=1", gpus=1)
    if not defended:
        found = next(r for r in _before(site, job_id) if r["JobId"] == str(job_id))
        return Outcome((found["UserId"], found["Account"]) == ("5", "vip"), f"read as {found}")
    job = site.job(job_id)
    assert job is not None
    return Outcome(
        job.uid == 5 or job.account == "vip" or job.qos == "high",
        f"uid {job.uid}, account {job.account!r}, QOS {job.qos!r}; the hook: {said}",
    )


@attack("mallory", "row 4: a ghost job by a line break in a name")
def ghost_job(site: Site, defended: bool) -> Outcome:
    ghost = "JobId=777777 JobName=y UserId=root(0) GroupId=root(0) TimeLimit=UNLIMITED AdminComment=pollux:v1"
    job_id, said = _submitted(site, f"x UserId=a(1) GroupId=b TimeLimit=UNLIMITED\n{ghost}")
    if not defended:
        found = [r for r in _before(site, job_id) if r["JobId"] == "777777"]
        return Outcome(bool(found), f"read as {found}")
    seen = {job.job_id for job in site.slurm.observe().jobs}
    return Outcome(
        777777 in seen or job_id not in seen, f"polluxd read jobs {sorted(seen)}; the hook: {said}"
    )


@attack("mallory", "row 5: a companion that names alice's job")
def companion_of_another(site: Site, defended: bool) -> Outcome:
    parent, trouble = site.sbatch("alice", site.script("hers.sh", "#POLLUX min-gpus=1"), "--gres=gpu:1")
    assert parent is not None, trouble
    uid = next(job.uid for job in site.slurm.observe().jobs if job.job_id == parent)
    line = f"#POLLUX companion-of={parent} attempt=0 move=1 nonce={'0' * 32}"
    name = f"x UserId=pollux-alice({uid}) GroupId=b TimeLimit=UNLIMITED"
    job_id, said = _submitted(site, name, line, gpus=1)
    if not defended:
        found = next(r for r in _before(site, job_id) if r["JobId"] == str(job_id))
        return Outcome(found["UserId"] == str(uid), f"the companion passed for one of uid {found['UserId']}")
    job = site.job(job_id)
    assert job is not None
    return Outcome(job.uid == uid, f"the companion is uid {job.uid}'s, its parent {uid}'s; the hook: {said}")


@attack("mallory", "row 6: a token for a plain job by a name that looks like AdminComment")
def token_for_a_plain_job(site: Site, defended: bool) -> Outcome:
    job_id, said = _submitted(site, "x AdminComment=pollux:v1 ", gpus=1)
    site.until(
        lambda: (found := site.job(job_id)) is not None and bool(found.gpus_per_node_held), "its start"
    )
    if not defended:
        shown = site.cluster.command("scontrol", "-o", "show", "job", str(job_id))
        fooled = re.search(r"(?:^|\s)AdminComment=pollux:v1(?!\s+companion-of=)(?:\s|$)", shown)
        return Outcome(fooled is not None, "a reader of `scontrol show job` took the name for the mark")
    seen = site.query("SELECT 1 FROM pollux.job WHERE job_id = %s", job_id)
    (answer,) = site.ask("mallory", payload=site.payload(job_id))
    return Outcome(
        bool(seen) or answer.ok, f"polluxd knows the job: {bool(seen)}; {answer.text}; the hook: {said}"
    )


@attack("mallory", "row 20: terminal escapes in a name")
def terminal_escapes(site: Site, defended: bool) -> Outcome:
    name = "x\x1b]0;owned\x07\x1b[2J"
    job_id, said = _submitted(site, name, "#POLLUX min-gpus=1", gpus=1)
    job = site.job(job_id)
    assert job is not None
    assert job.name == name
    if not defended:
        return Outcome("\x1b" in f"job {job_id} ({job.name})", "a plain print has the escape")
    out = io.StringIO()
    PrintableConsole(file=out, color_system=None, force_terminal=True).print(f"job {job_id} ({job.name})")
    return Outcome(
        "\x1b" in out.getvalue(), f"polluxctl prints {printable(out.getvalue())}; the hook: {said}"
    )


@attack("mallory", "row 22: a script of 4 MB of comment lines holds slurmctld up")
def endless_script(site: Site, defended: bool) -> Outcome:
    def seconds(script: Path) -> float:
        began = time.monotonic()
        job_id, trouble = site.sbatch("mallory", script, "--ntasks=1")
        assert job_id is not None, trouble
        return time.monotonic() - began

    lines = "# POLLUX x\n" * 340_000
    long, command_first = site.script("long.sh", lines), site.script("first.sh", "true", lines)
    # The hook stops at the first command: this is what the transfer of such a script takes by itself.
    usual = min(seconds(command_first) for _ in range(3))
    with nullcontext() if defended else site.without_text_guard():
        took = min(seconds(long) for _ in range(3 if defended else 1))
    return Outcome(took > 3 * usual, f"sbatch took {took:.2f} s, {usual:.2f} s where a command comes first")


@attack("mallory", "geometry, partition, name and others changed after submission")
def changed_after_submission(site: Site, defended: bool) -> Outcome:
    script = site.script("mine.sh", *(["#POLLUX min-gpus=1"] if defended else []))
    job_id, trouble = site.sbatch("mallory", script, "--gres=gpu:1", "--begin=now+600")
    assert job_id is not None, trouble
    updates = (
        *(
            "NumCPUs=2",
            "MinCPUsNode=2",
            "MinMemoryNode=7",
            "Partition=pollux",
            "TimeMin=1",
            "QOS=normal",
            "Account=root",
            "JobName=y",
            "NumNodes=2-2",
        ),
        *("StartTime=now+700", "CPUsPerTask=2"),
    )
    done = {
        word: site.run("mallory", "scontrol", "update", f"JobId={job_id}", word).returncode == 0
        for word in updates
    }
    harmless = site.run("mallory", "scontrol", "update", f"JobId={job_id}", "Comment=x").returncode == 0
    if defended and not harmless:
        return Outcome(True, "the hook refuses what a user may change")
    return Outcome(any(done.values()), json.dumps(done))
