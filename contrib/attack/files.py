"""Attacks on checkpoints, passwords, and the files of a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.devcluster.polluxd import BIN


def shared_folder(site: Site, name: str, mode: int) -> Path:
    """Make a folder of root's to which everybody may write."""
    folder = site.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(mode)
    return folder


def as_user(site: Site, user: str, code: str) -> None:
    done = site.run(user, sys.executable, "-c", f"import os, pathlib\n{code}")
    if done.returncode:
        raise RuntimeError(done.stderr[-300:])


@attack("mallory", "row 17: code as alice by a checkpoint that changes between check and load")
def checkpoint_race(site: Site) -> Outcome:
    """Everybody may write to the folder above alice's."""
    shared = shared_folder(site, "race", 0o777)
    mark = site.home("alice") / "raced"
    mark.unlink(missing_ok=True)
    as_user(site, "alice", f"os.mkdir({str(shared / 'hers')!r}, 0o755)")
    as_user(site, "mallory", f"os.mkdir({str(shared / 'his')!r}, 0o755)")
    site.hands("alice", "checkpoints", "save", shared / "hers")
    site.hands("mallory", "checkpoints", "bomb", shared / "his", mark)
    link = shared / "run"
    flip = site.command("checkpoints", "flip", link, shared / "hers", shared / "his")
    his = site.spawn("mallory", *flip)
    assert his.stdout is not None
    his.stdout.readline()
    tried = site.hands("alice", "checkpoints", "load", link, timeout_s=90.0)
    real = re.search(r"[1-9]\d* loaded, [1-9]\d* refused as unsafe", tried)
    return Outcome(mark.exists() or not real, " ".join(tried.split())[:300])


@attack("mallory", "further: alice's checkpoints go to a folder that mallory made or linked first")
def folder_made_first(site: Site) -> Outcome:
    """A job's id and time of submission, its folder's name, are no secret."""
    shared = shared_folder(site, "scratch", 0o1777)
    made, linked = shared / "4711-1700000000", shared / "4712-1700000000"
    target = site.folder / "of-mallory"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    target.chmod(0o777)
    as_user(site, "mallory", f"os.mkdir({str(made)!r}); os.chmod({str(made)!r}, 0o777)")
    as_user(site, "mallory", f"os.symlink({str(target)!r}, {str(linked)!r})")
    said = [site.hands("alice", "checkpoints", "save", folder) for folder in (made, linked)]
    read = site.run("mallory", "ls", "-l", str(made), str(target)).stdout
    return Outcome("checkpoint-" in read, " | ".join(" ".join(text.split())[:160] for text in said))


@attack("third", "further: passwords of the database and polluxd's settings read")
def passwords_read(site: Site) -> Outcome:
    passfile = site.gateway.config.with_name("gateway.pgpass")
    files = [site.polluxd.config, site.gateway.config, passfile]
    read = [site.run("third", "cat", str(path)) for path in files]
    won = [path.name for path, done in zip(files, read, strict=True) if done.returncode == 0]
    return Outcome(bool(won), f"read {won}; {read[0].stderr.strip()[-90:]}")


@attack("mallory", "row 19: a false Postgres gets polluxd's password in clear")
def password_in_clear(site: Site) -> Outcome:
    """The connection string has no sslmode, and no loopback address."""
    address = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()[0]
    false = site.spawn("mallory", *site.command("postgres", "serve", address, 20))
    assert false.stdout is not None
    port = false.stdout.readline().strip()
    assert site.cluster.postgres is not None
    url = re.sub(r"@127\.0\.0\.1:\d+", f"@{address}:{port}", site.cluster.database_url)
    password = re.findall(r":([^:@/]+)@", url)[0]
    config = site.folder / "remote.toml"
    config.touch(mode=0o600)
    config.write_text(site.polluxd.config.read_text().replace(site.cluster.database_url, url))
    done = subprocess.run(
        [BIN / "polluxd", "migrate", "--config", str(config)],
        env={**os.environ, **site.cluster.client_environment},
        capture_output=True,
        text=True,
        check=False,
    )
    got = false.stdout.readline().strip()
    return Outcome(
        got == password,
        f"mallory got {'the password' if got == password else got}; {done.stderr.strip()[-200:]}",
    )


@attack("mallory", "further: an output file in alice's folder, by sbatch and by a companion")
def output_path(site: Site) -> Outcome:
    victim = site.home("alice") / "output"
    victim.unlink(missing_ok=True)
    script = site.script("output.sh", "echo written by mallory")
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
