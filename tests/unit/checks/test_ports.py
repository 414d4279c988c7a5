"""Private clusters of several test processes do not get the same ports."""

from __future__ import annotations

import random
import socket

import pytest

from contrib.devcluster.processes import free_ports
from pollux.slurm_job.allocation import FIRST_PORT


def test_no_launcher_chooses_a_port_that_a_server_is_to_have() -> None:
    assert max(free_ports(8)) < FIRST_PORT


def test_a_port_is_given_to_one_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    spare = free_ports(3)
    # The reservation is the kernel's: a second one fails in this process as in any other.
    (fresh,) = free_ports(1)
    wanted = [*spare, fresh, *(port for port in range(30000, 31000) if port not in spare)]
    monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: wanted)
    assert free_ports(1)[0] not in {*spare, fresh}


def test_a_port_in_use_on_another_address_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.2", 0))
        listener.listen()
        taken = listener.getsockname()[1]
        monkeypatch.setattr(random.SystemRandom, "sample", lambda *_: [taken, *range(31000, 32000)])
        assert free_ports(1)[0] != taken
