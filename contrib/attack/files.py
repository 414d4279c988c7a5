"""Attacks on checkpoints, searches, passwords, and the files of a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
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
    site.hands("alice", "folders", "save", shared / "hers")
    site.hands("mallory", "folders", "bomb", shared / "his", mark)
    link = shared / "run"
    site.begin("mallory", "folders", "flip", link, shared / "hers", shared / "his").line()
    tried = site.hands("alice", "folders", "load", link, timeout_s=90.0)
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
    said = [site.hands("alice", "folders", "save", folder) for folder in (made, linked)]
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
    address = site.address()
    false = site.begin("mallory", "false_servers", "postgres", address, 20)
    port = false.line()
    assert site.cluster.postgres is not None
    url = re.sub(r"@127\.0\.0\.1:\d+", f"@{address}:{port}", site.cluster.database_url)
    password = re.findall(r":([^:@/]+)@", url)[0]
    config = site.folder / "remote.toml"
    config.touch(mode=0o600)
    config.write_text(site.polluxd.config.read_text().replace(site.cluster.database_url, url))
    done = subprocess.run(
        [BIN / "polluxctl", "db", "upgrade", "--config", str(config)],
        env={**os.environ, **site.cluster.client_environment},
        capture_output=True,
        text=True,
        check=False,
    )
    got = false.rest()
    return Outcome(
        got == password,
        f"mallory got {'the password' if got == password else got}; {done.stderr.strip()[-200:]}",
    )


@attack("mallory", "further: an output file in alice's folder, by sbatch and by a companion")
def output_path(site: Site) -> Outcome:
    victim = site.home("alice") / "output"
    victim.unlink(missing_ok=True)
    script = site.script("output.sh", "echo written by mallory")
    job_id = site.submit("mallory", script, f"--output={victim}")
    site.until(lambda: victim.exists() or site.job(job_id).state.finished, "the job to write or to fail")
    written = victim.exists()
    return Outcome(written, f"the file is {'there' if written else 'not there'}")


# --- folders that users share: names that another user took first ---

MODES = (0o1777, 0o777)
"""As /scratch is, and as a project's folder."""
OWN = "123-1795764058"
"""The folder of alice's checkpoints, by `contrib.attack.hands.folders`."""


def _in(site: Site, user: str, folder: Path, *words: str) -> str:
    """Run a command in a folder; return all that it prints."""
    path = f"{BIN}:{os.environ['PATH']}"
    done = site.run(user, "sh", "-c", 'cd "$0" && exec "$@"', str(folder), *words, PATH=path)
    return " ".join((done.stdout + done.stderr).split())


def _hand(site: Site, user: str, *words: object) -> str:
    return site.hands(user, "folders", *words, may_fail=True)


def _taken_first(site: Site, name: str, mode: int) -> Path:
    """Make a shared folder in which mallory has made pollux-searches, for all to write to."""
    shared = shared_folder(site, f"{name}-{mode:o}", mode)
    as_user(site, "mallory", f"os.umask(0); os.mkdir({str(shared / 'pollux-searches')!r}, 0o777)")
    return shared


def _forged(site: Site, shared: Path, order: dict[str, object]) -> None:
    """Have mallory put her journal in the place of what is there, in each folder that she can reach."""
    journal = site.home("mallory") / "pollux-searches"
    subprocess.run(["rm", "-rf", str(journal)], check=True)
    as_user(site, "mallory", f"os.mkdir({str(journal)!r}, 0o700)")
    said = _hand(site, "mallory", "forge", journal, order)
    if not (journal / "lr.journal").exists():
        raise RuntimeError(said)
    as_user(
        site,
        "mallory",
        f"""
import shutil
for folder in pathlib.Path({str(shared)!r}).glob("pollux-searches*"):
    try:
        for path in folder.iterdir():
            path.unlink()
        shutil.copy({str(journal / "lr.journal")!r}, folder / "lr.journal")
        (folder / "lr.journal").chmod(0o666)
    except OSError:
        pass
""",
    )


