"""Records of sacct, read and added up."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.accounting import added_up, of_newest_job, read_usage, records

OURS = "pollux:v1 min-gpus=1 cpus-per-gpu=1 constraint=(a100|h100) submitted=100"
LENT = "pollux:v1 companion-of=7 attempt=1 move=3 nonce={} cpus-per-gpu=1 submitted=160".format("0" * 32)
MOVED = f"""\
7|1000|REQUEUED|100|110|140|30||billing=1,cpu=1,gres/gpu:a100=2,gres/gpu=2,node=1|{OURS}
7|1000|RESIZING|140|150|200|50|700|cpu=8,gres/gpu=8,node=2|{OURS}
7|1000|CANCELLED by 1000|140|200|260|60|300|cpu=4,gres/gpu=4,node=1|{OURS}
"""
COMPANION = f"9|1000|CANCELLED by 900|160|170|200|30||gres/gpu=4|{LENT}\n"


def test_attempts_sizes_and_companions_are_added_up() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*words: str) -> str:
        asked.append(words)
        return MOVED if "--jobs=7" in words else MOVED + COMPANION

    used = read_usage(ask, 7)
    assert "--uid=1000" in asked[1]
    assert used.gpu_s == 2 * 30 + 8 * 50 + 4 * 60 + 4 * 30
    assert (used.companion_gpu_s, used.companions) == (120, 1)
    assert (used.restarts, used.wall_s, used.waited_s) == (1, 140, 20)
    assert (used.state, used.submitted_at, used.ended_at, used.energy_j) == ("CANCELLED", 100, 260, 1000)


def test_a_job_that_had_the_id_before_does_not_count() -> None:
    older = MOVED.replace("submitted=100", "submitted=5").replace("|100|", "|5|").replace("|140|", "|50|")
    assert added_up(of_newest_job(records(older + MOVED), 7), []).submitted_at == 100


def test_a_waiting_job_has_used_nothing() -> None:
    used = added_up(records("7|1000|PENDING|100|Unknown|Unknown|0|||" + OURS), [])
    assert (used.gpu_s, used.wall_s, used.waited_s, used.ended_at) == (0, 0, 0, None)


def test_records_without_gpus_are_not_counted_as_none_used() -> None:
    assert added_up(records("7|1000|RUNNING|100|110|Unknown|5||cpu=1,node=1|" + OURS), []).gpu_s is None


@pytest.mark.parametrize(
    "line", ["7|1000", "x|1000|RUNNING|100|110|0|5|||", "7|1000|RUNNING|soon|110|0|5|||"]
)
def test_an_answer_that_makes_no_sense_is_refused(line: str) -> None:
    with pytest.raises(SlurmGarbled, match="sacct"):
        records(line)


def test_an_unknown_job_has_no_usage() -> None:
    assert read_usage(lambda *words: "", 7) is None
