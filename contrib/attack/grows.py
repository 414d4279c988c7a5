"""Attack a growth in place, which must succeed in spite of the attack."""

from __future__ import annotations

import json

from contrib.attack import gateway
from contrib.attack.answers import Request
from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.attack.training import Training
from contrib.attack.training import training as alices_training
from polluxd.model import Move


def _harmed(training: Training, grown: Move) -> Outcome:
    """Tell whether a growth failed, or the training stands still."""
    lives = training.goes_on()
    return Outcome(
        grown.step != "training" or not lives,
        f"the growth ended as {grown.step}; the training goes on: {lives}",
    )


@attack("mallory", "row 12, during a grow: 3,000 silent connections to the gateway, in a growth in place")
def connections(site: Site) -> Outcome:
    training = alices_training(site)
    with training.growing() as move, gateway.flood(site, "silent", 3000):
        grown = training.ended(move.id)
    return _harmed(training, grown)


@attack("mallory", "row 21, during a grow: an order to grow, and its nonce, asked with a token of mallory's")
def order_asked(site: Site) -> Outcome:
    training = alices_training(site)
    asked: Request = ("GET", "/v1/orders?seen=", None)
    with training.growing() as move:
        site.until(training.meeting, "the file for the joiners", 60.0)
        answers = site.ask("mallory", asked, payload=site.payload(training.job_id))
        answers += site.ask("mallory", asked, token=site.token("mallory"))
        grown = training.ended(move.id)
    told = [answer for answer in answers if move.nonce in json.dumps(answer.document)]
    return Outcome(
        bool(told) or (grown.step != "training"),
        f"{answers[0].text}; the growth ended as {grown.step}",
    )
