"""Node lists and gres expressions of every form that Slurm prints, and malformed ones."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polluxd.errors import SlurmGarbled
from polluxd.slurm.notation import Gpus, gpus_in_use, node_names, parse_gpus


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


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("gpu:4", Gpus(4)),
        ("gpu", Gpus(1)),
        ("gres:gpu:2", Gpus(2)),
        ("gres/gpu:2", Gpus(2)),
        ("gres/gpu=2", Gpus(2)),
        ("gres:gpu:a100:2", Gpus(2, "a100")),
        ("gres/gpu:a100-sxm.80:2", Gpus(2, "a100-sxm.80")),
        ("gpu:a100:4(S:0-1)", Gpus(4, "a100")),
        ("gpu:a100", Gpus(1, "a100")),
        ("gpu:1g.5gb:4", Gpus(4, "1g.5gb")),
        ("gpu:2080ti:4", Gpus(4, "2080ti")),
        ("gpu:4090:8", Gpus(8, "4090")),
        ("gres/gpu:4090=2", Gpus(2, "4090")),
        ("gpu:nvidia_a100_1g.5gb:7(S:0)", Gpus(7, "nvidia_a100_1g.5gb")),
        ("gpu:a100:2(IDX:0-1),gpu:v100:1(IDX:2)", Gpus(3, "a100+v100")),
        ("gpu:1g.5gb:2,gpu:4090:2,shard:1g.5gb:8", Gpus(4, "1g.5gb+4090")),
        ("gpu:2,gpu:a100:1", Gpus(3)),
        ("nic:2", Gpus(0)),
        ("gpumem:2", Gpus(0)),
        ("(null)", Gpus(0)),
        ("N/A", Gpus(0)),
        ("", Gpus(0)),
    ],
)
def test_gpus(text: str, gpus: Gpus) -> None:
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["gpu:-4", "gpu:a:b:c", "gpu:a b:2", "gpu:+1", "gpu:", "gpu:99999999"])
def test_what_is_no_count_of_gpus_is_garbled(text: str) -> None:
    with pytest.raises(SlurmGarbled, match="expected"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("used", "count"),
    [
        ("gpu:3", 3),
        ("gpu:a100:2(IDX:0,3)", 2),
        ("gpu:0(IDX:N/A)", 0),
        # Slurm 22.05.8 as recorded: two jobs of shards and one of a GPU on a node of four.
        ("gpu:1g.5gb:0(IDX:N/A),gpu:4090:1(IDX:2),shard:1g.5gb:2(IDX:0-1),shard:4090:0(IDX:N/A)", 3),
        ("gpu:1,shard:300(IDX:0-3)", 4),
        ("gpu:0,shard:2K", 4),
        ("", 0),
    ],
)
def test_a_gpu_with_a_shard_in_use_is_in_use(used: str, count: int) -> None:
    assert gpus_in_use(used, 4) == count


@given(st.text())
def test_any_text_is_a_number_of_gpus_or_garbled(text: str) -> None:
    with contextlib.suppress(SlurmGarbled):
        assert parse_gpus("gpu:" + text).count >= 0


@pytest.mark.parametrize("unit", ["[", ",[", "n1,", "n[1", "n[1,2]"])
def test_a_list_s_size_takes_one_pass(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern that goes back over a megabyte takes hours."""
    monkeypatch.setattr("polluxd.slurm.notation.NodeSet", lambda *_, **__: ())
    with contextlib.suppress(SlurmGarbled):
        node_names(unit * 1_000_000)
