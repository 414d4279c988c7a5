"""Attacks on checkpoints, tickets, secrets, and what the hooks read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import ROOT, Site

SPANK = r"""
#include <slurm/spank.h>
SPANK_PLUGIN(mallory, 1);
int slurm_spank_init_post_opt(spank_t sp, int ac, char **av)
{
    if (spank_context() == S_CTX_ALLOCATOR)
        spank_job_control_setenv(sp, "POLLUX_HOOK_CONFIG", av[0], 1);
    return 0;
}
"""
TAKES_SPANK_OVER = """#!/bin/sh
[ -z "$SPANK_POLLUX_HOOK_CONFIG" ] || POLLUX_HOOK_CONFIG=$SPANK_POLLUX_HOOK_CONFIG
export POLLUX_HOOK_CONFIG
"""


def _shared(site: Site, name: str, mode: int) -> Path:
    """Make a folder of root's to which everybody may write."""
    folder = site.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(mode)
    return folder


def _as_user(site: Site, user: str, code: str) -> None:
    done = site.run(user, sys.executable, "-c", f"import os, pathlib\n{code}")
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])


@attack("mallory", "row 17: code as alice by a checkpoint that changes between check and load")
def checkpoint_race(site: Site, defended: bool) -> Outcome:
    """Everybody may write to the folder above alice's."""
    shared = _shared(site, "race", 0o777)
    mark = site.home("alice") / "raced"
    mark.unlink(missing_ok=True)
    _as_user(site, "alice", f"os.mkdir({str(shared / 'hers')!r}, 0o755)")
    _as_user(site, "mallory", f"os.mkdir({str(shared / 'his')!r}, 0o755)")
    site.hands("alice", "checkpoints", "sound", str(shared / "hers"))
    site.hands("mallory", "checkpoints", "bomb", str(shared / "his"), str(mark))
    link = shared / "run"
    his = site.spawn(
        "mallory", *site.command("checkpoints"), "flip", str(link), f"{shared / 'hers'}:{shared / 'his'}"
    )
    assert his.stdout is not None
    his.stdout.readline()
    what = "load" if defended else "load-before"
    tried = site.hands("alice", "checkpoints", what, str(link), timeout_s=90.0)
    return Outcome(mark.exists() or (defended and "writ" not in tried), " ".join(tried.split())[:300])


@attack("mallory", "row 18: a temporary file that is a link to a file of alice's")
def temporary_file(site: Site, defended: bool) -> Outcome:
    shared = _shared(site, "temporary", 0o777)
    precious = site.home("alice") / "precious"
    precious.write_text("precious")
    os.chown(precious, site.uid("alice"), -1)
    _as_user(
        site, "mallory", f"os.symlink({str(precious)!r}, {str(shared / '.checkpoint-00000001.pt.tmp')!r})"
    )
    said = site.hands("alice", "checkpoints", "save" if defended else "save-before", str(shared))
    return Outcome(
        precious.read_text() != "precious" or (defended and "refused" not in said),
        " ".join(said.split())[:300],
    )


@attack("mallory", "further: alice's checkpoints go to a folder that mallory made or linked first")
def folder_made_first(site: Site, defended: bool) -> Outcome:
    """A job's id and time of submission, its folder's name, are no secret."""
    shared = _shared(site, "scratch", 0o1777)
    made, linked = shared / "4711-1700000000", shared / "4712-1700000000"
    target = site.folder / "of-mallory"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    target.chmod(0o777)
    _as_user(site, "mallory", f"os.mkdir({str(made)!r}); os.chmod({str(made)!r}, 0o777)")
    _as_user(site, "mallory", f"os.symlink({str(target)!r}, {str(linked)!r})")
    what = "save" if defended else "save-before"
    said = [site.hands("alice", "checkpoints", what, str(folder)) for folder in (made, linked)]
    read = site.run("mallory", "ls", "-l", str(made), str(target)).stdout
    return Outcome("checkpoint-" in read, " | ".join(" ".join(text.split())[:160] for text in said))


@attack("third", "further: tickets, the secret and the hooks' settings of others read")
def tickets_read(site: Site, defended: bool) -> Outcome:
    hooks = site.cluster.hooks
    files = [
        site.ticket("alice"),
        hooks.secret_file,
        hooks.secret_file.with_name("hooks.json"),
        site.polluxd.config,
    ]
    modes = [path.stat().st_mode for path in files]
    try:
        for path in [] if defended else files:
            path.chmod(0o644)
        read = [site.run("third", "cat", str(path)) for path in files]
    finally:
        for path, mode in zip(files, modes, strict=True):
            path.chmod(mode)
    won = [path.name for path, done in zip(files, read, strict=True) if done.returncode == 0]
    return Outcome(
        bool(won) if defended else len(won) == len(files), f"read {won}; {read[0].stderr.strip()[-90:]}"
    )


@attack("mallory", "row 19: a false Postgres gets the password in clear")
def password_in_clear(site: Site, defended: bool) -> Outcome:
    """The connection string has no sslmode, and no loopback address."""
    address = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()[0]
    password = json.loads(site.ticket("alice").read_text())["dsn"].rpartition("password=")[2]
    false = site.spawn("mallory", *site.command("postgres"), "serve", address, "12")
    assert false.stdout is not None
    port = false.stdout.readline().strip()
    words = ["report", str(site.ticket("alice")), f"host={address} port={port}"]
    said = site.hands("alice", "postgres", *words, *([] if defended else ["unchecked"]))
    got = false.stdout.readline().strip()
    return Outcome(
        got == password, f"mallory got {'her password' if got == password else got}; {said.strip()[:200]}"
    )


