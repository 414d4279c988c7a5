"""A job of the upgrade test: report each second, print the answers.

It runs on a copy of the previous version's environment, so that the agent's code is of that version. It has no torch.
"""

from __future__ import annotations

import json
import time

from pollux.scheduler.database import DatabaseAway, JobDatabase
from pollux.slurm_job.ticket import read_ticket

ticket = read_ticket()
if ticket is None:
    raise SystemExit("this job has no ticket")
database = JobDatabase(ticket)
made = dict.fromkeys(
    ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node"), 0.01
)
while True:
    report = {
        "v": 1,
        "at": time.time(),
        "params": made | {"gamma": 1.5},
        "noise": {"sqr": 2.0, "var": 6.0},
        "limits": {"initial": 32, "maximum": 1024, "local_min": 8, "local_max": 256},
        **{"explored_gpus": 1, "explored_nodes": 1, "gpus": 1, "nodes": 1},
        **{"batch_size": 32, "local_batch": 32, "accumulation": 0},
        **{"goodput": 90.0, "throughput": 100.0, "progress": 10.0, "target": 500.0, "epoch": 1.5},
        **{"lr_factor": 1.0, "gain": 1.0, "optimizer_steps": 12, "checkpointed": False},
        "times": {"launched_at": time.time() - 5, "first_step_at": None},
        "restart_cost": None,
    }
    # A payload that is refused, or a ticket that is over, ends the job with an error: the test sees it.
    try:
        database.publish(json.dumps(report))
        print("accepted", flush=True)
    except DatabaseAway as error:
        print(f"away: {error}", flush=True)
    time.sleep(1.0)
