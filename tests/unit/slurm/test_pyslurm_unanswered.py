"""PyslurmClient when a reading or an order is left without an answer."""

from __future__ import annotations

import os

import pytest

from polluxd.errors import SlurmUnavailable
from tests.unit.slurm.pyslurm_stand_in import StandIn, reader, said


def test_a_reading_that_hangs_is_no_answer_and_the_next_goes_by_scontrol(
    stand_in: StandIn, caplog: pytest.LogCaptureFixture
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    assert slurm.worker is not None
    pid = slurm.worker.process.pid
    slurm.timeout = 0.3
    stand_in.fault(jobs="hang")
    said(caplog)
    with pytest.raises(SlurmUnavailable, match=r"observe: no answer within 0\.3 s"):
        slurm.observe()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    slurm.timeout = 60.0
    assert reader(slurm) == "by-scontrol"
    assert said(caplog) == [("WARNING", "Slurm is read through scontrol: observe: no answer within 0.3 s")]


@pytest.mark.parametrize(
    "complaint",
    ["Unable to contact slurm controller (connect failure)", "Socket timed out on send/recv operation"],
)
def test_no_answer_of_slurmctld_is_unavailable_and_slurm_conf_is_read_anew(
    stand_in: StandIn, complaint: str
) -> None:
    slurm = stand_in.client()
    slurm.observe()
    stand_in.fault(jobs=complaint)
    with pytest.raises(SlurmUnavailable, match="does not answer"):
        slurm.observe()
    stand_in.fault()
    assert reader(slurm) == "by-scontrol"
    slurm.paused_until = 0.0
    assert reader(slurm) == "by-pyslurm"
    assert [words[0] for words in stand_in.heard] == ["import", "init"] * 2
