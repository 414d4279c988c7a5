"""Prolog, epilog and task prolog, run by their environment as by Slurm.

squeue and sinfo are stand-ins.
"""

from __future__ import annotations

import ast
import hashlib
import hmac
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

HOOKS = Path(__file__).resolve().parents[3] / "slurm_hooks"
SECRET = "5ec2e7" * 8


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Return a node's environment for job 42.

    The job belongs to the calling user and was restarted three times.
    """
    (tmp_path / "secret").write_text(SECRET + "\n")
    config = {
        "cluster": "dev",
        "ticket_dir": str(tmp_path / "tickets"),
        "secret_file": str(tmp_path / "secret"),
        "dsn": "host=db",
        "publish_interval_s": 30,
    }
    (tmp_path / "hooks.json").write_text(json.dumps(config, indent=2))
    squeue(tmp_path)
    sinfo(tmp_path, "gpu:4")
    return {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "POLLUX_HOOK_CONFIG": str(tmp_path / "hooks.json"),
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_UID": str(os.getuid()),
        "SLURM_JOB_GID": str(os.getgid()),
        "SLURM_JOB_GPUS": "0,1",
        "SLURM_JOB_RESTART_COUNT": "3",
        "SLURMD_NODENAME": "n1",
    }


SQUEUE = """#!{python} -S
import json, os, sys
open({folder!r} + "/asked", "w")
assert "--jobs=42" in sys.argv or "--jobs=43" in sys.argv
job = json.load(open({folder!r} + "/job")) | {{"JobID": sys.argv[-1][-2:]}}
for word in os.environ["SQUEUE_FORMAT2"].split(","):
    name, suffix = word.split(":", 1)
    sys.stdout.write(job[name] + suffix)
