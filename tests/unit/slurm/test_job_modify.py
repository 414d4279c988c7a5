"""The submission hook: the changes that a user may make to a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.slurm.lua_hooks import NEEDS_LUA, UNSET, lua, modify, run

pytestmark = NEEDS_LUA


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("StartTime", {"begin_time": 1_800_000_000}),
        ("NumNodes", {"min_nodes": 2}),
        ("ReqNodeList", {"req_nodes": "n1"}),
        ("TresPerNode", {"tres_per_node": "gres:gpu:4"}),
        ("NumTasks", {"num_tasks": 4}),
        ("Requeue", {"requeue": 0}),
        ("NumCPUs", {"min_cpus": 64}),
        ("NumCPUs", {"max_cpus": 1}),
        ("MinCPUsNode", {"pn_min_cpus": 8}),
        ("MinMemory", {"min_mem_per_node": 64000}),
        ("MinMemory", {"min_mem_per_cpu": 1}),
        ("CpusPerTres", {"cpus_per_tres": "gres:gpu:8"}),
        ("MemPerTres", {"mem_per_tres": "gres:gpu:8"}),
        ("Partition", {"partition": "debug"}),
        ("Reservation", {"reservation": "maint"}),
        ("TimeMin", {"time_min": 5}),
        ("Deadline", {"deadline": 1_800_000_000}),
        ("JobName", {"name": "new"}),
        ("QOS", {"qos": "urgent"}),
        ("Account", {"account": "lab"}),
    ],
)
def test_a_user_cannot_change_the_geometry_or_the_lease(name: str, update: dict[str, object]) -> None:
    outcome = modify(update)
    assert not outcome.accepted
    assert outcome.said == [f"pollux: {name} of job 7 is polluxd's to change"]
    assert modify(update, uid=0).accepted
    assert modify(update, uid=990).accepted
    assert modify(update, comment=None).accepted
    assert modify(update, comment="see ticket 12, not pollux:").accepted


@pytest.mark.parametrize("update", [{"priority": 0}, {"time_limit": 10}, {"comment": "x"}])
def test_a_user_may_change_the_rest(update: dict[str, object]) -> None:
    assert modify(update).accepted


@pytest.mark.parametrize("comment", ["pollux:v1 min-gpus=1", None])
def test_nobodys_job_gets_a_name_that_looks_like_a_record(comment: str | None) -> None:
    for name in ("x\nJobId=9", "x UserId=root(0)", "\x1b[2J"):
        outcome = modify({"name": name}, comment=comment)
        assert not outcome.accepted
        assert "name holds" in outcome.said[0]
        assert modify({"name": name}, comment=comment, uid=0).accepted


def test_a_trusted_user_is_named(tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0::/root:/bin/sh\npollux:x:977:977::/:/usr/sbin/nologin\n")
    config: dict[str, object] = {"trusted_users": ["pollux"], "passwd_file": str(tmp_path / "passwd")}
    update = {**UNSET, "min_nodes": 2}
    for uid, accepted in ((977, True), (978, False)):
        call = f"slurm_job_modify(job, {lua({'job_id': 7, 'admin_comment': 'pollux:v1 min-gpus=1'})}, nil, {uid})"
        assert run(call, update, config).accepted == accepted


@pytest.mark.parametrize("uid", [0, 990])
def test_an_administrator_s_comment_keeps_the_mark(uid: int) -> None:
    marked = "pollux:v1 min-gpus=1"
    assert modify({"admin_comment": "ticket 12"}, uid=uid).admin_comment == f"{marked} -- ticket 12"
    again = modify({"admin_comment": "ticket 13"}, uid=uid, comment=f"{marked} -- ticket 12")
    assert again.admin_comment == f"{marked} -- ticket 13"
    assert modify({"admin_comment": ""}, uid=uid).admin_comment == "", "taken away on purpose"
    assert modify({"admin_comment": "pollux:v1 min-gpus=2"}, uid=uid).admin_comment == "pollux:v1 min-gpus=2"
    assert modify({"admin_comment": "x"}, uid=uid, comment=None).admin_comment == "x"
