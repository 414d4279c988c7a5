"""The submission hook: jobs that lend their nodes to another."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from polluxd.slurm.directives import parse_admin_comment
from polluxd.slurm.protocol import Companion
from tests.unit.slurm.lua_hooks import NEEDS_LUA, modify, refused, submit

pytestmark = NEEDS_LUA

NONCE = "0123456789abcdef" * 2
COMPANION = f"#POLLUX companion-of=12 attempt=0 move=345 nonce={NONCE}"


def test_a_companion_waits_for_polluxd_which_reads_whose_it_is() -> None:
    before = int(time.time())
    outcome = submit(COMPANION, requeue=0, min_nodes=2, cpus_per_task=4, num_tasks=2, min_mem_per_node=600)
    assert (outcome.accepted, outcome.requeue, outcome.gateway, outcome.said) == (True, "0", None, [])
    assert before + 100 <= outcome.begin_time <= time.time() + 100
    read = parse_admin_comment(outcome.admin_comment)
    assert read.companion == Companion(12, 0, 345, NONCE)
    assert (read.spec.cpus_per_gpu, read.spec.mem_per_gpu_mb) == (2, 300)
    assert before <= read.submitted <= time.time()
    assert submit(COMPANION).requeue == "0", "whatever sbatch was told"


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (
            "#POLLUX companion-of=12 attempt=0",
            "a companion has companion-of=JOB attempt=RESTARTS move=ID nonce=HEX",
        ),
        (f"#POLLUX companion-of=x attempt=0 move=3 nonce={NONCE}", "a companion has"),
        (f"#POLLUX companion-of={'9' * 16} attempt=0 move=3 nonce={NONCE}", "a companion has"),
        ("#POLLUX companion-of=12 attempt=0 move=345", "a companion has"),
        (COMPANION[:-1], "a companion has"),
        (COMPANION + "0", "a companion has"),
        (COMPANION[:-1] + "F", "a companion has"),
        (COMPANION + " min-gpus=2", "a companion has"),
        ("#POLLUX min-gpus=2\n" + COMPANION, "no other directive"),
        (COMPANION + "\n#POLLUX mode=observe", "no other directive"),
    ],
)
def test_a_companion_says_whose_it_is_and_no_more(head: str, message: str) -> None:
    assert message in refused(submit(head))


def test_what_a_companion_cannot_be(tmp_path: Path) -> None:
    assert "--array" in refused(submit(COMPANION, array_inx="1-3"))
    assert "nodelist" in refused(submit(COMPANION, req_nodes="n1"))
    assert "nodelist" in refused(submit(COMPANION, req_nodes="n1", features="a100"))
    assert "asks for its GPUs" in refused(submit(COMPANION, tres_per_node=None))
    stale = tmp_path / "heartbeat"
    stale.write_text("1000\n")
    assert "polluxd does not answer" in refused(submit(COMPANION, {"heartbeat_file": str(stale)}))


def test_a_companion_may_repeat_what_its_parent_is_bound_to() -> None:
    assert submit(COMPANION, shared=0, features="a100&ib", reservation="course").accepted


def test_a_companion_behind_the_first_command_is_an_ordinary_job() -> None:
    outcome = submit("srun true\n" + COMPANION)
    assert (outcome.accepted, outcome.admin_comment) == (True, None)


def test_a_companion_cannot_be_made_one_that_starts_again() -> None:
    whose = "pollux:v1 companion-of=12 attempt=0 move=3 cpus-per-gpu=1 submitted=1"
    outcome = modify({"requeue": 1}, comment=whose)
    assert outcome.said == ["pollux: Requeue of job 7 is polluxd's to change"]
    assert modify({"requeue": 0}, comment=whose).accepted
    assert modify({"requeue": 1}).accepted
    assert not modify({"begin_time": 1_800_000_000}, comment=whose).accepted
