"""Attacks on the money that rented nodes cost."""

from __future__ import annotations

from contextlib import suppress

from contrib.attack.registry import Outcome, attack
from contrib.attack.site import Site
from contrib.devcluster.power_saving import rented_seconds

BUDGET_S = 25.0
"""Of mallory's account: so long may one node be rented in a day."""
ROUNDS = 5
ACCOUNT = "attempt"
"""Its budget is that of a month."""
SETTINGS = (
    "--cloud-price rented=3600 --cloud-hour-value 1e6 --cloud-boot-s 2 --cloud-return-s 15 "
    f"--cloud-month-budget {ACCOUNT}={BUDGET_S:g}"
).split()
"""A second of a node costs 1."""


@attack(
    "mallory", "further: jobs that end as soon as a node boots for them, so that nobody pays for its return"
)
def nobody_pays(site: Site) -> Outcome:
    """A node costs most while it boots and while Slurm waits for the end of SuspendTime."""
    assert site.power is not None
    power = site.power
    hers = site.submit("alice", site.script("hers.sh"), "--gres=gpu:1", "--nodelist=n1")
    site.until(lambda: site.held(hers), "alice's job on the only own GPU")
    began, rented = len(power.bill()), 0
    script = site.script("rents.sh", "#POLLUX max-gpus=1")
    for _ in range(ROUNDS):
        job_id = site.submit("mallory", script, "--gres=gpu:1", f"--account={ACCOUNT}")
        known = len(power.bill())
        with suppress(TimeoutError):
            site.until(lambda known=known: len(power.bill()) > known, "a boot", 20.0)
            rented += 1
        site.run("mallory", "scancel", str(job_id))
        site.until(lambda: all(n.power == "off" for n in site.rented_nodes()), "the nodes' return", 90.0)
    bill = power.bill()[began:]
    seconds = rented_seconds(bill, bill[-1][0] if bill else 0.0)
    once = seconds / max(rented, 1)
    return Outcome(
        seconds > BUDGET_S + once,
        f"{rented} of {ROUNDS} jobs were given a node, for {seconds:.0f} s in all; the budget is {BUDGET_S:g} s",
    )
