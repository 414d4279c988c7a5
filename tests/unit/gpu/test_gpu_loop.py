"""`make gpu-loop`: what a step's ranks are shown, what a run must have shown, and what its page says."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from contrib.gpu.__main__ import sharing
from contrib.gpu.loop import ONE_GPU, kind, missing
from contrib.gpu.page import page

MOVES = [("resize", "n1:2", "n1:2,n2:2"), ("resize", "n1:2,n2:2", "n1:2"), ("requeue", "n1:1", "n2:2")]


def figures(device: str = "CPU", nccl: str = "") -> dict[str, Any]:
    machine = dict.fromkeys(("cores", "load"), 2) | dict.fromkeys(("torch", "python", "at", "commit"), "1")
    sharded = {
        "fsdp2": True,
        "kill_pause_s": 2.0,
        "optimizer_steps": 9,
        "wanted_steps": 9,
        "difference": 2e-7,
    }
    job = {"name": "images", "gpus": [[0, 2], [5, 4]], "batch_size": [[0, 32]], "jct_s": 9.0, "accuracy": 0.9}
    moves = [{"path": path, "from": a, "to": b, "total_s": 3.0} for path, a, b in MOVES]
    row = {"plain_step_s": 0.003, "variant": "fixed", "overhead": 0.02, "overhead_ci_low": 0.01}
    return {
        "machine": {**machine, "device": device, "nccl": nccl, "over": "gloo"},
        "took_s": 400,
        "loop": {"cluster_up_s": 3.0, "jobs": [job], "moves": moves, "results": {"sharded": sharded}},
        "accuracy": {
            "fixed": {"batch_size": 32, "curve": [[10.0, 0.5], [20.0, 0.9]]},
            "adapted": {"batch_size": 128, "curve": [[4.0, 0.4], [8.0, 0.8], [12.0, 0.85]]},
        },
        "noise": [{"measured": 22.0, "direct": 21.0, "standard_error": 0.03}],
        "cost": [{**row, "overhead_ci_high": 0.03, "rounds": 4}],
    }


@pytest.mark.parametrize(
    ("given", "shown"),
    [("0", "0"), ("1", "0"), ("0,1", "0,0"), ("GPU-5e-1,GPU-5e-2,MIG-3", "0,0,0"), ("", None)],
)
def test_each_stand_in_is_the_one_gpu(given: str, shown: str | None, tmp_path: Path) -> None:
    prolog = tmp_path / "prolog"
    prolog.write_text(ONE_GPU)
    done = subprocess.run(
        ["bash", prolog], env={"CUDA_VISIBLE_DEVICES": given}, capture_output=True, text=True, check=True
    )
    assert done.stdout == (f"export CUDA_VISIBLE_DEVICES={shown}\n" if shown else "")


def test_ranks_share_a_gpu_over_gloo_before_nccl_can() -> None:
    assert [sharing(release) for release in ((), (2, 28, 9), (2, 30, 1))] == [
        {},
        {"POLLUX_BACKEND": "gloo"},
        {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},
    ]


def test_a_run_that_did_not_show_all_is_none() -> None:
    loop = figures()["loop"]
    assert [kind(move) for move in loop["moves"]] == [
        "grown, in place",
        "shrunk, in place",
        "grown, through the queue",
    ]
    assert missing(loop) == []
    without = [
        missing({**loop, "moves": [m for m in loop["moves"] if m != left_out]}) for left_out in loop["moves"]
    ]
    assert without == [
        [],
        ["no training was moved so: shrunk"],
        ["no training was moved so: through the queue"],
    ]
    assert kind({"path": "requeue", "from": "n1:2", "to": "n2:2"}) == "moved, through the queue"
    loop["results"]["sharded"] |= {"kill_pause_s": None, "optimizer_steps": 8}
    assert [fault.partition(":")[0] for fault in missing(loop)] == [
        "no rank was killed",
        "`sharded` made other steps than it was to make",
    ]


def test_the_page_says_whether_a_gpu_was_used() -> None:
    cpu, gpu = page(figures()), page(figures("H100", "2.28.9"))
    assert ("No GPU was used" in cpu, "No GPU was used" in gpu) == (True, False)
    assert "H100, 2 cores, torch 1, NCCL 2.28.9" in gpu
    for text in (cpu, gpu):
        assert "(0.833 on held-out images" in text
        assert "20 s with the batch fixed at 32, 12 s adapted" in text
        assert "| grown, through the queue | 1 | 3.0 | 3.0 |" in text
        assert "by 2e-07 of their norm" in text
