"""Attacks on the ports of another user's ranks and launchers."""

from __future__ import annotations

import json
import zlib

from contrib.attack import gateway
from contrib.attack.messages import Request
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Hand, Site
from contrib.attack.training import training as alices_training
from contrib.devcluster.processes import free_ports

HERE = "127.0.0.1"


def _stranger(site: Site, what: str, ports: list[int], more: object = "") -> str:
    return site.hands("mallory", "strangers", what, HERE, ports, 5.0, more, may_fail=what == "keys").strip()


def _strangers(site: Site, what: str, ports: list[int], seconds: float) -> str:
    """Have mallory go on in the background; return his first line."""
    return site.begin("mallory", "strangers", what, HERE, ports, seconds).line()


def _stopped(store: Hand) -> dict[str, int]:
    """End a store of alice's; return what it says of itself."""
    store.stop()
    return dict(json.loads(store.rest()))


@attack("mallory", "row 7, during a grow: code as alice by the keys and values in the store of her ranks")
def pickle_in_a_store(site: Site) -> Outcome:
    mark = site.home("alice") / "owned"
    mark.unlink(missing_ok=True)
    training = alices_training(site)
    order = [str(site.uid("alice")), str(mark)]
    his = site.begin("mallory", "strangers", "pickles", HERE, [0], 20, order)
    his.line()
    with training.growing():
        secret = str(training.meeting()["secret"])
    seen = his.rest()
    stores = {key.split()[0] for key in json.loads(seen)}
    return training.harmed(
        f"mallory read and replaced {len(json.loads(seen))} values of {len(stores)} stores; the secret is "
        f"{'there' if secret in seen else 'not there'}, code {'ran' if mark.exists() else 'did not run'}",
        mark.exists() or secret in seen or not stores,
    )


@attack("mallory", "row 7, during a grow: the store of rank 0 asked without its secret")
def store_without_secret(site: Site) -> Outcome:
    """In an earlier version the key was guessable."""
    training = alices_training(site)
    job_id, attempt = training.job_id, 0
    words = ["", "pollux", f"{job_id}", f"{job_id}.{attempt}.0", f"dev:{job_id}:{attempt}", str(job_id) * 4]
    with training.growing():
        port = int(training.meeting()["port"])
        right = json.loads(_stranger(site, "guess", [port], words))
        listed = _stranger(site, "keys", [port])
    return training.harmed(
        f"right: {right}; torch's client: {listed[-120:]}", bool(right) or listed.startswith('{"')
    )


@attack("mallory", "row 15: launchers held up by idle connections")
def launchers_held_up(site: Site) -> Outcome:
    victim = site.begin("alice", "victim", "launchers", 12, [])
    idle = _strangers(site, "idle", [int(victim.line())], 15.0)
    said = victim.rest()
    return Outcome("met" not in said, f"{idle}; the launchers {said}")


@attack("mallory", "row 15, during a grow: the store of rank 0 flooded by idle connections and endless bytes")
def store_flooded(site: Site) -> Outcome:
    training = alices_training(site)
    with training.growing() as move:
        port = int(training.meeting()["port"])
        floods = [_strangers(site, what, [port], 60.0) for what in ("idle", "send_bytes")]
        training.ended(move.id)
        site.end_hands()
    return training.harmed(f"{floods}")


@attack("mallory", "row 12, during a grow: 3,000 silent connections to the gateway, in a growth in place")
def connections(site: Site) -> Outcome:
    training = alices_training(site)
    with training.growing() as move, gateway.flood(site, "silent", 3000):
        training.ended(move.id)
    return training.harmed("")


@attack("mallory", "row 21, during a grow: an order to grow, and its nonce, asked with a token of mallory's")
def order_asked(site: Site) -> Outcome:
    training = alices_training(site)
    asked: Request = ("GET", "/v1/orders?seen=", None)
    with training.growing() as move:
        training.meeting()
        answers = site.ask("mallory", asked, payload=site.payload(training.job_id))
        answers += site.ask("mallory", asked, token=site.token("mallory"))
    told = [answer for answer in answers if move.nonce in json.dumps(answer.document)]
    return training.harmed(answers[0].text, bool(told))


@attack("mallory", "further: rank 0's memory filled by a greeting without end")
def memory_filled(site: Site) -> Outcome:
    victim = site.begin("alice", "victim", "store", "key")
    _stranger(site, "send_bytes", [int(victim.line())])
    said = _stopped(victim)
    return Outcome(said["grown_mb"] > 3, f"the process grew by {said['grown_mb']} MB")


@attack("mallory", "further: a recorded connection replayed to rank 0's store")
def replayed(site: Site) -> Outcome:
    """Mallory stands between alice's rank and the store."""
    victim = site.begin("alice", "victim", "store", "key")
    port, (between,) = int(victim.line()), free_ports(1)
    relay = site.begin("mallory", "strangers", "relay", HERE, [between, port], 60)
    relay.line()
    counted = site.hands("alice", "victim", "add", between, "key").strip()
    _stranger(site, "replay", [port], relay.rest())
    said = _stopped(victim)
    return Outcome(said["counted"] != 1, f"alice counted to {counted}, then the store had {said['counted']}")


@attack("mallory", "further: the ports of a job's launchers taken before it starts")
def ports_taken(site: Site) -> Outcome:
    """They once derived from job, attempt and step."""
    first = zlib.crc32(b"4711.0.0")
    public = [20_000 + (first + offset * 733) % 12_000 for offset in range(16)]
    took = _strangers(site, "squat", public, 40.0)
    said = site.begin("alice", "victim", "launchers", 20, []).rest()
    return Outcome("met" not in said, f"mallory {took}; the launchers: {said}")