@attack("mallory", "further: a ticket of a terabyte fills root's memory in the epilog")
def ticket_enlarged(site: Site, defended: bool) -> Outcome:
    job_id = site.pollux_job("mallory")
    found = site.ticket_of(job_id)
    assert found is not None
    enlarged = site.folder / "tickets-enlarged"
    shutil.rmtree(enlarged, ignore_errors=True)
    enlarged.mkdir()
    copy = enlarged / found.name
    shutil.copy2(found, copy)
    os.chown(copy, site.uid("mallory"), -1)
    # A file without data: a gigabyte is enough to see.
    _as_user(site, "mallory", f"os.truncate({str(copy)!r}, 1 << 30)")
    program = site.folder / "ticket"
    text = (ROOT / "slurm_hooks" / "ticket").read_text()
    assert "LARGEST = 65536" in text
    program.write_text(text if defended else text.replace("LARGEST = 65536", "LARGEST = -2"))
    config = json.loads(site.cluster.hooks.secret_file.with_name("hooks.json").read_text())
    (enlarged / "hooks.json").write_text(json.dumps({**config, "ticket_dir": str(enlarged)}))
    node = found.name.split(".")[1]
    environment = {
        "PATH": os.defpath,
        "POLLUX_HOOK_CONFIG": str(enlarged / "hooks.json"),
        **{"SLURM_JOB_GPUS": "0", "SLURM_JOB_ID": str(job_id), "SLURMD_NODENAME": node},
        **{"SLURM_JOB_UID": str(site.uid("mallory")), "SLURM_JOB_GID": "-1"},
    }
    # The largest memory of all children before is known: only more than that shows.
    measured = (
        "import resource, subprocess, sys\n"
        "said = subprocess.run([sys.executable, '-IS', *sys.argv[1:]], capture_output=True, text=True).stderr\n"
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, said)"
    )
    done = subprocess.run(
        [sys.executable, "-c", measured, str(program), "--after"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    used = int(done.stdout.split()[0])
    return Outcome(used > 500, f"root's epilog took {used} MB; {done.stdout.strip()[-140:]}")


@attack("mallory", "further: variables of a SPANK plugin of mallory's in the prolog that root runs")
def spank_variables(site: Site, defended: bool) -> Outcome:
    """Undefended: a prolog that takes SPANK_ variables over."""
    folder = site.folder / "spank"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    target = site.folder / "root-only"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700)
    settings = json.loads(site.cluster.hooks.secret_file.with_name("hooks.json").read_text())
    (folder / "hooks.json").write_text(json.dumps({**settings, "ticket_dir": str(target)}))
    (folder / "hooks.json").chmod(0o644)
    (folder / "mallory.c").write_text(SPANK)
    build = ["gcc", "-shared", "-fPIC", "-o", str(folder / "mallory.so"), str(folder / "mallory.c")]
    subprocess.run(build, check=True, capture_output=True)
    (folder / "plugstack.conf").write_text(f"required {folder}/mallory.so {folder}/hooks.json\n")
    conf = site.cluster.slurm_conf.read_text() + f"PlugStackConfig={folder}/plugstack.conf\n"
    (folder / "slurm.conf").write_text(conf)
    for name in ("gres.conf", "cli_filter.lua"):
        shutil.copy(site.cluster.slurm_conf.with_name(name), folder / name)
    prolog = site.cluster.slurm_conf.with_name("hooks") / "prolog"
    before = prolog.read_text()
    if not defended:
        prolog.write_text(before.replace("#!/bin/sh\n", TAKES_SPANK_OVER, 1))
    try:
        script = site.script("spank.sh", "#POLLUX max-gpus=1", "env > /dev/null")
        words = ["sbatch", "--parsable", "--output=/dev/null", "--gres=gpu:1", "--export=ALL", str(script)]
        variables = {"SLURM_CONF": f"{folder}/slurm.conf", "POLLUX_HOOK_CONFIG": f"{folder}/hooks.json"}
        done = site.run("mallory", *words, **variables)
        job_id = int(done.stdout)
        site.submitted(job_id)
        site.until(
            lambda: (job := site.job(job_id)) is not None and bool(job.gpus_per_node_held), "its start", 40.0
        )
        site.until(lambda: site.ticket_of(job_id) or list(target.iterdir()), "its ticket, somewhere", 20.0)
    finally:
        prolog.write_text(before)
    made = [path.name for path in target.iterdir()]
    return Outcome(
        bool(made), f"root wrote {made} into a folder of its own; the ticket: {site.ticket_of(job_id)}"
    )


@attack("mallory", "further: an output file in alice's folder, by sbatch and by a companion")
def output_path(site: Site, defended: bool) -> Outcome:
    victim = site.home("alice") / "output"
    victim.unlink(missing_ok=True)
    script = site.script("output.sh", "echo written by mallory")
    if not defended:
        site.home("alice").chmod(0o777)
    try:
        done = site.run("mallory", "sbatch", "--parsable", f"--output={victim}", str(script))
        job_id = int(done.stdout)
        site.submitted(job_id)
        site.until(
            lambda: victim.exists() or ((job := site.job(job_id)) is not None and job.state.finished),
            "the job to write or to fail",
        )
    finally:
        site.home("alice").chmod(0o700)
    written = victim.exists()
    return Outcome(written, f"the file is {'there' if written else 'not there'}")
