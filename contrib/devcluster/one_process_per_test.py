"""A pytest plugin that runs each test in a forked process of its own.

Load it by `-p contrib.devcluster.one_process_per_test`. Some builds of torch start threads in a backward pass. A
process with such threads cannot fork the ranks of another test. With this plugin, the process that forks has run no
test.
"""

from __future__ import annotations

import os
import pickle
import signal
from typing import Any

import pytest
from _pytest.runner import runtestprotocol


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports(item):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports(item: pytest.Item) -> list[pytest.TestReport]:
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        with os.fdopen(theirs, "wb") as pipe:
            made = runtestprotocol(item, nextitem=None, log=False)
            pickle.dump(
                [item.config.hook.pytest_report_to_serializable(config=item.config, report=r) for r in made],
                pipe,
            )
        os._exit(0)
    os.close(theirs)
    sent = b""
    try:
        with os.fdopen(ours, "rb") as pipe:
            sent = pipe.read()
    except pytest.fail.Exception:  # of pytest-timeout
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if not sent:
        return [_died(item, os.waitstatus_to_exitcode(status))]
    read: Any = item.config.hook.pytest_report_from_serializable
    return [read(config=item.config, data=data) for data in pickle.loads(sent)]


def _died(item: pytest.Item, status: int) -> pytest.TestReport:
    return pytest.TestReport(
        item.nodeid, item.location, {}, "failed", f"the test's process ended with status {status}", "call"
    )
