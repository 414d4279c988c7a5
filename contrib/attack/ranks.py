"""Attacks on the ports of another user's ranks and launchers."""

from __future__ import annotations

import json
import subprocess
import zlib

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.attack.training import training as alices_training
from contrib.devcluster.processes import free_ports

HERE = "127.0.0.1"


def _stranger(site: Site, what: str, ports: list[int], seconds: float = 5.0, more: object = "") -> str:
    words = (what, HERE, ports, seconds, more)
    return site.hands("mallory", "strangers", *words, may_fail=what == "keys").strip()


def _spawned(site: Site, user: str, *words: object) -> tuple[subprocess.Popen[str], str]:
    """Start a program of a user; return it and its first line."""
    process = site.spawn(user, *site.command(*words))
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def _stopped(process: subprocess.Popen[str]) -> dict[str, int]:
    """End a store of alice's; return what it says of itself."""
    process.terminate()
    return dict(json.loads(_rest(process)))


def _rest(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read().strip()


def _strangers(site: Site, what: str, ports: list[int], seconds: float) -> str:
    """Have mallory go on in the background; return his first line."""
    return _spawned(site, "mallory", "strangers", what, HERE, ports, seconds)[1]


@attack("mallory", "row 7, during a grow: code as alice by the keys and values in the store of her ranks")
def pickle_in_a_store(site: Site) -> Outcome:
    mark = site.home("alice") / "owned"
    mark.unlink(missing_ok=True)
    training = alices_training(site)
    order = [str(site.uid("alice")), str(mark)]
    his, _ = _spawned(site, "mallory", "strangers", "pickles", HERE, [0], 20, order)
    with training.growing() as move:
        site.until(training.meeting, "the file for the joiners", 60.0)
        secret = str((training.meeting() or {})["secret"])
        grown = training.ended(move.id)
    seen = _rest(his)
    stores = {key.split()[0] for key in json.loads(seen)}
    lives = training.goes_on()
    return Outcome(
        mark.exists() or secret in seen or not lives or grown.step != "training" or not stores,
        f"mallory read and replaced {len(json.loads(seen))} values of {len(stores)} stores; the secret is "
        f"{'there' if secret in seen else 'not there'}, no code ran, the growth ended as {grown.step}",
    )


@attack("mallory", "row 7, during a grow: the store of rank 0 asked without its secret")
def store_without_secret(site: Site) -> Outcome:
    """In an earlier version the key was guessable."""
    training = alices_training(site)
    job_id, attempt = training.job_id, 0
    words = ["", "pollux", f"{job_id}", f"{job_id}.{attempt}.0", f"dev:{job_id}:{attempt}", str(job_id) * 4]
    with training.growing() as move:
        site.until(training.meeting, "the file for the joiners", 60.0)
        port = int((training.meeting() or {})["port"])
        right = json.loads(_stranger(site, "guess", [port], more=words))
        listed = _stranger(site, "keys", [port])
        grown = training.ended(move.id)
    return Outcome(
        bool(right) or listed.startswith('{"') or grown.step != "training",
        f"right: {right}; the growth ended as {grown.step}; torch's client: {listed[-120:]}",
    )


@attack("mallory", "row 15: launchers held up by idle connections")
def launchers_held_up(site: Site) -> Outcome:
    victim, port = _spawned(site, "alice", "victim", "launchers", 12, [])
    idle = _strangers(site, "idle", [int(port)], 15.0)
    said = _rest(victim)
    return Outcome("met" not in said, f"{idle}; the launchers {said}")


@attack("mallory", "row 15, during a grow: the store of rank 0 flooded by idle connections and endless bytes")
def store_flooded(site: Site) -> Outcome:
    training = alices_training(site)
    floods = []
    with training.growing() as move:
        site.until(training.meeting, "the file for the joiners", 60.0)
        port = int((training.meeting() or {})["port"])
        floods = [_strangers(site, what, [port], 60.0) for what in ("idle", "send_bytes")]
        grown = training.ended(move.id)
        site.end_spawned()
    lives = training.goes_on()
    return Outcome(
        grown.step != "training" or not lives,
        f"{floods}; the growth ended as {grown.step} {grown.detail[:160]}; the training goes on: {lives}",
    )


@attack("mallory", "further: rank 0's memory filled by a greeting without end")
def memory_filled(site: Site) -> Outcome:
    victim, port = _spawned(site, "alice", "victim", "store", "key")
    _stranger(site, "send_bytes", [int(port)])
    said = _stopped(victim)
    return Outcome(said["grown_mb"] > 3, f"the process grew by {said['grown_mb']} MB")


@attack("mallory", "further: a recorded connection replayed to rank 0's store")
def replayed(site: Site) -> Outcome:
    """Mallory stands between alice's rank and the store."""
    victim, port = _spawned(site, "alice", "victim", "store", "key")
    (between,) = free_ports(1)
    relay, _ = _spawned(site, "mallory", "strangers", "relay", HERE, [between, int(port)], 60)
    counted = site.hands("alice", "victim", "add", between, "key").strip()
    _stranger(site, "replay", [int(port)], more=_rest(relay))
    said = _stopped(victim)
    return Outcome(said["counted"] != 1, f"alice counted to {counted}, then the store had {said['counted']}")


@attack("mallory", "further: the ports of a job's launchers taken before it starts")
def ports_taken(site: Site) -> Outcome:
    """They once derived from job, attempt and step."""
    first = zlib.crc32(b"4711.0.0")
    public = [20_000 + (first + offset * 733) % 12_000 for offset in range(16)]
    took = _strangers(site, "squat", public, 40.0)
    victim, port = _spawned(site, "alice", "victim", "launchers", 20, [])
    said = f"{port} {_rest(victim)}"
    return Outcome("met" not in said, f"mallory {took}; the launchers: {said}")
