"""The selftest finds the faults that it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pollux.selftest import checks, on_ranks
from pollux.selftest.checks import CHECKS, Check, CheckFailed, Machine, carry_out, finish, of_gpus
from pollux.selftest.on_ranks import STEPS, TOLERANCE, error_of, judged, train

CPU = Machine("CPU")


@pytest.mark.slow
def test_checks_of_several_ranks_pass_on_a_cpu(tmp_path: Path) -> None:
    names = ["process groups", "resize in place", "rank killed", "AMP overflow"]
    found = tmp_path / "found.json"
    assert checks.main(["--cpu", "--json", str(found), "--only", *names]) == 0
    document = json.loads(found.read_text())
    assert [(line["check"], line["outcome"]) for line in document["checks"]] == [(n, "passed") for n in names]
    assert document["backend"] == "gloo"


@pytest.mark.parametrize("made", [-1, 1])
def test_a_step_too_few_or_too_many_shows_in_the_weights(
    made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = train(STEPS)
    assert error_of(job.module, STEPS, job.device) < TOLERANCE / 100
    assert error_of(job.module, STEPS + made, job.device) > 2 * TOLERANCE
    judged(job, STEPS, tmp_path)
    with pytest.raises(RuntimeError, match=f"expected {STEPS + made} optimizer steps, got {STEPS}"):
        judged(job, STEPS + made, tmp_path)
    monkeypatch.setattr(
        "pollux.selftest.on_ranks.error_of", lambda m, n, device: error_of(m, n + made, device)
    )
    with pytest.raises(RuntimeError, match="differ from plain torch's by"):
        judged(job, STEPS, tmp_path)


def test_a_check_whose_rank_fails_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Check("broken", checks.on_all("no such check"), "mend it")
    assert checks.main(["--cpu"], [broken]) == 1
    printed = capsys.readouterr().out
    assert "broken failed: `pollux run` ended with status 1" in printed
    assert "remedy: mend it" in printed
    assert "0 of 1 checks passed" in printed


def test_no_kill_and_no_move_are_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(steps: int, **_: Any) -> Any:
        return train(1)

    monkeypatch.setattr(on_ranks, "train", trained)
    with pytest.raises(RuntimeError, match="no rank was killed"):
        on_ranks.restart(tmp_path)
    with pytest.raises(RuntimeError, match="two moves"):
        on_ranks.resize(tmp_path)


def test_its_help_needs_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from pollux.selftest.checks import main; main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "a few minutes" in done.stdout


def test_one_gpu_is_shared_where_nccl_allows_it() -> None:
    old, new = (of_gpus("H200", ("0",), release) for release in ((2, 29, 7), (2, 30, 1)))
    assert (old.shared_gpus, new.shared_gpus) == ((), ("0",))
    assert old.note != new.note


def test_fully_shard_is_left_out_with_an_early_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion("2.6.0"))
    check = next(c for c in CHECKS if c.name == "FSDP2")
    assert carry_out(check, CPU, tmp_path / "c")["outcome"] == "left out"


def test_several_gpus_have_one_rank_each() -> None:
    machine = of_gpus("A100", tuple("01234"), (2, 20, 5))
    assert (machine.ranks, machine.shared_gpus) == (4, tuple("0123"))


def test_a_rank_that_writes_nothing_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("nothing found\n")
    with pytest.raises(CheckFailed, match="rank 0 wrote no figures: nothing found"):
        finish([], tmp_path)
