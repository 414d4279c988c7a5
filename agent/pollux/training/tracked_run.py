"""One run of W&B or MLflow over all restarts of a training.

The checkpoint holds the run's id. A restart sets the variable by which the tracker goes on with it, for an `init` or a
`start_run` after `attach`. A sweep's runs stay apart: each has settings of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, MutableMapping
from typing import Any

_TRACKERS = {
    "wandb": ("WANDB_RUN_ID", {"WANDB_RESUME": "allow"}),
    "mlflow": ("MLFLOW_RUN_ID", {}),
}
set_here: dict[str, str] = {}
"""The variables that this process has set, and no user."""


def present() -> dict[str, str]:
    """The ids of the runs under way in this process, by tracker."""
    wandb: Any = sys.modules.get("wandb")
    mlflow: Any = sys.modules.get("mlflow")
    run = getattr(wandb, "run", None)
    found = {"wandb": run.id} if run is not None and not getattr(run, "sweep_id", None) else {}
    active = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    return found if active is None else found | {"mlflow": active.info.run_id}


def take_up(saved: Mapping[str, str], environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """Have trackers go on with a checkpoint's runs. Return sentences on those that have begun another one already."""
    for name, value in set_here.items():  # of a training before this one
        if environ.get(name) == value:
            del environ[name]
    set_here.clear()
    told = []
    begun = present()
    for tracker, run in saved.items():
        variable, more = _TRACKERS.get(tracker, ("", {}))
        if tracker in begun:
            if begun[tracker] != run:
                told.append(
                    f"this training's run of {tracker} was {run}, and the script has begun {begun[tracker]}: begin it "
                    "after attach, and it is the same one over restarts"
                )
        elif variable and variable not in environ:
            mine = {variable: run, **{name: value for name, value in more.items() if name not in environ}}
            environ.update(mine)
            set_here.update(mine)
    return told