print()
"""


def squeue(folder: Path, comment: str = "pollux:v1 min-gpus=1", **other: str) -> None:
    job = {"UserID": str(os.getuid()), "RestartCnt": "3", "admin_comment": comment} | other
    (folder / "job").write_text(json.dumps(job))
    script(folder / "squeue", SQUEUE.format(python=sys.executable, folder=str(folder)))


def sinfo(folder: Path, gres: str) -> None:
    script(folder / "sinfo", f"#!/bin/sh\necho '{gres}'\n")


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def run(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(HOOKS / name)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, "a failing hook would drain the node"
    return done


def test_slurms_commands_by_their_folder(site: dict[str, str], tmp_path: Path) -> None:
    elsewhere = tmp_path / "slurm" / "bin"
    elsewhere.mkdir(parents=True)
    for name in ("squeue", "sinfo"):
        (tmp_path / name).rename(elsewhere / name)
    site["PATH"] = "/usr/bin:/bin"
    assert "no ticket" in run("prolog", site).stderr or not (tmp_path / "tickets").exists()
    config = json.loads((tmp_path / "hooks.json").read_text())
    (tmp_path / "hooks.json").write_text(json.dumps(config | {"slurm_bin": str(elsewhere)}))
    assert run("prolog", site).stderr == ""
    assert (tmp_path / "tickets" / "42.n1.json").exists()


def test_the_prolog_may_be_a_link_in_a_folder_of_prologs(site: dict[str, str], tmp_path: Path) -> None:
    link = tmp_path / "50-pollux"
    link.symlink_to(HOOKS / "prolog")
    subprocess.run([str(link)], env=site, check=True)
    assert (tmp_path / "tickets" / "42.n1.json").exists()


def mac(message: str) -> str:
    return hmac.new(SECRET.encode(), message.encode(), hashlib.sha256).hexdigest()


def signed(token: str, attempt: int) -> bool:
    """The token is TIME.HMAC, made now, of this attempt."""
    made_at, _, signature = token.partition(".")
    message = f"dev:42:{attempt}:{os.getuid()}:{made_at}"
    return abs(int(made_at) - time.time()) < 600 and signature == mac(message)


def test_the_ticket(site: dict[str, str], tmp_path: Path) -> None:
    done = run("prolog", site)
    path = tmp_path / "tickets" / "42.n1.json"
    assert (done.stdout, done.stderr) == ("", "")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (path.stat().st_uid, path.stat().st_gid) == (os.getuid(), os.getgid())
    ticket = json.loads(path.read_text())
    assert signed(ticket.pop("token"), 3)
    role = f"pollux_dev_{os.getuid()}_{mac('role')[:4]}"
    assert ticket == {
        "cluster": "dev",
        "job_id": 42,
        "attempt": 3,
        "uid": os.getuid(),
        "dsn": f"host=db user='{role}' password={mac(f'password:{role}')}",
        "publish_interval_s": 30,
        "gpu_type": "",
        "later": {},
    }
    assert [p.name for p in path.parent.iterdir()] == ["42.n1.json"]


@pytest.mark.parametrize(
    ("gres", "kind"),
    [
        ("gpu:a100:2(S:0-1)", "a100"),
        ("gpu:a100:2\ngpu:a100:2", "a100"),
        ("nic:a:1,gpu:4090:8", "4090"),
        ("gpu:1g.5gb:7,shard:1g.5gb:28", "1g.5gb"),
        ("gpu:2", ""),
        ("gpu:a100:2,gpu:h100:2", ""),
        ("(null)", ""),
    ],
)
def test_the_ticket_names_the_type_of_the_gpus_and_the_next_one_keeps_it(
    site: dict[str, str], tmp_path: Path, gres: str, kind: str
) -> None:
    sinfo(tmp_path, gres)
    run("prolog", site)
    assert json.loads((tmp_path / "tickets" / "42.n1.json").read_text())["gpu_type"] == kind
    run("epilog", site)
    assert json.loads((tmp_path / "tickets" / "42.n1.next.json").read_text())["gpu_type"] == kind


def test_the_epilog_leaves_a_ticket_for_the_attempts_to_come(site: dict[str, str], tmp_path: Path) -> None:
    run("prolog", site)
    run("epilog", site)
    (left,) = (tmp_path / "tickets").iterdir()
    assert (left.name, stat.S_IMODE(left.stat().st_mode)) == ("42.n1.next.json", 0o600)
    ticket = json.loads(left.read_text())
    assert ticket["attempt"] == 4
    for attempt in (5, 20):
        assert signed(ticket["later"][str(attempt)], attempt)
    # Back on the node without a prolog, and away again: the tickets go on from there.
    run("epilog", site | {"SLURM_JOB_RESTART_COUNT": "6"})
    assert json.loads(left.read_text())["attempt"] == 6
    run("prolog", site | {"SLURM_JOB_RESTART_COUNT": "6"})
    assert [p.name for p in (tmp_path / "tickets").iterdir()] == ["42.n1.json"]


def test_the_epilog_reads_no_ticket_that_its_owner_has_enlarged(site: dict[str, str], tmp_path: Path) -> None:
    """Root would read a file of any size: its owner may write to it."""
    run("prolog", site)
    ticket = tmp_path / "tickets" / "42.n1.json"
    with ticket.open("a") as file:
        file.write(" " * 100_000)
    done = run("epilog", site)
    assert "larger than 65536 bytes" in done.stderr
    assert list((tmp_path / "tickets").iterdir()) == []


def test_a_ticket_that_nobody_came_back_for_is_swept(site: dict[str, str], tmp_path: Path) -> None:
    run("prolog", site)
    run("epilog", site)
    (left,) = (tmp_path / "tickets").iterdir()
    os.utime(left, (1_000_000_000, 1_000_000_000))
    run("prolog", site | {"SLURM_JOB_ID": "43"})
    assert [p.name for p in (tmp_path / "tickets").iterdir()] == ["43.n1.json"]


def test_the_attempt_from_the_record_where_the_environment_has_none(
    site: dict[str, str], tmp_path: Path
) -> None:
    del site["SLURM_JOB_RESTART_COUNT"]
    run("prolog", site)
    assert json.loads((tmp_path / "tickets" / "42.n1.json").read_text())["attempt"] == 3


def test_a_stale_ticket_is_replaced(site: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "tickets").mkdir()
    (tmp_path / "tickets" / "42.n1.json").write_text("old")
    run("prolog", site)
    assert json.loads((tmp_path / "tickets" / "42.n1.json").read_text())["attempt"] == 3


@pytest.mark.parametrize(
    "comment", ["", "(null)", "xpollux:v1", "pollux:v10", "pollux:v1 companion-of=7 attempt=0 move=3"]
)
def test_a_foreign_job_gets_none(site: dict[str, str], tmp_path: Path, comment: str) -> None:
    squeue(tmp_path, comment, Name="x AdminComment=pollux:v1", Comment="AdminComment=pollux:v1")
    assert run("prolog", site).stderr == ""
    assert not (tmp_path / "tickets").exists()


@pytest.mark.parametrize("other", [{"UserID": "0x"}, {"UserID": "12345"}, {"RestartCnt": "3<x>\n42"}])
def test_an_answer_that_is_not_about_this_job_is_no_ticket(
    site: dict[str, str], tmp_path: Path, other: dict[str, str]
) -> None:
    del site["SLURM_JOB_RESTART_COUNT"]
    squeue(tmp_path, **other)
    assert "no ticket for job 42: " in run("prolog", site).stderr
    assert not (tmp_path / "tickets").exists()


def test_a_job_without_gpus_costs_no_question(site: dict[str, str], tmp_path: Path) -> None:
    del site["SLURM_JOB_GPUS"]
    run("prolog", site)
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("trouble", ["squeue", "config", "secret"])
def test_trouble_is_logged_and_the_job_starts_all_the_same(
    site: dict[str, str], tmp_path: Path, trouble: str
) -> None:
    if trouble == "squeue":
        script(tmp_path / "squeue", "#!/bin/sh\necho 'Unable to contact slurm controller' >&2\nexit 1\n")
    elif trouble == "config":
        (tmp_path / "hooks.json").write_text("{")
    else:
        (tmp_path / "secret").unlink()
    assert "pollux prolog: no ticket for job 42: " in run("prolog", site).stderr
    assert not (tmp_path / "tickets" / "42.n1.json").exists()
    run("epilog", site)


def sizes(environment: dict[str, str]) -> dict[str, str | None]:
    """Return the task prolog's changes of the environment.

    A value is None where the task prolog unsets the variable.
    """
    changes: dict[str, str | None] = {}
    for line in run("task_prolog", environment | {"PATH": "/usr/bin:/bin"}).stdout.splitlines():
        verb, _, rest = line.partition(" ")
        name, _, value = rest.partition("=")
        changes[name] = value if verb == "export" else None
    return changes


@pytest.mark.parametrize("name", ["42.n1.json", "42.n1.next.json"])
def test_the_task_prolog_corrects_the_sizes_of_a_batch_step(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    stale = {
        "POLLUX_TICKET_DIR": str(tmp_path),
        "SLURM_JOB_ID": "42",
        "SLURMD_NODENAME": "n1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_NTASKS": "2",
    }
    assert sizes(stale) == {
        "SLURM_NTASKS": "1",
        "SLURM_NPROCS": "1",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_PER_TASK": "8",
        "SRUN_CPUS_PER_TASK": "8",
        "SLURM_GPUS": None,
        "SLURM_GPUS_PER_NODE": None,
        "SLURM_GPUS_PER_TASK": None,
        "SLURM_CPUS_PER_GPU": None,
        "SLURM_MEM_PER_NODE": None,
        "SLURM_DISTRIBUTION": None,
    }


def test_the_task_prolog_leaves_other_steps_and_jobs_alone(tmp_path: Path) -> None:
    (tmp_path / "42.n1.json").touch()
    pollux = {"POLLUX_TICKET_DIR": str(tmp_path), "SLURM_JOB_ID": "42", "SLURMD_NODENAME": "n1"}
    assert sizes(pollux | {"SLURM_JOB_NUM_NODES": "2"}) != {}
    batch_from_26_05 = {"SLURM_STEP_ID": "-5", "SLURM_JOB_NUM_NODES": "2"}
    assert sizes(pollux | batch_from_26_05) != {}
    assert sizes(pollux | {"SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "2"}) == {}
    # Submitted from within job 42, with its environment.
    assert sizes(pollux | {"SLURM_JOB_ID": "43", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "64"}) == {}
    assert sizes({"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}) == {}


def test_an_older_python_can_load_the_prolog() -> None:
    """The prolog has no syntax that Python 3.6 lacks.

    A node's system Python may be 3.6 (RHEL 8) or 3.9 (RHEL 9). A Python that cannot load the prolog would
    drain the node.
    """
    tree = ast.parse((HOOKS / "ticket").read_text(), feature_version=(3, 6))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    notes = [note for f in functions for note in (f.returns, *(a.annotation for a in f.args.args)) if note]
    assert notes
    assert [ast.unparse(n) for n in notes if not isinstance(n, ast.Name | ast.Constant)] == []
