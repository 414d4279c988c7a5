"""PyslurmClient with a stand-in for pyslurm in a real worker process.

The tests cover the answers that the client reads, the orders that it gives, and the client that serves when
pyslurm cannot. tests/integration/test_pyslurm.py uses the real pyslurm.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest

from polluxd.config.config_file import parse_config
from polluxd.daemon import Daemon
from polluxd.errors import ConfigError, SlurmRefused
from polluxd.model import JobState
from polluxd.slurm import pyslurm_client
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.pyslurm_client import PyslurmClient, open_client
from polluxd.slurm.scontrol import ScontrolClient
from tests.unit.slurm.pyslurm_stand_in import StandIn, reader, said

# --- serving ------------------------------------------------------------------------------------


def test_it_reads_through_a_worker_and_never_imports_pyslurm_itself(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    flags = sys.getdlopenflags()
    slurm = stand_in.client()
    state = slurm.observe()
    assert ("pyslurm" in sys.modules, sys.getdlopenflags()) == (False, flags)
    assert stand_in.heard == [["import", "1"], ["init", str(stand_in.conf)]]
    ours, foreign = state.jobs
    assert (ours.job_id, ours.name, ours.state) == (7, "by-pyslurm", JobState.RUNNING)
    assert (ours.gpus_per_node_held, ours.cpus_per_node_held) == ({"n1": 2}, {"n1": 2})
    assert ours.spec is not None
    assert (foreign.name, foreign.spec) == ("\ufffdx", None)
    (node,) = state.nodes
    assert (node.gpus, node.gpu_type, node.foreign_gpus, node.cpus, node.schedulable) == (
        4,
        "a100",
        2,
        8,
        True,
    )
    assert [call[-1] for call in stand_in.commands] == [
        "--version",
        "topology",
        "partition",
        "reservation",
        "config",
    ]
    assert set(slurm.jobs([7])) == {7}
    assert set(slurm.jobs([7, 9])) == {7, 9}
    assert slurm.jobs([8]) == {}
    assert (stand_in.commands, stand_in.heard) == ([], [])
    assert said(caplog) == [("INFO", "Slurm is read through pyslurm 22.05.2")]


def test_a_text_of_a_user_leaves_the_worker_with_a_bound(stand_in: StandIn) -> None:
    stand_in.fault(values={"state_reason": "x" * 10_000})
    state = stand_in.client().observe()
    assert [job.reason for job in state.jobs] == ["x" * 4096] * 2


def test_changes_go_through_scontrol_and_start_no_worker(stand_in: StandIn) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert (stand_in.heard != [], stand_in.commands != []) == (True, True)
    slurm.run_again(7)
    slurm.requeue(7)
    slurm.configure(7, Geometry(("n1",), 1, 1), start=True)
    changes = [call[0] for call in stand_in.commands if "show" not in call]
    assert changes == ["requeue", "requeue", "update"]
    assert stand_in.heard == []
    with pytest.raises(SlurmRefused, match=r"jobs \[9\] did not opt in"):
        slurm.run_again(9)
    assert (stand_in.heard, stand_in.commands) == ([], [])


def test_a_worker_ends_with_its_client_and_after_its_time(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert slurm.worker is not None
    first = slurm.worker.process.pid
    monkeypatch.setattr(pyslurm_client, "LIFETIME_S", 0.0)
    slurm.observe()
    assert slurm.worker.process.pid != first
    second = slurm.worker.process.pid
    del slurm
    gc.collect()
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


# --- which, and why -----------------------------------------------------------------------------


def test_the_configuration_decides_and_the_log_says_so(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(stand_in.folder / "lib")
    assert type(open_client("scontrol", conf=stand_in.conf, timeout=60)) is ScontrolClient
    assert said(caplog) == [("INFO", "Slurm is read through scontrol: slurm.client says so")]
    for choice in ("auto", "pyslurm"):
        made = open_client(choice, conf=stand_in.conf, timeout=60)  # type: ignore[arg-type]
        assert isinstance(made, PyslurmClient)
        assert reader(made) == "by-pyslurm"
    monkeypatch.setattr(pyslurm_client, "find_spec", lambda name: None)
    caplog.clear()
    for choice in ("auto", "pyslurm"):
        assert type(open_client(choice, conf=stand_in.conf, timeout=60)) is ScontrolClient  # type: ignore[arg-type]
    why = "Slurm is read through scontrol: pyslurm is not installed"
    assert said(caplog) == [("INFO", why), ("WARNING", why)]
    assert "pyslurm" not in sys.modules


@pytest.mark.parametrize("choice", ["scontrol", "pyslurm"])
def test_the_daemon_asks_for_the_client_of_its_configuration(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, choice: str
) -> None:
    monkeypatch.setattr(pyslurm_client, "find_spec", lambda name: None)
    document = {
        "slurm": {"cluster": "c", "client": choice},
        "database": {"url": "postgresql://pollux_daemon@127.0.0.1:1/pollux"},
    }
    Daemon(lambda: parse_config(document, "test")).store.close()
    (found,) = said(caplog)
    assert found == {
        "scontrol": ("INFO", "Slurm is read through scontrol: slurm.client says so"),
        "pyslurm": ("WARNING", "Slurm is read through scontrol: pyslurm is not installed"),
    }.get(choice)
    document["slurm"]["client"] = "squeue"
    with pytest.raises(
        ConfigError, match=r"slurm.client: expected \"auto\", \"scontrol\" or \"pyslurm\"; got 'squeue'"
    ):
        parse_config(document, "test")


@pytest.mark.parametrize("version", ["25.11.2", "22.11.0", "none"])
def test_a_pyslurm_of_another_version_is_never_initialised(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    stand_in.fault(version=version)
    slurm = stand_in.client(choice="pyslurm")
    assert [reader(slurm) for _ in range(3)] == ["by-scontrol"] * 3
    assert [words[0] for words in stand_in.heard] == ["import"]
    why = f"pyslurm {version} is not for this Slurm, 'slurm-wlm 22.05.8'"
    assert said(caplog) == [("WARNING", f"Slurm is read through scontrol: {why}")]


@pytest.mark.parametrize(
    ("at", "how", "why"),
    [
        ("import", "exit", "slurmctld: fatal: no configuration"),
        ("import", "import error", "pyslurm is not usable: ImportError: libslurmfull.so: undefined symbol"),
        ("jobs", "crash", "the process ended (exit status -11)"),
        ("jobs", "no such attribute", "jobs: AttributeError: 'object' object has no attribute"),
        ("jobs", "Access/permission denied", "pyslurm jobs: Access/permission denied"),
        (
            "values",
            {"requeue_count": "8"},
            "pyslurm's worker: jobs.0.restarts: Input should be a valid integer",
        ),
        ("values", {"allocated_nodes": "n[1-99999999999]"}, "expected a node list of at most"),
    ],
)
def test_whatever_a_worker_dies_of_or_garbles_scontrol_reads_at_once(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture, at: str, how: object, why: str
) -> None:
    stand_in.fault(**{at: how})
    slurm = stand_in.client()
    assert reader(slurm) == "by-scontrol"
    ((level, message),) = said(caplog)
    assert level == "INFO"  # it never served, and nobody asked for it by name
    assert message.startswith("Slurm is read through scontrol: ")
    assert why in message
    # For a while no worker is tried; nothing is said again.
    stand_in.fault()
    before = stand_in.heard
    assert reader(slurm) == "by-scontrol"
    assert (before[0], stand_in.heard, said(caplog)) == (["import", "1"], [], [])
    # Then one is.
    slurm.paused_until = 0.0
    assert reader(slurm) == "by-pyslurm"
    assert said(caplog) == [("INFO", "Slurm is read through pyslurm 22.05.2")]
    # A failure in service is a warning.
    stand_in.fault(jobs="exit")
    assert reader(slurm) == "by-scontrol"
    assert [level for level, _ in said(caplog)] == ["WARNING"]


def test_without_slurm_conf_pyslurm_is_not_even_imported(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in.conf.unlink()
    assert reader(stand_in.client()) == "by-scontrol"
    assert stand_in.heard == []
    assert f"no slurm.conf can be read at {stand_in.conf}" in caplog.text


def test_pauses_grow_to_a_bound_and_are_forgotten_in_service(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(pyslurm_client.time, "monotonic", lambda: now)

    def tries() -> int:
        slurm.jobs([7, 8])
        return len(stand_in.heard)

    stand_in.fault(**{"import": "import error"})
    slurm = stand_in.client()
    assert tries() == 1
    for pause in (5, 10, 20, 40, 80, 160, 300, 300):
        now += pause - 1
        assert tries() == 0
        now += 1
        assert tries() == 1
    stand_in.fault()
    now += 300
    assert reader(slurm) == "by-pyslurm"
    assert len(stand_in.heard) == 2
    stand_in.fault(jobs="no such attribute")
    assert tries() == 0  # the worker that is there
    now += 5
    assert tries() == 2
