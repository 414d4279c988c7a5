"""The selftest finds the faults that it looks for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pollux.selftest import checks, command, known_training
from pollux.selftest.checks import CHECKS, Check, carry_out
from pollux.selftest.launching import STEPS, TOLERANCE, CheckFailed, finish
from pollux.selftest.machine import SHARED_GPU, Machine, of_gpus

CPU = Machine("CPU", (), (), 2)


@pytest.mark.slow
def test_checks_of_several_ranks_pass_on_a_cpu(tmp_path: Path) -> None:
    names = ["process groups", "resize in place", "rank killed", "AMP overflow", "out of memory"]
    found = tmp_path / "found.json"
    assert command.main(["--cpu", "--json", str(found), "--only", *names]) == 0
    document = json.loads(found.read_text())
    assert [(line["check"], line["outcome"]) for line in document["checks"]] == [(n, "passed") for n in names]
    assert document["backend"] == "gloo"


@pytest.mark.parametrize("made", [-1, 1])
def test_a_step_too_few_or_too_many_shows_in_the_weights(made: int) -> None:
    job = known_training.train(STEPS, torch.device("cpu"))
    assert known_training.error_of(job.module, STEPS, job.device) < TOLERANCE / 100
    assert known_training.error_of(job.module, STEPS + made, job.device) > 2 * TOLERANCE


@pytest.mark.slow
def test_ranks_that_end_with_an_error_fail_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(machine: Machine, folder: Path) -> Any:
        return checks.run(machine, "no such check", folder, 2)

    given = (Check("broken", broken, "mend it"), CHECKS[6])
    assert command.main(["--cpu", "--json", str(tmp_path / "found.json")], given) == 1
    printed = capsys.readouterr().out
    assert "broken failed: `pollux run` ended with status 1" in printed
    assert "remedy: mend it" in printed
    assert "1 of 2 checks passed" in printed


def facts(**more: Any) -> dict[str, Any]:
    return {"rank": 0, "ranks": 2, "steps": 24, "error": 1e-7} | more


@pytest.mark.parametrize(
    ("check", "found", "trouble"),
    [
        ("process groups", facts(all_reduce_gib_s=1.0, error=0.01), "differ from plain torch's by 1.0e-02"),
        ("process groups", facts(all_reduce_gib_s=1.0, ranks=1), "expected 2 ranks at the end, got 1"),
        ("resize in place", facts(pauses={"2 to 1 ranks": 0.1}), "lived through both moves"),
        ("rank killed", facts(), "no rank was killed"),
        ("AMP overflow", facts(steps=23, scale=1024.0), "expected a loss scale of 512"),
        ("out of memory", facts(passes=1), "passes of half a batch"),
        ("noise scale", facts(phi=40.0, direct=30.0, standard_error=0.03), "expected a noise scale of 30.0"),
        ("adapted batch", facts(largest_batch=32, accuracy=0.9), "the batch size never grew"),
    ],
)
def test_what_ranks_found_is_judged(
    check: str, found: dict[str, Any], trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(machine: Machine, name: str, folder: Path, *args: Any, **options: Any) -> list[dict[str, Any]]:
        (folder / "output").touch()
        return [found]

    monkeypatch.setattr(checks, "run", run)
    monkeypatch.setattr(checks, "run_resized", lambda machine, folder: run(machine, "", folder))
    result = carry_out(next(c for c in CHECKS if c.name == check), CPU, tmp_path / "check")
    assert result.outcome == "failed"
    assert trouble in result.trouble
    assert result.remedy


def test_its_help_needs_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from pollux.selftest.command import main; main(['--help'])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "under five minutes" in done.stdout


def test_one_gpu_is_shared_where_nccl_allows_it() -> None:
    old, new = (of_gpus("H200", ("0",), release) for release in ((2, 29, 7), (2, 30, 1)))
    assert (old.shared_device, old.backend, old.environment) == ("cpu", "gloo", {})
    assert (new.shared_device, new.backend, new.environment) == ("cuda", "nccl", {SHARED_GPU: "1"})
    assert all(machine.notes for machine in (old, new))


def test_fully_shard_is_left_out_with_an_early_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", torch.torch_version.TorchVersion("2.6.0"))
    assert carry_out(next(c for c in CHECKS if c.name == "FSDP2"), CPU, tmp_path / "c").outcome == "left out"


def test_several_gpus_have_one_rank_each() -> None:
    machine = of_gpus("A100", tuple("01234"), (2, 20, 5))
    assert (machine.ranks, machine.shared_gpus, machine.environment) == (4, tuple("0123"), {})


def test_a_rank_that_writes_nothing_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("nothing found\n")
    with pytest.raises(CheckFailed, match="no rank wrote what it found: nothing found"):
        finish([], tmp_path)
