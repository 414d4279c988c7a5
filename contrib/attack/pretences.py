"""Attacks by other tasks, false variables and false gateways."""

from __future__ import annotations

import json
import os
import re
import subprocess
from urllib.parse import urlsplit

from contrib.attack.messages import Answer
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.attack.tokens import reporting


@attack("mallory", "further: a task of mallory's array asks for tokens of the tasks of alice's array")
def other_task(site: Site) -> list[Answer]:
    """Every task has a job id of its own; the array's id is the last task's."""

    def tasks(user: str) -> list[int]:
        script = site.script(f"array-{user}.sh", "#POLLUX max-gpus=1")
        array = site.submit(user, script, "--gres=gpu:1", "--array=1-2")
        known: list[int] = []

        def started() -> bool:
            known[:] = [
                job.job_id for job in site.slurm.observe().jobs if job.array and job.array[0] == array
            ]
            return len(known) == 2 and all(map(site.started, known))

        site.until(started, f"the tasks of {user}'s array", 60.0)
        return sorted(known)

    hers, his = tasks("alice"), tasks("mallory")
    for job_id in his:
        site.reported("mallory", job_id)
    return [
        answer for task in hers for answer in site.ask("mallory", reporting(), payload=site.payload(task))
    ]


@attack("mallory", "further: POLLUX_ variables of mallory's in the environment of a job")
def environment(site: Site) -> Outcome:
    """The submission hook sets every variable that a hook or the agent trusts.

    A plain job gets none: one that is submitted from within a Pollux job inherits that one's.
    """
    given = {
        "POLLUX_GATEWAY": "http://127.0.0.1:1",
        "POLLUX_GATEWAY_CA": "/tmp/forged",
        "POLLUX_TOKEN": "forged",
        "POLLUX_MODE": "enforce",
        "POLLUX_SUBMITTED": "1",
    }
    export = ",".join(["--export=ALL", *(f"{name}={value}" for name, value in given.items())])
    found = {}
    for kind, directive in (("pollux", "#POLLUX mode=observe"), ("plain", "# plain")):
        seen = site.home("mallory") / f"environment-{kind}"
        seen.unlink(missing_ok=True)
        script = site.script(f"{kind}.sh", directive, f"env > {seen}.new && mv {seen}.new {seen}")
        site.submit("mallory", script, "--gres=gpu:1", export)
        site.until(seen.exists, "the job's environment", 60.0)
        lines = dict(line.partition("=")[::2] for line in seen.read_text(errors="replace").splitlines())
        found[kind] = [name for name, value in given.items() if lines.get(name) == value]
    # Without a gateway a job is no Pollux job: the other variables do nothing.
    kept = found["pollux"] or "POLLUX_GATEWAY" in found["plain"] or "POLLUX_TOKEN" in found["plain"]
    return Outcome(bool(kept), f"variables that the jobs have kept: {found}")


def _credential(received: str) -> str:
    """Return the munge credential that a false gateway got; empty: none."""
    found = re.search(r"MUNGE:[^\"]*", received)
    return found[0] if found else ""


@attack("mallory", "row 19: a false gateway on the port of the real one, while that is down")
def false_gateway(site: Site) -> Outcome:
    """Its credential buys alice's token from the real one afterwards."""
    hers, port = site.resident("alice"), str(urlsplit(site.gateway.url).port)
    site.gateway.stop()
    try:
        false = site.begin("mallory", "false_servers", "gateway", "127.0.0.1", port, 6)
        false.line()
        said = site.hands("alice", "false_servers", "agent", site.gateway.url, hers)
        received = json.loads(false.rest())
    finally:
        site.gateway.start()
    credential = _credential(received)
    answers = site.ask("mallory", reporting(), credential=credential) if credential else []
    return Outcome(
        bool(received),
        f"mallory got {len(received)} bytes, {'with' if credential else 'without'} a credential; "
        f"alice's agent: {said.strip()[:160]}; {'; '.join(a.text for a in answers)}",
    )


@attack("mallory", "row 19: a false gateway at another address, over HTTP and with a certificate of its own")
def false_certificate(site: Site) -> Outcome:
    hers = str(site.resident("alice"))
    address = site.address()
    certificate, key = site.home("mallory") / "certificate.pem", site.home("mallory") / "key.pem"
    words = f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN={address} -addext".split()
    words += [f"subjectAltName=IP:{address}", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run(words, check=True, capture_output=True)
    for path in (certificate, key):
        os.chown(path, site.uid("mallory"), -1)
    got, said = [], []
    for scheme, tls in (("http", []), ("https", [str(certificate), str(key)])):
        false = site.begin("mallory", "false_servers", "gateway", address, 0, 6, *tls)
        url = f"{scheme}://{address}:{false.line()}"
        said.append(site.hands("alice", "false_servers", "agent", url, hers).strip()[:160])
        got.append(bool(_credential(json.loads(false.rest()))))
    return Outcome(any(got), f"credentials by HTTP and HTTPS: {got}; alice's agent: {said}")
