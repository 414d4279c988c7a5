"""What sbatch options demand of nodes."""

from __future__ import annotations

import pytest

from polluxd.errors import DirectiveError
from polluxd.model import Node
from polluxd.slurm.demands import Demands, matches
from polluxd.slurm.directives import parse_admin_comment


@pytest.mark.parametrize(
    ("constraint", "features", "fits"),
    [
        ("a", "a b", True),
        ("a", "b", False),
        ("a&b", "a b", True),
        ("a&b", "a", False),
        ("a|b", "b", True),
        ("(a|b)&c", "b c", True),
        ("(a|b)&c", "b", False),
        ("a|(b&c)", "b c", True),
        ("1g.5gb&ib-hdr", "1g.5gb ib-hdr", True),
    ],
)
def test_constraints(constraint: str, features: str, fits: bool) -> None:
    assert matches(constraint, frozenset(features.split())) is fits


@pytest.mark.parametrize("text", ["a&", "&a", "(a", "a)", "a b", "a*2", "[a]", "()"])
def test_constraints_that_make_no_sense(text: str) -> None:
    with pytest.raises(DirectiveError):
        matches(text, frozenset())


def demands(words: str) -> Demands:
    return parse_admin_comment(f"pollux:v1 min-gpus=1 {words}").demands


def test_the_words_of_a_comment() -> None:
    assert demands("") == Demands()
    assert not Demands().of_nodes
    assert demands(
        "gpu-types=a100,h100 constraint=ib&(x|y) nodelist=n[1-2] exclude=n2 reservation=course exclusive=yes "
        "min-cpus=4 tmp=100 switches=1 array-limit=4 contiguous=yes"
    ) == Demands(
        frozenset({"a100", "h100"}),
        "ib&(x|y)",
        frozenset({"n1", "n2"}),
        frozenset({"n2"}),
        "course",
        True,
        4,
        100,
        1,
        4,
        True,
    )


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("gpu-types=a100", ""),
        ("gpu-types=h100", "gpu-types=h100"),
        ("constraint=ib", ""),
        ("constraint=ib&nvlink", "--constraint=ib&nvlink"),
        ("nodelist=n2", "--nodelist"),
        ("exclude=n1", "--exclude"),
        ("min-cpus=9", "--mincpus=9"),
        ("tmp=501", "--tmp=501"),
        ("tmp=500", ""),
    ],
)
def test_which_nodes_a_demand_leaves_out(words: str, rule: str) -> None:
    node = Node("n1", 4, "a100", cpus=8, features=frozenset({"ib"}), tmp_mb=500)
    assert demands(words).refuses(node) == rule


def test_a_node_of_several_types_takes_no_job_of_one_and_says_so() -> None:
    mixed = Node("n1", 4, "a100+h100")
    assert demands("gpu-types=a100").refuses(mixed).startswith("gpu-types=a100 (polluxd places no job")
    assert demands("gpu-types=v100").refuses(mixed) == "gpu-types=v100"
    assert not demands("gpu-types=a100+h100").refuses(mixed)
