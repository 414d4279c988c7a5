"""Attacks on readers: terminals, pages, and the hook that reads scripts."""

from __future__ import annotations

import os
import pty
import select
import time

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site

ESCAPES = "x\x1b]0;owned\x07\x1b[2J"


def _known(site: Site, name: str) -> int:
    """Submit mallory's job of this name, and wait until polluxd has it."""
    with site.names_unseen():
        words = (f"--job-name={name}", "--gres=gpu:1", "--open-mode=append")
        job_id, trouble = site.sbatch("mallory", site.script("named.sh", "#POLLUX max-gpus=1"), *words)
    assert job_id is not None, trouble
    site.until(
        lambda: site.query("SELECT 1 FROM pollux.job WHERE job_id = %s", job_id), "polluxd to see the job"
    )
    return job_id


def _on_a_terminal(site: Site, seconds: float, *words: str) -> str:
    """Run a command on a terminal of its own; return what it shows."""
    ours, theirs = pty.openpty()
    process = site.polluxd.on_terminal(theirs, *words)
    os.close(theirs)
    shown, end = b"", time.monotonic() + seconds
    while b"pollux-mal" not in shown and time.monotonic() < end:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 1 << 16)
            except OSError:
                break
    process.kill()
    process.wait()
    os.close(ours)
    return shown.decode(errors="replace")


@attack("mallory", "row 20: terminal escapes in polluxctl top")
def escapes_in_top(site: Site) -> Outcome:
    _known(site, ESCAPES)
    shown = _on_a_terminal(site, 60.0, "top", "-n", "1")
    if "owned" not in shown:
        raise AssertionError(f"top did not show the job: {shown[-300:]!r}")
    return Outcome("\x1b]0;owned" in shown, f"the screen has {shown[shown.index('owned') - 12 :][:40]!a}")


@attack("mallory", "row 20: terminal escapes in polluxctl jobs and explain")
def escapes_in_explain(site: Site) -> Outcome:
    job_id = _known(site, ESCAPES)
    shown = "".join(site.polluxd.ctl(*words) for words in (("jobs",), ("explain", str(job_id))))
    if "owned" not in shown:
        raise AssertionError(f"the job is not shown: {shown[-300:]!r}")
    return Outcome("\x1b" in shown, f"printed: {shown[shown.index('owned') - 12 :][:40]!a}")
