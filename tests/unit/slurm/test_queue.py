"""Read squeue: records of three versions, and hostile names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polluxd.errors import SlurmGarbled
from polluxd.model import JobSpec, JobState
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.queue import Known, Queue, jobs_query, parse_jobs
from tests.unit.slurm.squeue_stand_in import PENDING, RUNNING, squeue
from tests.unit.slurm.squeue_stand_in import queue as read


def one(job: dict[str, str], **other: str) -> SlurmJob:
    queue = read(job | {key.replace("_", "-"): value for key, value in other.items()})
    assert not queue.unreadable
    return queue.jobs[0]


def test_a_running_job() -> None:
    job = one(RUNNING)
    assert (job.job_id, job.user, job.uid, job.account, job.qos) == (7, "alice", 1000, "vision", "normal")
    assert (job.state, job.restart_count, job.reason) == (JobState.RUNNING, 1, "None")
    assert (job.nodes, job.batch_host) == (("n3", "n4"), "n3")
    assert job.gpus_per_node_held == {"n3": 4, "n4": 4}
    assert job.cpus_per_node_held == {"n3": 2, "n4": 2}
    assert job.time_limit_s == 86400 + 2 * 3600 + 3 * 60 + 4
    assert job.submit_time == 1795271000, "Slurm's own moves on with each requeue"
    assert (job.start_time, job.end_time) == (1795271833, None)
    assert job.spec == JobSpec(min_gpus=1, max_gpus=8, cpus_per_gpu=2)


def test_a_deadline_and_a_hold_of_a_running_job() -> None:
    assert one(RUNNING).deadline is None
    assert one(RUNNING, Deadline="1795460526").deadline == 1795460526
    assert not one(RUNNING).held_by_user
    assert one(RUNNING, PriorityLong="0").held_by_user


def test_a_pending_job() -> None:
    job = one(PENDING)
    assert job.state is JobState.PENDING
    assert (job.nodes, dict(job.gpus_per_node_held), job.batch_host) == ((), {}, "")
    assert (job.start_time, job.eligible_time) == (None, 1795271833)
    assert not job.held_by_user
    assert one(PENDING, PriorityLong="0").held_by_user
    assert one(PENDING, Dependency="afterok:3(unfulfilled)").dependent
    assert one(PENDING, EligibleTime="N/A").eligible_time is None


@pytest.mark.parametrize(
    ("words", "megabytes"),
    [
        ({}, 1000),
        ({"tres-alloc": "cpu=4,mem=1.50G,node=2"}, 192),
        ({"tres-alloc": "cpu=4,node=2"}, 0),
        ({"tres-per-node": "N/A", "tres-per-job": "gres:gpu:5"}, 1600),
        ({"tres-per-node": "N/A", "tres-per-task": "gres:gpu:2"}, 2000),
        ({"tres-per-node": "N/A"}, 0),
    ],
)
def test_memory_goes_with_each_gpu(words: dict[str, str], megabytes: int) -> None:
    assert one(RUNNING, **words).mem_per_gpu_mb == megabytes


def test_a_job_that_slurm_could_start_nowhere_is_not_held_by_its_user() -> None:
    assert not one(PENDING, PriorityLong="0", Reason="BadConstraints").held_by_user


@pytest.mark.parametrize(
    ("request_", "types"),
    [
        ({"tres-per-node": "gres:gpu:a100:2"}, {"a100"}),
        ({"tres-per-node": "N/A", "tres-per-job": "gres:gpu:2080ti:2"}, {"2080ti"}),
        ({"tres-per-node": "gres:gpu:2"}, set()),
        ({"tres-per-node": "gres:gpu:a100:1,gres:gpu:t4:1"}, set()),
        ({"tres-per-node": "N/A"}, set()),
    ],
)
def test_the_gpu_type_that_a_plain_job_asks_for(request_: dict[str, str], types: set[str]) -> None:
    (job,) = read(PENDING | {"admin_comment": "", **request_}).jobs
    assert job.demands.gpu_types == types


OTHER_VERSIONS = {
    "24.11.5": {"tres-per-node": "gres/gpu:3", "tres-per-task": "cpu=2", "PriorityLong": "1"},
    "26.05.5": {"tres-per-node": "gres/gpu:a100:3", "tres-per-task": "cpu=2", "EndTime": "NONE"},
}
"""In what they differ from 22.05, as recorded."""


@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_later_versions(version: str) -> None:
    job = one(RUNNING | OTHER_VERSIONS[version])
    assert (job.gpus_per_node_held, job.requested_gpus_per_node) == ({"n3": 3, "n4": 3}, 3)
    assert one(RUNNING | OTHER_VERSIONS[version] | {"admin_comment": "(null)"}).spec is None


def test_gpus_asked_for_by_job_or_task() -> None:
    by_job = RUNNING | {"tres-per-node": "N/A", "tres-per-job": "gres:gpu:3"}
    on_one = {"NodeList": "n3", "NumNodes": "1"}
    assert one(by_job | on_one).gpus_per_node_held == {"n3": 3}
    by_task = RUNNING | {"tres-per-node": "N/A", "tres-per-task": "gres:gpu:2"}
    assert one(by_task | on_one).gpus_per_node_held == {"n3": 4}, "two tasks"
    for scattered in (by_job, by_task):
        queue = read(scattered)
        assert (dict(queue.jobs[0].gpus_per_node_held), queue.scattered) == ({}, {7})


def test_a_completing_job_holds_its_gpus_until_its_nodes_are_rid_of_it() -> None:
    leaving = RUNNING | {"State": "COMPLETING", "NodeList": "n4"}
    assert one(leaving).gpus_per_node_held == {"n4": 4}
    foreign = leaving | {"admin_comment": "", "tres-per-node": "N/A", "tres-per-job": "gres:gpu:5"}
    assert read(foreign).leaving == {7: 5}


@pytest.mark.parametrize(
    ("word", "state"),
    [
        ("CONFIGURING", JobState.RUNNING),
        ("TIMEOUT", JobState.FAILED),
        ("NODE_FAIL", JobState.FAILED),
        ("CANCELLED", JobState.CANCELLED),
        ("SUSPENDED", JobState.SUSPENDED),
        ("SPECIAL_EXIT", JobState.PENDING),
        ("A_STATE_OF_TOMORROW", JobState.COMPLETING),
    ],
)
def test_states(word: str, state: JobState) -> None:
    job = one(RUNNING, State=word)
    assert (job.state, job.raw_state) == (state, word)
    assert bool(job.gpus_per_node_held) is (not state.finished and state is not JobState.PENDING)


@pytest.mark.parametrize("limit", ["UNLIMITED", "NOT_SET", "N/A"])
def test_no_time_limit(limit: str) -> None:
    assert one(RUNNING, TimeLimit=limit).time_limit_s is None
    assert one(RUNNING, TimeLimit="0:30").time_limit_s == 30
    assert one(RUNNING, TimeLimit="30:00").time_limit_s == 1800


@pytest.mark.parametrize("comment", ["hello", "(null)", ""])
def test_other_comments_are_no_opt_in(comment: str) -> None:
    job = one(RUNNING | {"admin_comment": comment})
    assert (job.spec, job.submit_time) == (None, 1795271832)


@pytest.mark.parametrize("comment", ["pollux:v9 min-gpus=1", "pollux:v1 min-gpus=none"])
def test_a_comment_with_the_mark_that_makes_no_sense_is_named(comment: str) -> None:
    queue = read(RUNNING | {"admin_comment": comment})
    assert queue.jobs[0].spec is None
    assert "AdminComment" in queue.unreadable["job 7"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("JobID", "seven"),
        ("UserID", "alice"),
        ("RestartCnt", "-1"),
        ("StartTime", "2026-11-21T14:37:13"),
        ("TimeLimit", "soon"),
        ("NodeList", "n[3-"),
        ("NodeList", "n[1-10000000000]"),
        ("NumCPUs", ""),
        ("tres-per-node", "gres:gpu:-4"),
        ("tres-per-node", "gpu:a:b:c"),
    ],
)
def test_a_record_that_makes_no_sense_costs_that_record_alone(field: str, value: str) -> None:
    others = [RUNNING | {"JobID": "8"}, RUNNING | {"JobID": "9"}]
    queue = read(others[0], RUNNING | {field: value}, others[1])
    assert [job.job_id for job in queue.jobs] == [8, 9]
    ((about, why),) = queue.unreadable.items()
    assert about == f"job {value if field == 'JobID' else 7}"
    assert why


def test_no_jobs_and_an_answer_that_is_cut_off() -> None:
    query = jobs_query()
    assert parse_jobs("", query) == Queue(())
    text = squeue([RUNNING, RUNNING | {"JobID": "8"}], query.format)
    for cut in (text[:-1], text[:200], "slurm_load_jobs error: something\n"):
        with pytest.raises(SlurmGarbled, match="cut off"):
            parse_jobs(cut, query)


@given(name=st.text(), other=st.text())
def test_whatever_a_name_holds_it_names_its_own_job(name: str, other: str) -> None:
    queue = read(RUNNING | {"Name": name}, RUNNING | {"JobID": "8", "Name": other})
    assert [(job.job_id, job.name) for job in queue.jobs] == [(7, name[:64]), (8, other[:64])]


def test_a_name_that_looks_like_a_record_is_a_name() -> None:
    guess = jobs_query()
    assert guess.separator != jobs_query().separator
    name = f"x{guess.separator}{guess.end}\n9{guess.separator}forged{guess.separator}{guess.end}\nJobId=9 UserId=0"
    (job,) = read(RUNNING | {"Name": name}).jobs
    assert (job.job_id, job.uid, job.name) == (7, 1000, name[:64])


def test_a_name_of_1024_letters_is_short_in_each_task_s_row() -> None:
    task = PENDING | {"Name": "é" * 1024, "ArrayJobID": "2"}
    for each in read(task | {"JobID": "6", "ArrayTaskID": "3"}, RUNNING | {"Name": "é" * 1024}).jobs:
        assert each.name.startswith("é" * 64)
        assert len(each.name) <= 64 + len(" 2_3")


def test_tasks_of_an_array_that_wait_in_one_record_are_one_job() -> None:
    task = PENDING | {"JobID": "2", "ArrayJobID": "2"}
    split = task | {"JobID": "6", "ArrayTaskID": "3"}
    queue = read(task | {"ArrayTaskID": "5"}, task | {"ArrayTaskID": "2"}, split)
    assert not queue.unreadable
    together, alone = queue.jobs
    assert (together.job_id, together.tasks) == (2, (2, 5))
    assert (alone.job_id, alone.array, alone.tasks) == (6, (2, 3), ())
    assert one(PENDING).array is None


def test_an_array_task_of_more_digits_than_slurm_has_costs_its_record_alone() -> None:
    long = RUNNING | {"State": "PENDING", "JobID": "5", "ArrayTaskID": "9" * 5000}
    nonsense = RUNNING | {"State": "PENDING", "JobID": "x", "ArrayTaskID": "1"}
    queue = read(long, nonsense, nonsense, RUNNING)
    assert RUNNING["JobID"] in {str(job.job_id) for job in queue.jobs}
    assert "job x" in queue.unreadable


def test_a_record_that_stays_the_same_is_not_read_again_and_any_other_is() -> None:
    def again(known: Queue, *jobs: dict[str, str]) -> Queue:
        query = jobs_query()
        return parse_jobs(squeue(jobs, query.format), query, Known("<own>", known.records))

    first = again(Queue(()), RUNNING, PENDING | {"JobID": "8"})
    reused = PENDING | {"JobID": "8", "UserName": "bob", "UserID": "1001"}
    second = again(first, RUNNING, reused)
    assert second.jobs[0] is first.jobs[0]
    assert (second.jobs[1].user, second.jobs[1].uid) == ("bob", 1001), "Slurm uses ids again"
    assert second.jobs == again(Queue(()), RUNNING, reused).jobs
    assert len(second.records) == 2, "what Slurm no longer shows is forgotten"


def test_the_tasks_of_a_record_known_are_told_anew() -> None:
    query, task = jobs_query(), PENDING | {"JobID": "2", "ArrayJobID": "2"}
    tasks = [task | {"ArrayTaskID": number} for number in "579"]
    word = query.separator
    first = parse_jobs(squeue(tasks, query.format), query)
    second = parse_jobs(squeue(tasks[1:], query.format), query, Known(word, first.records))
    alone = parse_jobs(squeue(tasks[2:], query.format), query, Known(word, second.records))
    assert [queue.jobs[0].tasks for queue in (first, second, alone)] == [(5, 7, 9), (7, 9), ()]
    assert alone.jobs[0].array == (2, 9)


def test_of_the_jobs_that_a_job_waits_for_one_letter_is_asked() -> None:
    assert ",Dependency:1<" in jobs_query().format
    (waits,) = read(PENDING | {"Dependency": "afterok:5(unfulfilled)," * 10_000}).jobs
    (free,) = read(PENDING).jobs
    (empty,) = read(PENDING | {"Dependency": ""}).jobs
    assert (waits.dependent, free.dependent, empty.dependent) == (True, False, False)


@pytest.mark.parametrize(("state", "lost"), [("PENDING", False), ("CANCELLED", False), ("RUNNING", True)])
def test_a_record_that_holds_nothing_hides_no_gpus(state: str, lost: bool) -> None:
    queue = read(PENDING | {"JobID": "5", "State": state, "TimeLimit": "zz"})
    assert list(queue.unreadable) == ["job 5"]
    assert queue.lost is lost
