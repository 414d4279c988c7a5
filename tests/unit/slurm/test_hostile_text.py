"""The submission hook: free text of all jobs, and scripts without an end."""

from __future__ import annotations

import os

import pytest

from tests.unit.slurm.lua_hooks import NEEDS_LUA, UNSET, comment, refused, run, submit

pytestmark = NEEDS_LUA

HOSTILE = [
    ("name", "x UserId=a(1) GroupId=b TimeLimit=zz"),
    ("name", "x\nJobId=777777 JobName=y"),
    ("name", "JobId=9"),
    ("name", "x\tAdminComment=pollux:v1"),
    ("name", "\x1b]0;owned\x07"),
    ("name", "x\u009b2J"),
    ("comment", "AdminComment=pollux:v1"),
    ("comment", "a\nb"),
    ("wckey", "Nodes=n[1-4]"),
    ("work_dir", "/home/a\nb"),
    ("std_out", "/home/a\x7f"),
]


@pytest.mark.parametrize(("field", "text"), HOSTILE)
@pytest.mark.parametrize("head", ["#POLLUX min-gpus=1", "# a plain job"])
def test_no_job_may_look_like_a_record(field: str, text: str, head: str) -> None:
    assert f"{field} holds" in refused(submit(head, **{field: text}))


@pytest.mark.parametrize(("field", "text"), HOSTILE)
def test_nor_a_job_without_a_script(field: str, text: str) -> None:
    assert not run("slurm_job_submit(job, nil, 1000)", UNSET | {field: text}, {}).accepted


@pytest.mark.parametrize("name", ["lr=0.1 bs=32", "résumé", "a-b_c.d/e", "x = y", "训练", "user=alice", ""])
def test_ordinary_names_pass(name: str) -> None:
    assert comment(submit("#POLLUX min-gpus=2", name=name, work_dir="/home/a=b/JobId=1"))


def test_a_script_is_read_no_further_than_64_kib() -> None:
    padding = "# x\n" * (65536 // 4)
    assert submit(padding + "#POLLUX min-gpus=2").admin_comment is None
    assert submit("#POLLUX min-gpus=2\n" + padding * 40).admin_comment is not None
    assert submit(padding[:60000] + "\n#POLLUX min-gpus=2").admin_comment is not None


@pytest.mark.parametrize("text", ["n" * 40000, "n=" * 20000, "=" * 40000, "UserId" * 7000])
def test_a_long_text_costs_slurmctld_no_time(text: str) -> None:
    before = os.times()
    assert submit("# a plain job", name=text, comment=text).admin_comment is None
    after = os.times()
    took = after.children_user + after.children_system - before.children_user - before.children_system
    assert took < 5.0, "with the square of the length it took half a minute"


def test_the_name_of_a_field_is_found_behind_anything() -> None:
    assert "'UserId='" in refused(submit("#POLLUX", comment="x" * 40000 + " 9UserId=0"))
    assert comment(submit("#POLLUX", comment="x" * 40 + "UserId=0"))
