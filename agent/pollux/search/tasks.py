"""The tasks of a search, as Slurm knows them."""

from __future__ import annotations

NAME_VARIABLE = "POLLUX_SEARCH"
"""Name of the job's search; set by the submission hook for the directive `search`, and by `polluxctl tune`."""
TASK_VARIABLE = "POLLUX_SEARCH_TASK"
"""The task that a companion job works for, and the journal: `TASK:PATH`; set by rank 0."""
FOLDER = "pollux-searches"
"""Of the journals, beside where a job was submitted."""
TRIAL_VARIABLES = (NAME_VARIABLE, TASK_VARIABLE)
OF_RUN = "+"
"""Between a task and the name of a run, where a task's batch script calls `pollux run` several times: a trial each."""


def slurms_name(task: str) -> str:
    """Return the task's name as squeue shows it."""
    return task.partition(OF_RUN)[0]