def _of_alice(site: Site, name: str, content: bytes) -> Path:
    """Write a file of alice's at home."""
    path = site.home("alice") / name
    path.write_bytes(content)
    os.chown(path, site.uid("alice"), -1)
    return path


@attack("mallory", "further: code as alice by the command in a search's journal", "386fa591")
def command_in_a_journal(site: Site) -> Outcome:
    """Mallory made pollux-searches first, and replaces the journal of alice's search."""
    evidence, won = [], False
    for mode in MODES:
        shared = _taken_first(site, "tune", mode)
        mark = site.home("alice") / "ran-mallorys-script"
        mark.unlink(missing_ok=True)
        script = shared / "lr.sh"
        script.write_text("#!/bin/sh\n#SBATCH --gres=gpu:1 --output=/dev/null\n#POLLUX max-gpus=1\nsleep 1\n")
        evil = site.script("evil.sh", f"touch {mark}", "exit 0")
        tune = (str(BIN / "polluxctl"), "tune")
        evidence.append(_in(site, "alice", shared, *tune, "lr.sh", "--trials", "1")[-120:])
        _forged(site, shared, {"study": {"command": [str(evil)], "parallel": 1, "arrays": ["--me"]}})
        said = _in(site, "alice", shared, *tune, "resume", "lr", "--trials", "1")
        evidence.append(said[-160:])
        try:
            site.until(mark.exists, "mallory's script", 15.0)
            won = True
        except TimeoutError:
            pass
        _in(site, "alice", shared, "scancel", "--me", "--name=lr.sh,evil.sh")
    return Outcome(won, f"mallory's script {'ran' if won else 'did not run'} as alice; {evidence}")


def _journal(name: str, order: dict[str, object], won: Callable[[Site, str], bool]) -> None:
    """Add an attack by a journal of mallory's, with which alice's trial begins.

    Args:
        order: see `contrib.attack.hands.folders.forge`; {home} stands for alice's.
        won: whether the attack has succeeded, by what her trial says.
    """

    @attack("mallory", f"further: {name}", "386fa591")
    def attempt(site: Site) -> Outcome:
        as_user(site, "alice", f"os.makedirs({str(site.home('alice') / 'thesis')!r}, exist_ok=True)")
        said = []
        for mode in MODES:
            shared = _taken_first(site, "journal", mode)
            _forged(site, shared, json.loads(json.dumps(order).replace("{home}", str(site.home("alice")))))
            said.append(_hand(site, "alice", "trial", shared))
        succeeded = any("lr = " not in each or won(site, each) for each in said)
        return Outcome(succeeded, f"alice's trials: {said!a}")


_journal("values of mallory's in a trial of alice's search", {}, lambda _, said: "lr = 1000000" in said)
_journal(
    "alice's trial ended, with an escape for her terminal as the reason",
    {"state": "PRUNED", "trial": {"why": "x\x1b]0;owned\x07"}},
    lambda _, said: "\x1b" in said,
)
_journal(
    "a folder of alice's at home renamed by the journal's word",
    {"trial": {"adopts": "{home}/thesis", "parent": 0}},
    lambda site, _: not (site.home("alice") / "thesis").exists(),
)


@attack("mallory", "further: a link in place of a journal cuts, or makes, a file of alice's", "386fa591")
def link_for_a_journal(site: Site) -> Outcome:
    model, new = _of_alice(site, "model.bin", b"\x01" * 70_000), site.home("alice") / "new-file"
    new.unlink(missing_ok=True)
    said = []
    for mode in MODES:
        for aim in (model, new):
            shared = _taken_first(site, f"link-{aim.name}", mode)
            link = shared / "pollux-searches" / "lr.journal"
            as_user(site, "mallory", f"os.symlink({str(aim)!r}, {str(link)!r})")
            said.append(_hand(site, "alice", "trial", shared)[-100:])
    kept = model.read_bytes() == b"\x01" * 70_000
    return Outcome(not kept or new.exists(), f"the file is {'as before' if kept else 'changed'}; {said}")


