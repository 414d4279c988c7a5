"""Node lists of every form that Slurm prints, and malformed ones."""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.node_lists import node_names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n[1-3,7],gpu-a", ("gpu-a", "n1", "n2", "n3", "n7")),
        ("rack[01-02]-n1", ("rack01-n1", "rack02-n1")),
        ("n[1-2]-ib", ("n1-ib", "n2-ib")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("n[08-11]", ("n08", "n09", "n10", "n11")),
        ("n[1,01]", ("n01", "n1")),
        ("gpu-a.example.org,gpu_b,7", ("7", "gpu-a.example.org", "gpu_b")),
        ("[1-2]", ("1", "2")),
        ("n[1-3,5-6]x,n4", ("n1x", "n2x", "n3x", "n4", "n5x", "n6x")),
        ("@all,n$(id)", ("@all", "n$(id)")),
        ("None", ()),
        ("(null)", ()),
        ("", ()),
    ],
)
def test_node_lists_with_ranges_and_odd_names(text: str, names: tuple[str, ...]) -> None:
    assert sorted(node_names(text)) == sorted(names)


def test_a_large_cluster_is_no_oddity() -> None:
    assert len(node_names(",".join(f"rack{i}-n[0001-5000]" for i in range(13)))) == 65_000


@pytest.mark.parametrize(
    "text",
    [
        "n[1-2",
        "n1]",
        "n[3-1]",
        "n[1-a]",
        "n[]",
        "n1,,n2",
        ",",
        "n[1-2][3-4]",
        "n[1-3]!n2",  # to the library: without n2
        "n1&n2",  # to the library: none
        "n1^n2",
        "n[1-9/2]",  # to the library: every other one
        "n1 n2",
        "n1\nn2",
        "n[1-10000000000]",  # would fill the memory
        "r[1-60000]n[1-60000]",
        "n[1-" + "9" * 5000 + "]",
        "n[1-2]" + "9" * 5000,
    ],
)
def test_what_is_no_node_list_is_garbled(text: str) -> None:
    with pytest.raises(SlurmGarbled, match="expected a node list"):
        node_names(text)
