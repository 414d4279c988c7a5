"""One trace under several policies, in this process or in several.

The result is the same.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from queue import Empty
from typing import Any

from polluxd.sim.applications import BUILT_IN, Application
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import Policy, Progress, SimulationResult, simulate
from polluxd.sim.measures import measure
from polluxd.sim.policies import policy_named
from polluxd.sim.policies.pollux import Pollux
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import Submission

OnProgress = Callable[[str, int, int], None]
"""Told of each policy how many jobs have ended, of how many."""

_queue: Any = None


def applications_of(profiles: Path | None) -> Mapping[str, Application]:
    """The measured applications of a directory, or those that are shipped."""
    return BUILT_IN if profiles is None else load_profiles(profiles)


def compare(
    submissions: Sequence[Submission],
    profiles: Path | None,
    names: Sequence[str],
    scenario: Scenario,
    *,
    in_parallel: int | None = None,
    on_progress: OnProgress = lambda _name, _ended, _of: None,
) -> dict[str, dict[str, Any]]:
    """Return the figures of each policy, in the order of `names`.

    `in_parallel` policies are simulated at the same time; None: one per core. Runs share nothing, so parallelism
    changes no result.
    """
    in_parallel = in_parallel or len(os.sched_getaffinity(0))
    if in_parallel == 1 or len(names) == 1:
        return {name: _run(submissions, profiles, name, scenario, on_progress) for name in names}
    # Forked children of a process that may have threads are a risk; a fresh interpreter costs a second.
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with ProcessPoolExecutor(
        min(in_parallel, len(names)), mp_context=context, initializer=_listen, initargs=(queue,)
    ) as pool:
        tasks = {pool.submit(_run_apart, submissions, profiles, name, scenario): name for name in names}
        found: dict[str, dict[str, Any]] = {}
        waiting = set(tasks)
        while waiting:
            _pass_on(queue, on_progress)
            for task in [t for t in waiting if t.done()]:
                found[tasks[task]] = task.result()
                waiting.discard(task)
    return {name: found[name] for name in names}


def _pass_on(queue: Any, on_progress: OnProgress) -> None:
    try:
        on_progress(*queue.get(timeout=0.2))
    except Empty:
        return


def _listen(queue: Any) -> None:
    global _queue  # noqa: PLW0603 - what a worker process inherits at its start
    _queue = queue


def _run_apart(
    submissions: Sequence[Submission], profiles: Path | None, name: str, scenario: Scenario
) -> dict[str, Any]:
    return _run(submissions, profiles, name, scenario, lambda *news: _queue.put(news))


def _run(
    submissions: Sequence[Submission],
    profiles: Path | None,
    name: str,
    scenario: Scenario,
    on_progress: OnProgress,
) -> dict[str, Any]:
    applications = applications_of(profiles)
    policy = policy_named(name)(scenario)
    return measure(
        played(submissions, applications, policy, scenario, lambda *of: on_progress(name, *of)), scenario
    )


def played(
    submissions: Sequence[Submission],
    applications: Mapping[str, Application],
    policy: Policy | Pollux,
    scenario: Scenario,
    progress: Progress | None = None,
) -> SimulationResult:
    """Run the trace: policy `pollux` by polluxd's own controller, another one by its decisions."""
    if isinstance(policy, Pollux):
        # polluxd's rooms are not loaded for runs without them.
        from polluxd.sim.daemon_engine import simulate_daemon  # noqa: PLC0415

        return simulate_daemon(submissions, applications, scenario, progress)
    return simulate(submissions, applications, policy, scenario, progress)