def _checkpoints(site: Site, shared: Path, *mallorys: str) -> Sequence[str]:
    """Have alice's job save after what mallory did; return what is said, and what of the other training stays."""
    other = site.home("alice") / "other"
    subprocess.run(["rm", "-rf", str(other), str(site.home("alice") / "pollux-checkpoints")], check=True)
    as_user(site, "alice", f"os.mkdir({str(other)!r}, 0o700)")
    for number in (1, 2):
        as_user(site, "alice", f"os.mkdir({str(other / f'checkpoint-{number:08d}')!r})")
    for code in mallorys:
        as_user(site, "mallory", code.format(shared=shared, other=other, own=OWN))
    said = _hand(site, "alice", "save", _hand(site, "alice", "choose", shared), 3)
    return said, *sorted(path.name for path in other.iterdir())


@attack(
    "mallory", "further: a link in place of a job's folder removes another training's checkpoints", "386fa591"
)
def link_for_a_job_s_folder(site: Site) -> Outcome:
    """The name of the job's folder is no secret before the job starts."""
    made = "os.umask(0); os.mkdir('{shared}/pollux-checkpoints', 0o777)"
    ways = {
        "the job's folder": (made, "os.symlink('{other}', '{shared}/pollux-checkpoints/{own}')"),
        "pollux-checkpoints": ("os.symlink('{other}', '{shared}/pollux-checkpoints')",),
        "with the uid": (
            made,
            f"os.symlink('{{other}}', '{{shared}}/pollux-checkpoints-{site.uid('alice')}')",
        ),
    }
    won, evidence = False, []
    for mode in MODES:
        for name, codes in ways.items():
            said, *left = _checkpoints(site, shared_folder(site, f"links-{mode:o}", mode), *codes)
            won |= left != ["checkpoint-00000001", "checkpoint-00000002"] or "checkpoint-00000003" not in said
            evidence.append(f"{name}: {said[-90:]}")
    return Outcome(won, f"{evidence}")


@attack(
    "mallory", "further: pollux-checkpoints made first, so that alice's job has no checkpoint", "386fa591"
)
def made_first(site: Site) -> Outcome:
    """Two users who submit from one folder in the same second do the same by accident."""
    won, evidence = False, []
    for mode in MODES:
        for rights in (0o755, 0o777):
            shared = shared_folder(site, f"first-{mode:o}", mode)
            theirs = shared / "pollux-checkpoints"
            chosen = _hand(site, "alice", "choose", shared)
            code = f"os.umask(0); os.path.exists({str(theirs)!r}) or os.mkdir({str(theirs)!r}, {rights})"
            as_user(site, "mallory", code)
            for directory in (chosen, _hand(site, "alice", "choose", shared)):
                said = _hand(site, "alice", "save", directory)
                hers = "checkpoint-" in said and Path(directory).parent.stat().st_uid == site.uid("alice")
                won |= not hers
                evidence.append(said[-90:])
    return Outcome(won, f"{evidence}")


@attack("a user of uid 650", "further: a listener whose uid is a user's by login.defs", "386fa591")
def listener_of_a_low_uid(site: Site) -> Outcome:
    """At sites with old uids, users begin at 500."""
    defs = site.folder / "login.defs"
    defs.write_text("UID_MIN 500\nUID_MAX 60000\n")
    code = (
        "import socket, time; server = socket.create_server(('127.0.0.1', 0)); "
        "print(server.getsockname()[1], flush=True); time.sleep(30)"
    )
    words = {"stdout": subprocess.PIPE, "text": True, "user": 650, "group": 650, "extra_groups": []}
    with subprocess.Popen([sys.executable, "-c", code], cwd="/", **words) as false:  # type: ignore[call-overload]
        port = false.stdout.readline().strip()
        said = _hand(site, "alice", "trusts", port, defs)
        false.kill()
    return Outcome("refused" not in said, said)
