"""What squeue says, read; what is recorded of it."""

from __future__ import annotations

import os

import pytest

from contrib.demo.measure import Recording, Seen, SlurmSilentError, Track, observe, slurm


@pytest.fixture
def squeue(tmp_path):
    """Make an environment whose `squeue` runs the given shell text."""

    def make(text):
        script = tmp_path / "squeue"
        script.write_text("#!/bin/sh\n" + text)
        script.chmod(0o755)
        return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    return make


@pytest.mark.parametrize("gres", ["gres:gpu:3", "gres/gpu:3", "gpu:3", "gres:gpu:a100:3", "gres/gpu=3"])
def test_held_gpus_are_nodes_times_gpus_per_node_while_running(squeue, gres):
    env = squeue(
        f"echo '7|COMPLETING|2|{gres}|n3|c'; echo '5|RUNNING|2|{gres}|n[1-2]|a'; echo '6|PENDING|2|{gres}||b'"
    )
    assert observe(env) == {
        5: Seen("RUNNING", 6, "n[1-2]"),
        6: Seen("PENDING", 0, ""),
        7: Seen("COMPLETING", 0, "n3"),
    }


def test_a_job_without_gpus_holds_none(squeue):
    assert observe(squeue("echo '5|RUNNING|1|N/A|n1|a'")) == {5: Seen("RUNNING", 0, "n1")}


def test_companions_are_part_of_the_job_that_they_lend_to(squeue):
    lines = (
        *("3|COMPLETED|1|gres:gpu:4||a", "4|COMPLETED|1|gres:gpu:4||a.companion"),
        *("5|RUNNING|1|gres:gpu:4|n1|a", "6|RUNNING|1|gres:gpu:2|n4|b"),
        *("7|RUNNING|2|gres:gpu:4|n[2-3]|a.companion", "8|PENDING|1|gres:gpu:2||b.companion"),
    )
    assert observe(squeue("; ".join(f"echo '{line}'" for line in lines))) == {
        3: Seen("COMPLETED", 0, ""),
        5: Seen("RUNNING", 12, "n1,n[2-3]"),
        6: Seen("RUNNING", 2, "n4"),
    }
    # A companion outlives its parent for a moment, at most.
    alone = ("5|COMPLETED|1|gres:gpu:4||a", "7|RUNNING|1|gres:gpu:4|n2|a.companion")
    assert observe(squeue("; ".join(f"echo '{line}'" for line in alone))) == {5: Seen("COMPLETED", 0, "")}


def test_a_command_that_fails_is_an_error_with_its_complaint(squeue):
    with pytest.raises(SlurmSilentError, match="controller is gone"):
        observe(squeue("echo 'controller is gone' >&2; exit 1"))


def test_a_command_that_hangs_is_an_error(squeue):
    with pytest.raises(SlurmSilentError, match="did not answer"):
        slurm(["squeue"], squeue("sleep 5"), timeout_s=0.2)


def test_only_changes_are_recorded():
    recording = Recording(started_at=0.0, tracks={1: Track("a", 1, 0.0)})
    for at, gpus in ((1.0, 2), (2.0, 2), (3.0, 4), (4.0, 4)):
        recording.note(at, {1: Seen("RUNNING", gpus, "n1")})
    assert recording.tracks[1].gpus == [(1.0, 2), (3.0, 4)]
    assert not recording.all_ended
    recording.note(5.0, {1: Seen("TIMEOUT", 0, "")})
    assert recording.all_ended
    assert recording.tracks[1].jct_s == 5.0


def test_slurms_own_record_replaces_the_sampled_end(tmp_path):
    script = tmp_path / "scontrol"
    script.write_text(
        "#!/bin/sh\necho 'JobId=1 JobState=COMPLETED EndTime=2026-01-02T03:04:05 Comment=a b'\n"
    )
    script.chmod(0o755)
    recording = Recording(started_at=0.0, tracks={1: Track("a", 1, 0.0, ended_at=9e9, state="COMPLETED")})
    recording.settle({"PATH": f"{tmp_path}:{os.environ['PATH']}", "TZ": os.environ.get("TZ", "")}, 1)
    assert 1.7e9 < recording.tracks[1].ended_at < 1.8e9
