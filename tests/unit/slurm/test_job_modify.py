"""The submission hook: what a user may change of a job once it is submitted."""

from __future__ import annotations

import pytest

from tests.unit.slurm.lua_hooks import NEEDS_LUA, modify

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


@pytest.mark.parametrize("update", [{"priority": 0}, {"time_limit": 10}, {"name": "new"}, {"comment": "x"}])
def test_a_user_may_change_the_rest(update: dict[str, object]) -> None:
    assert modify(update).accepted
