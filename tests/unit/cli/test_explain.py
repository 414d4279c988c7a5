"""polluxctl explain: why a job got what it got."""

from __future__ import annotations

import inspect
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from polluxd.cli import story
from polluxd.cli.story import sentences
from polluxd.model import NO_PLACEMENT, Allocation, Explanation, JobSpec, Placement, SnapshotJob
from polluxd.policy.reasons import of_pinned


def test_explain_tells_decision_measurements_sizes_and_moves(store, polluxctl):
    said = polluxctl("explain", "7")
    assert said.status == 0
    for part in (
        "Job 7 (resnet) of ada: running, holds 4 GPUs on n1.",
        "(cycle 42): grows from 2 to 4 GPUs",
        "Gradient noise scale: 256 examples.",
        "batch size 256 (submitted with 64)",
        "Moved 1 time; the moves cost 9s.",
        "What other sizes would bring",
        "a guess: measured up to 4 GPUs only",
        "n1:2",
    ):
        assert part in said.out


def test_explain_tells_what_rests_on_earlier_runs_and_of_waits_for_data(store, polluxctl):
    assert "data loader" not in polluxctl("explain", "7").out
    store.report = replace(store.report, prior_gpus=8, prior_nodes=2, data_wait=0.42)
    said = polluxctl("explain", "7").out
    assert "Earlier runs of the same training, on up to 8 GPUs, stand in for what" in said
    assert "The job waits for its data loader 42 % of the time" in said
    assert "as earlier runs measured it" in said


def test_explain_tells_what_an_agent_that_changes_nothing_would_do(store, polluxctl):
    view = store.views[0]
    advice = {"batch_size": 512, "local_batch": 64, "accumulation": 1, "goodput_ratio": 1.25}
    for mode, found, said in (
        ("observe", None, "mode observe"),
        ("advise", None, "knows no better batch size"),
        ("advise", advice, "Batches of 512 (64 per GPU and pass) would bring 25 % more goodput"),
    ):
        store.views = [replace(view, mode=mode, advice=found)]
        assert said in polluxctl("explain", "7").out
    job = json.loads(polluxctl("explain", "7", "--json").out)["job"]
    assert (job["mode"], job["advice"]) == ("advise", advice)
    store.views = [replace(view, mode="enforce")]
    assert "The agent" not in polluxctl("explain", "7").out


def test_explain_tells_what_sizes_over_several_racks_would_bring_where_that_was_measured(store, polluxctl):
    store.node_gpus = 4
    plain = json.loads(polluxctl("explain", "7", "--json").out)["sizes"]
    assert all(row["over_racks"] is None for row in plain)
    fit = store.report.params._replace(alpha_rack=1.0, beta_rack=0.1)
    store.report = replace(store.report, params=fit)
    told = json.loads(polluxctl("explain", "7", "--json").out)["sizes"]
    assert [row["goodput"] for row in told] == [row["goodput"] for row in plain]
    for row in told:
        assert (row["over_racks"] is None) == (row["nodes"] == 1)
        assert row["nodes"] == 1 or 0 < row["over_racks"] < row["goodput"]
    assert any(row["nodes"] > 1 for row in told)
    assert "over several racks" in " ".join(polluxctl("explain", "7").out.split())


def test_explain_tells_other_sizes_of_the_gpu_type_that_was_measured(store, polluxctl):
    assert ", on GPUs of type" not in polluxctl("explain", "7").out
    store.node_gpus, store.node_types = 2, ("t4", "a100")
    store.report = replace(store.report, gpu_type="a100")
    said = " ".join(polluxctl("explain", "7").out.split())  # a title is folded to its table's width
    assert "What other sizes would bring, on GPUs of type a100" in said
    told = json.loads(polluxctl("explain", "7", "--json").out)["sizes"]
    assert max(row["gpus"] for row in told) == 4, "two of the four nodes of two GPUs have that type"


def test_explain_says_why_polluxd_leaves_a_job_alone(store, polluxctl):
    store.views = [replace(store.views[0], left_alone="it is outside of the scope in polluxd.toml")]
    said = polluxctl("explain", "7").out
    assert "polluxd leaves this job alone: it is outside of the scope in polluxd.toml." in said
    assert "(cycle 42)" not in said, "an earlier decision holds no more"
    (row,) = json.loads(polluxctl("jobs", "--json").out)
    assert row["reason"] == "left alone: it is outside of the scope in polluxd.toml"


def test_explain_does_not_say_that_a_job_ended_that_polluxd_has_lost(store, polluxctl):
    store.views = [replace(store.views[0], state="GONE", ended_at=store.views[0].submitted_at + 90)]
    said = polluxctl("explain", "7").out
    assert (
        "it ended while polluxd was away, or its AdminComment had lost Pollux' mark when polluxd started."
        in said
    )
    assert "has ended" not in said


CONTENDED = Explanation(1, 3, 1.0, "contention", 6, 1950.0, 0.02, 0.05, 9, 0.97, 12.4)


