"""Moves that end ranks of a running step.

Nodes leave the step; the remaining ranks go on or start again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.agent.launched_step import STOPPED, Step, step

# How a rank that has to leave ends: as asked, or in another way.
WAYS = {
    "as asked": "sys.exit(76)",
    "launcher killed": "kill(os.getppid())",
    "failed": "raise ValueError('on the way out')",
    "stuck": "stuck()",
}
SHORT = "leave=0.5"

SHRINK = """
LEAVING = {leaving!r}
if rank == 0:
    line = line()
    line.announce(5, LEAVING + ["elsewhere"])
    mark("announced")
    note("gone", early=sorted(line.gone(LEAVING, 0.2)))
    mark("go")
    note("gone", names=sorted(line.gone(LEAVING, 90)))
    mark("shrunk")
wait_for("announced")
if node in LEAVING:
    wait_for("go")
    {way}
wait_for("shrunk")
note("survived")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leaving", "way"), [(["n1", "n2"], "as asked"), *((["n1"], way) for way in WAYS if way != "as asked")]
)
def test_nodes_that_leave_end_well_and_the_others_train_on(
    tmp_path: Path, leaving: list[str], way: str
) -> None:
    settings = SHORT if way == "stuck" else "leave=60"
    with step(tmp_path, 3, SHRINK.format(leaving=leaving, way=WAYS[way]), settings=settings) as launched:
        expected = [0, 0, 0]
        if way == "launcher killed":
            expected[1] = STOPPED
        assert launched.statuses() == expected, launched.output()
    early, late = launched.log("gone")
    # A stuck rank may have been ended by its launcher by now.
    assert early["early"] == [] or way == "stuck"
    assert late["names"] == leaving
    survivors = {note["node"] for note in launched.log("survived")}
    assert survivors == {"n0", "n1", "n2"} - set(leaving)
    assert len(launched.log("started")) == 6, "nobody was started again"
    assert ("failed first: ValueError: on the way out" in launched.output()) == (way == "failed")


def test_an_announcement_that_makes_no_sense_is_refused_and_nobody_is_let_go(tmp_path: Path) -> None:
    body = """
if rank == 0:
    try:
        line().announce(0, ["n1"])
    except Exception as error:
        note("refused", why=f"{type(error).__name__}: {error}")
    mark("refused")
wait_for("refused")
sys.exit(76 if node == "n1" else 0)
"""
    with step(tmp_path, 2, body, workers=1, settings="sibling=0.1") as launched:
        assert launched.statuses() == [76, 76], launched.output()
    assert "sys.exit(76)" in launched.output()
    (refused,) = launched.log("refused")
    why = "expected a move's number from 1, got 0"
    assert refused["why"] == f"LaunchError: the launcher does not take move 0: {why}"


def test_the_last_of_several_shrinks_counts_and_failures_name_ranks_as_they_are_then(tmp_path: Path) -> None:
    body = """
if start == 0:
    if rank == 0:
        line = line()
        for number, leaver in ((5, "n1"), (6, "n3")):
            line.announce(number, [leaver])
            mark(leaver)
            assert line.gone([leaver], 90) == {leaver}
        mark("shrunk")
    if node in ("n1", "n3"):
        wait_for(node)
        sys.exit(76)
    wait_for("shrunk")
    if node == "n2":
        sys.exit(3)
    time.sleep(90)
"""
    options = ("--max-restarts", "1")
    with step(tmp_path, 4, body, *options, workers=1, settings="sibling=0.1") as launched:
        assert launched.statuses() == [0, 0, 0, 0], launched.output()
    # Rank 2 of four, and rank 1 of the two that were left.
    assert "rank 1 (pid" in launched.output()
    assert launched.placed(1, POLLUX_RESIZED="6", POLLUX_LEFT="n3", POLLUX_RESTARTS="1") == [
        (0, "n0"),
        (1, "n2"),
    ]
    assert {note["world"] for note in launched.log("started") if note["start"]} == {2}


def starts(launched: Step) -> int:
    return max(note["start"] for note in launched.log("started")) + 1


def test_retries_count_anew_from_each_move(tmp_path: Path) -> None:
    """Each lost companion costs a start; a job that has lost many goes on."""
    body = """
if rank == 0 and start < 6:
    line().announce(start + 1, [])  # it grows
    mark(f"grown-{start}")
if start < 6:
    wait_for(f"grown-{start}")
    sys.exit(75)
"""
    with step(tmp_path, 2, body, workers=1, settings="sibling=0.1") as launched:
        assert launched.statuses() == [0, 0], launched.output()
    assert starts(launched) == 7
    assert all(note["POLLUX_RESIZED"] is None for note in launched.log("started")), (
        "a lost grow is in no effect"
    )


def test_leavers_have_as_long_as_the_step_takes_that_they_leave_after(tmp_path: Path) -> None:
    """The time to leave does not start at the announcement.

    It starts when the first rank ends, or when rank 0 waits for the leaving ranks.
    """
    body = """
if rank == 0:
    line = line()
    line.announce(5, ["n1"])
    mark("announced")
    wait_for("stepped")
    assert line.gone(["n1"], 90) == {"n1"}
    note("gone")
if node == "n1":
    wait_for("announced")
    time.sleep(1)  # a long step, in which all ranks still take part
    note("stepped")
    mark("stepped")
    stuck()
"""
    with step(tmp_path, 2, body, workers=1, settings="leave=0.1") as launched:
        assert launched.statuses() == [0, 0], launched.output()
    assert len(launched.log("stepped")) == len(launched.log("gone")) == 1


@pytest.mark.parametrize(("lent", "statuses"), [(2, [0, 0]), (0, [134, 134])])
def test_an_abort_is_a_lost_companion_where_there_is_one(
    tmp_path: Path, lent: int, statuses: list[int]
) -> None:
    """NCCL aborts a process like this when another rank is gone."""
    body = f"""
if start == 0:
    if rank == 0:
        line().announce(5, [], lent={lent})
        mark("grown")
    wait_for("grown")
    if rank == 1:
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # its core would lie in the checkout
        os.abort()
    time.sleep(90)
"""
    with step(tmp_path, 2, body, workers=1, settings="sibling=0.1") as launched:
        assert launched.statuses() == statuses, launched.output()
    assert starts(launched) == 1 + bool(lent)


def test_training_that_is_over_before_the_move_ends_as_it_would_have(tmp_path: Path) -> None:
    """Ranks are not hurried then: one may still be writing results."""
    body = """
if start == 0:
    if rank == 0:
        line().announce(5, ["n1"])
        mark("announced")
    wait_for("announced")
    if rank == 0:
        time.sleep(1)
        note("written")
"""
    with step(tmp_path, 2, body, workers=2, settings="leave=0.1") as launched:
        assert launched.statuses() == [0, 0], launched.output()
    assert len(launched.log("written")) == 1
    assert starts(launched) == 1
