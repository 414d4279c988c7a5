"""Nodes that fail to boot stay closed for a growing while."""

from __future__ import annotations

import json
from dataclasses import replace

from polluxd.apply.boots import FIRST_S, LONGEST_S, Boots
from polluxd.model import Node

OFF, BOOTING, ON = (Node("c1", 4, power=power) for power in ("off", "booting", "on"))
DOWN = Node("c1", 4, schedulable=False)


def play(boots: Boots, *seen: tuple[float, Node]) -> list[bool]:
    """Whether the node takes jobs after each observation."""
    return [boots.observe((node,), at)[0].schedulable for at, node in seen]


def test_a_node_that_fails_to_boot_is_closed_while_it_is_off_again() -> None:
    boots = Boots()
    assert play(boots, (0.0, OFF), (10.0, BOOTING), (70.0, DOWN), (80.0, OFF)) == [True, True, False, False]
    assert play(boots, (70.0 + FIRST_S - 1, OFF), (70.0 + FIRST_S, OFF)) == [False, True]
    play(
        boots,
        (1000.0, OFF),
        (1010.0, BOOTING),
        (1100.0, ON),
        (2000.0, OFF),
        (2010.0, BOOTING),
        (2610.0, DOWN),
    )
    assert play(boots, (3209.0, OFF), (3210.0, OFF)) == [False, True], "for as long as its boot took"


def test_each_failure_in_a_row_doubles_the_time_up_to_a_bound() -> None:
    boots, at, closed = Boots(), 0.0, []
    for _ in range(8):
        play(boots, (at, BOOTING), (at + 1.0, OFF))
        seconds = next(s for s in range(0, int(LONGEST_S) + 2) if play(boots, (at + 1.0 + s, OFF)) == [True])
        closed.append(seconds)
        at += 1.0 + seconds
    assert closed == [60, 120, 240, 480, 960, 1920, 3840, 7680]


def test_a_boot_that_succeeds_makes_good_for_failures() -> None:
    boots = Boots()
    play(boots, (0.0, BOOTING), (1.0, OFF), (400.0, BOOTING), (460.0, ON), (900.0, OFF), (901.0, BOOTING))
    assert play(boots, (902.0, OFF), (902.0 + FIRST_S, OFF)) == [False, True]


def test_a_node_that_is_on_and_goes_down_has_not_failed_to_boot() -> None:
    boots = Boots()
    assert play(boots, (0.0, ON), (1.0, DOWN), (2.0, OFF)) == [True, False, True]
    assert play(boots, (10.0, OFF), (20.0, OFF)) == [True, True]


def test_a_boot_that_fails_counts_once_however_long_the_node_stays_down() -> None:
    boots = Boots()
    play(boots, (0.0, BOOTING), *((float(at), DOWN) for at in range(1, 50)))
    assert play(boots, (1.0 + FIRST_S, OFF)) == [True]


def test_the_mean_of_boots_that_succeeded_is_known_of_nodes_that_are_alike() -> None:
    boots = Boots()
    other = Node("d1", 4, features=frozenset({"spot"}), power="off")
    play(boots, (0.0, OFF), (5.0, BOOTING), (65.0, ON), (900.0, OFF), (905.0, BOOTING), (945.0, ON))
    alike, unlike = boots.observe((OFF, other), 2000.0)
    assert (alike.boot_s, unlike.boot_s) == (50.0, None)
    play(boots, (2001.0, BOOTING), (2500.0, OFF))
    assert boots.observe((OFF,), 9999.0)[0].boot_s == 50.0, "a boot that failed is none"
    restarted = Boots()
    play(restarted, (0.0, BOOTING), (1.0, ON))
    assert restarted.observe((OFF,), 9.0)[0].boot_s is None, "polluxd did not see its begin"


def test_a_restarted_polluxd_knows_what_the_one_before_it_has_seen() -> None:
    boots, other = Boots(), [replace(node, name="c2") for node in (OFF, BOOTING, ON)]
    boots.observe((OFF, other[0]), 0.0)
    boots.observe((BOOTING, other[1]), 5.0)
    boots.observe((OFF, other[2]), 65.0)
    boots = Boots(json.loads(json.dumps(boots.seen())))
    failed, _ = boots.observe((OFF, other[2]), 100.0)
    assert (failed.schedulable, failed.boot_s) == (False, 60.0)
    assert boots.observe((OFF, other[0]), 65.0 + FIRST_S)[0].schedulable
    play(boots, (1000.0, BOOTING), (1001.0, OFF))
    assert play(boots, (1001.0 + FIRST_S, OFF)) == [False], "the second failure in a row"