def test_explain_says_why_not_more_who_has_it_and_what_a_move_costs(store, polluxctl):
    store.explanation = CONTENDED
    store.taker = Allocation(9, Placement(("n2", "n3"), 4), 1.0, 1.5, 64, False, "keeps")
    said = polluxctl("explain", "7").out
    for part in (
        "Fair share: 3 GPUs on 1 node.",
        "Limit: other jobs, to which every GPU is worth more.",
        "Next larger size: 6 GPUs, fitted goodput 1950 examples/s (+50 % against 1300).",
        "One more GPU would bring this job 40 % of what the least useful GPU in use brings to its job.",
        "Job 9 (8 GPUs, 1.50 times the goodput of its fair share) would lose least by giving up GPUs, but more than",
        "A move would cost about 12s of training. To pay for it, other GPUs must bring at least 3.1 % more.",
    ):
        assert part in said
    explained = json.loads(polluxctl("explain", "7", "--json").out)["decision"]["explanation"]
    assert explained == json.loads(json.dumps(asdict(CONTENDED)))


def test_explain_does_not_say_that_a_gain_is_a_loss(store, polluxctl):
    store.explanation = replace(CONTENDED, marginal=0.06)
    said = polluxctl("explain", "7").out
    assert "but polluxd found no exchange of whole sizes that pays." in said
    assert "more than this job would gain" not in said


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("max-gpus", "max-gpus=8."),
        ("goodput", "the job's own scaling: more GPUs would not raise its goodput."),
        ("move-cost", "the cost of a move"),
        ("exploration", "exploration: a job may take twice the GPUs on which it was measured"),
        ("progress", "its progress, which polluxd has yet to see on the GPUs that the job holds"),
        ("batch", "the job's batch limits"),
        ("nodes", "the nodes in service"),
        ("ceiling", "the GPU ceiling of its account or user."),
        ("fragmentation", "fragmentation: GPUs are free"),
        ("counts", "the numbers of GPUs that the job may be given (gpu-counts)."),
    ],
)
def test_explain_names_each_limit(store, polluxctl, limit, told):
    store.explanation = Explanation(1, 2, 2.0, limit)
    said = polluxctl("explain", "7").out
    assert f"Limit: {told}" in said
    assert "Weight: 2 times the average job's." in said
    assert "Next larger size" not in said
    assert "The job has not run yet: starting it costs nothing." in said


@pytest.mark.parametrize(
    "why", ["on hold (scontrol hold): it would not start again", "pinned by ada@head", "suspended"]
)
def test_what_keeps_a_job_where_it_is_has_its_own_words(why):
    """Pin is a word for an administrator's pin alone."""
    job = SnapshotJob(7, "", "ada", "", "", JobSpec(), 0.0, 0.0, Placement(("n1",), 4), pin_reason=why)
    placed = Allocation(7, job.placement, 0.0, 0.0, 0, False, of_pinned(job), Explanation(1, 2, 1.0, "stays"))
    assert f"Limit: {why}." in list(story.sentences(placed, (), None))
    assert f"Limit: {why}." in list(
        story.sentences(replace(placed, reason=of_pinned(replace(job, placement=NO_PLACEMENT))), (), None)
    )


