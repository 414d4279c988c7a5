"""Themis: leases to the jobs that finish-time fairness treats worst.

Source: Mahajan et al., NSDI 2020.

rho is the predicted completion time over that on an exclusive 1/N of the cluster. When leases end, free GPUs go to
the jobs of the largest rho, each up to what it asked for. Other jobs keep their GPUs to the end of their lease.

Simplified: this greedy rule stands for the partial-allocation auction with hidden payments (agents here do not lie).
The fairness knob f is 0.8 as published (the worst fifth bids first). An oracle predicts times at the user's batch
size. All GPU types are alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import seated
from polluxd.sim.policies.estimates import finish_time_fairness
from polluxd.sim.simulated_job import Seats

LEASE = 1200.0


class Themis(Policy):
    """Worst rho first, in leases."""

    def decide(self, view: View) -> Mapping[int, Seats]:
        leased = [j for j in view.jobs if j.seats and view.now - (j.moved_at or 0.0) < LEASE]
        wanted = {j.number: j.gpus for j in leased}
        left = sum(view.capacity) - sum(wanted.values())
        bidders = [j for j in view.jobs if j.number not in wanted]
        rho = {j.number: finish_time_fairness(j, view) for j in bidders}
        for job in sorted(bidders, key=lambda j: (-rho[j.number], j.number)):
            gpus = min(job.submission.gpus, left)
            if gpus <= 0:
                break
            wanted[job.number] = gpus
            left -= gpus
        return seated(wanted, {j.number: j.seats for j in view.jobs}, view.capacity)
