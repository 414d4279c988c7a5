"""Sites drawn from seeds, and the comparison of a run beside polluxd with one without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from contrib.sites.control import TOLERANCE_S, Run, compare, never_runs
from contrib.sites.generated import DrawnJob, draw
from contrib.sites.idle import Measured, Seen, Wish
from contrib.sites.page import read_rows, with_row

NO_CAUSE = "waits for GPUs; it needs at least 1 GPU, but every GPU is worth more elsewhere"


def test_a_seed_draws_one_site_and_many_seeds_many_kinds() -> None:
    drawn = [draw(seed) for seed in range(60)]
    assert drawn == [draw(seed) for seed in range(60)]
    lines = {line for site in drawn for line in site.site.lines}
    assert {"PreemptType=preempt/qos", "TopologyPlugin=topology/tree", "DefMemPerGPU=500"} <= lines
    assert {"a100+t4", "t4"} <= {kind for site in drawn for kind in site.site.gpu_types.values()}
    options = " ".join(line for site in drawn for job in site.jobs for line in (job.head, *job.lines))
    for option in ("--exclusive", "--qos=urgent", "--array", "--nodes=2", "--partition=extra", "POLLUX"):
        assert option in options
    assert len({act.kind for site in drawn for act in site.acts}) == 16
    assert any(site.site.cloud for site in drawn)
    assert any("job_submit.lua" in site.site.files for site in drawn)
    assert any(job.trains for site in drawn for job in site.jobs)


def runs(wait: float, **more: object) -> Run:
    known = {"waits": {"j0": wait}, "ends": {"j0": "COMPLETED"}, **more}
    return Run(Measured(), **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("beside", "wrong"),
    [
        (runs(3.0), ""),
        (runs(TOLERANCE_S), ""),
        (runs(90.0), "waited 88 s longer"),
        (runs(90.0, reasons={"j0": "partition main is DOWN"}, idle_s={"j0": 80.0}), ""),
        (runs(90.0, reasons={"j0": NO_CAUSE}), ""),
        (runs(90.0, reasons={"j0": NO_CAUSE}, idle_s={"j0": 80.0}), "80 s of them beside idle GPUs"),
        (runs(3.0, ends={"j0": "CANCELLED"}), "CANCELLED, without polluxd COMPLETED"),
        (runs(3.0, ends={"j0": "refused"}, reasons={"j0": "#POLLUX: --time-min cannot be used"}), ""),
        (runs(3.0, ends={"j0": "refused"}, reasons={"j0": "Invalid account"}), "refused, without"),
        (runs(3.0, ends={}), "None, without polluxd COMPLETED"),
    ],
)
def test_a_job_that_is_lost_or_waits_longer_without_a_reason_is_found(beside: Run, wrong: str) -> None:
    job = DrawnJob("j0", 0.0, "SBATCH --gres=gpu:1", ("POLLUX min-gpus=1",), 5, Wish(1))
    found = compare(replace(draw(1), jobs=(job,)), runs(2.0), beside)
    assert (wrong in found[0]) if wrong else found == []


@pytest.mark.parametrize(("waits", "excused"), [({}, True), ({"j0": 200.0}, False)])
def test_the_watch_is_excused_where_slurm_starts_the_job_without_polluxd_neither(
    waits: dict[str, float], excused: bool
) -> None:
    beside, note = runs(3.0, ids={"j0": 7}), "idle since 10:00: 4 GPUs that job 7 may use, while it waits"
    assert never_runs(note, Run(Measured(), waits=waits), beside) is excused
    assert not never_runs(note.replace("job 7", "job 8"), Run(Measured()), beside)
    assert not never_runs(f"{note}, and 1 more jobs wait so", Run(Measured()), beside)


def test_idle_seconds_and_first_starts_are_those_of_the_job() -> None:
    measured = Measured({7: Wish(2), 8: Wish(4)})
    measured.note([Seen(7, "PENDING", 2), Seen(8, "PENDING", 4)], {"n1": 3}, 2.0)
    assert measured.idle_s == {7: 2.0}
    assert measured.first_runs == {}
    measured.note([Seen(7, "RUNNING", 2), Seen(8, "PENDING", 4)], {"n1": 1}, 2.0)
    assert set(measured.first_runs) == {7}
    assert measured.idle_s == {7: 2.0}


def test_a_replay_replaces_its_row_of_the_page() -> None:
    row = {"seed": 12, "slurm": "22.05.8", "result": "failed", "what_the_user_saw": "j1 | lost"}
    page = with_row("", row, "aaaa")
    page = with_row(
        page, {**row, "seed": 2, "idle_gpu_s_beside_waiting": 7.6, "idle_gpu_s_in_control": 2.0}, "b"
    )
    page = with_row(page, {**row, "result": "ok"}, "cccc")
    assert list(read_rows(page).items()) == [
        (("22.05.8", 2), ("failed: j1 / lost", "8", "2", "0", "b")),
        (("22.05.8", 12), ("ok", "0", "0", "0", "cccc")),
    ]
    assert "1 of 2 plays are ok. In all, 8 GPU-seconds" in page