def test_every_limit_of_the_model_has_words():
    text = Path(inspect.getfile(Explanation)).read_text()
    listed = re.search(r"What keeps it from more: (.+?)\." + '"""', text, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`([a-z-]+)`", listed[1])) == {*story.LIMITS, "max-gpus", "stays"}


def test_explained_sizes_come_from_the_jobs_own_fit(store, polluxctl):
    found = json.loads(polluxctl("explain", "7", "--json").out)
    by_gpus = {row["gpus"]: row for row in found["sizes"]}
    assert by_gpus[4]["relative"] == pytest.approx(1.0)
    assert by_gpus[4]["note"] == "now"
    assert by_gpus[1]["goodput"] < by_gpus[2]["goodput"] < by_gpus[4]["goodput"]
    assert max(by_gpus) == 8  # its own max-gpus
    assert found["decision"]["placement"] == "n1:4"
    assert found["moves"][0]["total_s"] == 9.0


def test_explained_sizes_are_those_of_the_clusters_nodes(store, polluxctl):
    store.node_gpus = 4
    found = json.loads(polluxctl("explain", "7", "--json").out)
    assert [(row["nodes"], row["gpus"]) for row in found["sizes"]] == [(1, 1), (1, 2), (1, 4), (2, 8)]


HELD = "Job 7 (resnet) of ada: running, holds 4 GPUs on n1"


def test_the_first_line_has_what_it_has_what_keeps_it_and_what_to_do(store, polluxctl):
    """Each row wins over those above it: the first line is of what matters most."""
    store.explanation = replace(CONTENDED, limit="max-gpus")
    view, rejected = store.views[0], "its report is 86400 s ahead"
    for changed, said in (
        (
            {},
            f"{HELD}. What keeps it from more: max-gpus=8. A larger max-gpus in its #POLLUX line allows more.",
        ),
        (
            {"move_step": "failed", "move_detail": "Permission denied: pollux-checkpoints"},
            f"{HELD}. Its last move failed: Permission denied: pollux-checkpoints.",
        ),
        ({"rejected": rejected}, f"{HELD}. polluxd cannot use its latest report: {rejected}."),
        (
            {"silent_since": time.time() - 2100},
            f"{HELD}, and has reported no training step for 35m00s. Look at its output.",
        ),
        ({"left_alone": "out of scope"}, f"{HELD}. polluxd leaves it alone: out of scope."),
        (
            {"state": "FAILED", "ended_at": view.submitted_at + 90},
            "Job 7 (resnet) of ada has ended: FAILED. `sacct",
        ),
    ):
        store.rejected = changed.pop("rejected", store.rejected)
        store.views[0] = replace(store.views[0], **changed)
        first = polluxctl("explain", "7").out.splitlines()[0]
        assert first.startswith(said), first


def test_every_limit_says_what_its_owner_can_do():
    assert {*story.LIMITS, "max-gpus"} == set(story.OWNER)


def test_explain_says_so_when_a_job_never_reported(store, polluxctl):
    store.report = None
    store.views[0] = replace(store.views[0], goodput=None, batch_size=None)
    assert "The job has not reported yet" in polluxctl("explain", "7").out


def test_explain_says_why_a_report_is_not_usable(store, polluxctl):
    store.report, store.rejected = None, "job 7: its report is 86400 s ahead: set the clock of its node"
    said = polluxctl("explain", "7").out
    assert "polluxd ignores the job's latest report" in said
    assert "set the clock of its node" in said
    assert "The job has not reported yet" not in said


def test_explain_tells_a_move_under_way_and_a_failed_one(store, polluxctl):
    store.views[0] = replace(store.views[0], move_step="draining", move_reason="shrinks for job 8")
    assert "Moving now, step draining: shrinks for job 8" in polluxctl("explain", "7").out
    store.views[0] = replace(store.views[0], move_step="failed", move_detail="node n3 went down")
    assert "The last move failed: node n3 went down" in polluxctl("explain", "7").out


def test_jobs_that_hold_gpus_without_a_training_step_are_named_in_status_and_explain(store, polluxctl):
    view = store.views[0]
    for seconds in (None, 200):  # it trains; it has just begun
        store.views[0] = replace(view, silent_since=seconds and time.time() - seconds)
        assert "silent jobs      none" in polluxctl("status").out
        assert "without a training step" not in polluxctl("explain", "7").out
    store.views[0] = replace(view, silent_since=time.time() - 2100)
    said = polluxctl("status").out
    assert "silent jobs      1 job on 4 GPUs without a training step: 7 (resnet, ada: 4 GPUs for 35m" in said
    (job,) = json.loads(polluxctl("status", "--json").out)["silent"]
    assert (job["job_id"], job["gpus"], round(job["silent_s"], -2)) == (7, 4, 2100)
    told = polluxctl("explain", "7").out
    assert "It has held 4 GPUs for 35m" in told
    assert "`scontrol requeue 7` starts the job again on min-gpus" in told


def test_doubted_reports_are_named_in_status(store, polluxctl):
    assert "doubted reports  none" in polluxctl("status").out
    doubts = ("explored_gpus=9: the job has held 4 at most",)
    store.explanation = replace(CONTENDED, doubts=doubts)
    store.taker = Allocation(7, Placement(("n1",), 4), 1.0, 1.0, 64, False, "", store.explanation)
    said = polluxctl("status").out
    assert f"doubted reports  of 1 job: 7 ({store.views[0].name}, {store.views[0].user})" in said
    (job,) = json.loads(polluxctl("status", "--json").out)["doubted"]
    assert (job["job_id"], job["claims"]) == (7, list(doubts))


def test_explain_of_an_unknown_job_is_one_line_and_status_1(store, polluxctl):
    said = polluxctl("explain", "99")
    assert said.status == 1
    assert said.out == ""
    assert said.err.startswith("polluxctl: job 99 is not known to polluxd")
    assert said.err.count("\n") == 1


def placed(gpus, **told):
    place = Placement(("a",), gpus) if gpus else Placement()
    return Allocation(
        7, place, 100.0, 1.0, 64, True, "starts", Explanation(1, 4, 1.0, "contention", 8, **told)
    )


def test_what_the_next_gpus_bring():
    said = list(sentences(placed(4, gpu_price=0.75, marginal=0.5), [], None))
    assert said[2:] == [
        "Next larger size: 8 GPUs, fitted goodput 0 examples/s (-100 % against 100).",
        "The job has not run yet: starting it costs nothing.",
    ]


def test_the_readme_shows_what_explain_prints():
    told = Explanation(
        1, 4, 1.0, "contention", 8, 2240.0, 0.11, 0.19, 1235, move_factor=0.98, move_seconds=9.0
    )
    job = Allocation(1234, Placement(("n1",), 4), 1310.0, 1.1, 512, False, "", told)
    other = Allocation(1235, Placement(("n2", "n3"), 4), 3000.0, 1.4, 512, False, "")
    readme = " ".join((Path(__file__).parents[3] / "README.md").read_text().split())
    for sentence in sentences(job, [job, other], 16):
        assert sentence in readme
