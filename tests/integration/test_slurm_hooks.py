"""The hooks on a real Slurm.

The tests read sbatch's messages and the job's environment, and try the changes that users may make.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from math import floor

import pytest

from contrib.devcluster import DevCluster, DevClusterError
from contrib.devcluster.processes import wait_until
from polluxd.apply.waiting_jobs import WaitingJobs
from polluxd.model import JobSpec, JobState
from tests.integration.slurm_jobs import PATIENCE_S, SlurmJobs

pytestmark = pytest.mark.slurm

LOOP = "while :; do sleep 0.1; done"


@pytest.fixture
def site(jobs: SlurmJobs) -> Iterator[SlurmJobs]:
    yield jobs
    jobs.cluster.hooks.write_submit_hook()


def script(*directives: str, body: str = "true") -> str:
    return "\n".join(("#!/bin/bash", "#SBATCH --gres=gpu:1", *directives, body, ""))


def test_a_wrong_directive_is_refused_and_the_user_is_told_why(site: SlurmJobs) -> None:
    done = site.sbatch(script("#POLLUX min-gpu=2"))
    assert done.returncode != 0
    allowed = "min-gpus, max-gpus, gpu-counts, gpu-types, adaptive, preemptible, prior, mode, resize, continue, search"
    message = f"#POLLUX line 3: unknown key 'min-gpu', did you mean min-gpus? (allowed: {allowed})"
    assert message in done.stderr


def test_min_gpus_above_the_cluster_is_refused(site: SlurmJobs) -> None:
    heartbeat = site.cluster.hooks.heartbeat_file
    heartbeat.write_text(f"{time.time():.0f}\n16\n")
    site.cluster.hooks.write_submit_hook(heartbeat_file=str(heartbeat))
    done = site.sbatch(script("#POLLUX min-gpus=17"))
    assert done.returncode != 0
    assert "min-gpus=17 is above the 16 GPUs of this cluster" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--time-min=1",), "--time-min"),
        (("--no-requeue",), "--no-requeue"),
        (("--gres=none", "--gpus-per-task=1", "--ntasks=2"), "--gpus-per-task"),
        (("--gres=none", "--gpus=2", "--ntasks-per-gpu=1"), "--ntasks-per-gpu"),
    ],
)
def test_options_that_no_move_can_keep_are_refused(
    site: SlurmJobs, options: tuple[str, ...], said: str
) -> None:
    done = site.sbatch(script("#POLLUX"), *options)
    assert done.returncode != 0
    assert said in done.stderr
    assert "#POLLUX" in done.stderr


def test_a_heterogeneous_job_is_refused(site: SlurmJobs) -> None:
    path = site.folder / "het.sh"
    path.write_text(script("#POLLUX"))
    done = site.run("sbatch", "--ntasks=1", ":", "--ntasks=1", str(path))
    assert done.returncode != 0
    assert "heterogeneous" in done.stderr


def test_the_same_options_are_fine_without_directives(site: SlurmJobs) -> None:
    job_id = site.submit(script(body="env"), "--exclude=n1", "--no-requeue", "--exclusive")
    job = site.wait(job_id, JobState.COMPLETED)
    assert job.spec is None
    assert job.admin_comment in ("", "(null)")
    assert "POLLUX" not in site.output(job_id)


def test_a_foreign_jobs_sizes_stay_as_slurm_set_them(site: SlurmJobs) -> None:
    # Without a --gres line: from Slurm 26.05 on the two ways to ask for GPUs exclude each other.
    job_id = site.submit(
        "#!/bin/bash\nenv\n", "--nodes=2", "--ntasks=4", "--cpus-per-task=2", "--gpus-per-node=1"
    )
    site.wait(job_id, JobState.COMPLETED)
    lines = site.output(job_id).splitlines()
    assert {"SLURM_NTASKS=4", "SLURM_CPUS_PER_TASK=2", "SLURM_GPUS_PER_NODE=1"} <= set(lines)


def test_the_job_is_marked_kept_back_and_made_requeueable(site: SlurmJobs) -> None:
    before = floor(time.time())
    job_id = site.submit(
        script("#POLLUX min-gpus=2 max-gpus=8", "#POLLUX adaptive=no"),
        "--cpus-per-task=6",
        "--gres=gpu:2",
        "--mem=500",
    )
    after = time.time()
    job = site.job(job_id)
    assert job.spec == JobSpec(2, 8, adaptive=False, cpus_per_gpu=3, mem_per_gpu_mb=250, own_size=2)
    assert job.state is JobState.PENDING
    assert before + 60 <= (job.eligible_time or 0.0) <= after + 60
    assert " Requeue=1 " in site.shown(job_id)


def test_an_unrenewed_lease_starts_the_job_as_a_plain_one(site: SlurmJobs) -> None:
    site.cluster.hooks.write_submit_hook(lease_s=3)
    job = site.wait(site.submit(script("#POLLUX", body=LOOP), "--gres=gpu:2"), JobState.RUNNING)
    assert sum(job.gpus_per_node_held.values()) == 2
    assert job.start_time is not None
    assert job.start_time - job.submit_time >= 3


def test_a_pollux_job_learns_of_the_gateway_and_a_job_from_within_it_does_not(site: SlurmJobs) -> None:
    inner = site.folder / "inner.sh"
    inner.write_text("#!/bin/sh\n#SBATCH --output=%x-%j.out --job-name=inner\nenv\necho done\n")
    body = f"env; POLLUX_TOKEN=secret sbatch --parsable --chdir={site.folder} {inner}; {LOOP}"
    outer = site.submit(script("#POLLUX", body=body))
    site.start(outer, ("n1",), 1)
    printed = site.until_output(outer, lambda text: text.rstrip().rpartition("\n")[2].isdigit())
    (address,) = site.cluster.gateways.addresses
    assert f"POLLUX_GATEWAY={address}\n" in printed
    inherited = site.folder / f"inner-{printed.split()[-1]}.out"
    wait_until(lambda: inherited.exists() and "done\n" in inherited.read_text(), PATIENCE_S, "the inner job")
    lines = inherited.read_text().splitlines()
    assert {"POLLUX_GATEWAY=", "POLLUX_TOKEN="} <= set(lines)
    assert not [line for line in lines if address in line]


def test_the_documented_srun_line_works_after_growing_and_shrinking(site: SlurmJobs) -> None:
    # Asked for with everything that sbatch leaves in the environment as it was.
    job_id = site.submit(
        # No polluxd runs here: `pollux env` would wait a minute for each attempt's token.
        '#!/bin/bash\n#POLLUX\nunset POLLUX_GATEWAY\neval "$(pollux env)"\n'
        "srun --ntasks-per-node=1 sh -c 'echo on $SLURMD_NODENAME gpus $SLURM_STEP_GPUS' && "
        f"echo done $SLURM_RESTART_COUNT; {LOOP}\n",
        *(
            "--nodes=2",
            "--ntasks=2",
            "--ntasks-per-node=1",
            "--gpus-per-node=2",
            "--cpus-per-task=2",
            "--mem=100",
        ),
    )
    places = [(("n1", "n2"), 2), (("n1", "n2", "n3"), 4), (("n4",), 1), (("n3",), 4)]
    for attempt, (nodes, gpus) in enumerate(places):
        if attempt:
            site.requeue(job_id)
        site.start(job_id, nodes, gpus)
        done = f"done {attempt or ''}".strip()
        text = site.until_output(job_id, lambda text, done=done: done in text.split("\n"))
        said = [line.split() for line in text.splitlines() if line.startswith("on ")]
        latest = said[-len(nodes) :]
        assert sorted(words[1] for words in latest) == list(nodes)
        assert {len(words[3].split(",")) for words in latest} == {gpus}
    assert len(said) == sum(len(nodes) for nodes, _ in places)
    # A requeue itself is told as an error, of the job and of the steps that it ended.
    told = ("CANCELLED AT", "slurmstepd", "srun: error")
    errors = [line for line in text.splitlines() if "error" in line]
    assert [line for line in errors if not any(words in line for words in told)] == []


def test_a_user_can_hold_and_cancel_but_not_break_the_lease_or_the_geometry(site: SlurmJobs) -> None:
    before = floor(time.time())
    job_id = site.submit(script("#POLLUX"), user="nobody")
    after = time.time()
    for change in ("StartTime=now", "NumNodes=2-2", "ReqNodeList=n1", "TresPerNode=gres:gpu:4", "Requeue=0"):
        done = site.run("scontrol", "update", f"JobId={job_id}", change, user="nobody")
        assert done.returncode != 0, change
    assert site.job(job_id).state is JobState.PENDING
    assert before + 60 <= (site.job(job_id).eligible_time or 0.0) <= after + 60
    assert "StartTime of job" in (site.cluster.logs / "slurmctld.log").read_text()
    for fine in (("update", f"JobId={job_id}", "TimeLimit=5"), ("hold", str(job_id))):
        assert site.run("scontrol", *fine, user="nobody").returncode == 0
    assert site.job(job_id).held_by_user
    assert site.run("scontrol", "release", str(job_id), user="nobody").returncode == 0
    waiting = site.job(job_id)
    assert (waiting.held_by_user, waiting.state) == (False, JobState.PENDING)
    assert site.run("scancel", str(job_id), user="nobody").returncode == 0


def test_a_foreign_pending_job_may_be_changed_by_its_user(site: SlurmJobs) -> None:
    job_id = site.submit(script(), "--begin=now+100", user="nobody")
    done = site.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+200", user="nobody")
    assert done.returncode == 0, done.stderr


def test_an_administrator_s_comment_keeps_the_mark_of_a_running_job(site: SlurmJobs) -> None:
    job_id = site.submit(script("#POLLUX min-gpus=1", body=LOOP))
    site.start(job_id, ("n2",), 1)
    site.cluster.command("scontrol", "update", f"JobId={job_id}", "AdminComment=ticket 12")
    found = site.job(job_id)
    assert found.spec == JobSpec(min_gpus=1, own_size=1), "the script calls no pollux, so one GPU is its size"
    assert found.admin_comment.endswith(" -- ticket 12")


def test_a_job_left_behind_waits_at_the_size_that_its_user_wrote(site: SlurmJobs) -> None:
    job_id = site.submit(script("#SBATCH --cpus-per-task=2", "#POLLUX min-gpus=1", body=LOOP))
    site.start(job_id, ("n1", "n2"), 3)
    site.client.requeue(job_id)
    job = site.wait(job_id, JobState.PENDING)
    clock = time.monotonic
    queue = WaitingJobs(site.client, lease=1.0, authorize=lambda: 1, clock=clock, monotonic=clock)
    queue.restore_sizes({job_id: job}, [job_id])
    words = dict(word.split("=", 1) for word in site.shown(job_id).split() if "=" in word)
    assert (words["NumTasks"], words["NumCPUs"], words["ReqNodeList"]) == ("1", "2", "(null)")
    assert words["TresPerNode"].replace("/", ":") == "gres:gpu:1"
    site.client.renew([job_id], time.time() + 2)  # the last lease
    assert list(site.wait(job_id, JobState.RUNNING).gpus_per_node_held.values()) == [1]


def test_interactive_jobs_are_left_alone(site: SlurmJobs) -> None:
    done = site.run("srun", "--gres=gpu:1", "printenv", "SLURM_STEP_GPUS")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().isdigit()


def test_devcluster_reports_what_a_command_said(dev_cluster: DevCluster) -> None:
    with pytest.raises(DevClusterError, match="Nonsense"):
        dev_cluster.command("scontrol", "update", "JobId=1", "Nonsense=1")
    assert os.geteuid() == 0


def test_squeue_and_scontrol_tell_that_a_job_is_kept_back(site: SlurmJobs) -> None:
    kept = site.submit("#!/bin/sh\n#POLLUX max-gpus=2\nsleep 60\n", "--gres=gpu:1", user="nobody")
    told = "polluxd keeps the job back; polluxctl explain says why"
    shown = site.run("squeue", "-h", "-j", str(kept), "-o", "%r %k", user="nobody").stdout
    assert shown.startswith("BeginTime ")
    assert told in shown
    assert told in site.run("scontrol", "show", "job", str(kept), user="nobody").stdout
    own = site.submit(
        "#!/bin/sh\n#POLLUX max-gpus=2\nsleep 60\n", "--gres=gpu:1", "--comment=mine", user="nobody"
    )
    assert "Comment=mine" in site.run("scontrol", "show", "job", str(own)).stdout
    plain = site.submit("#!/bin/sh\nsleep 60\n", "--gres=gpu:1", user="nobody")
    assert "Comment=" not in site.run("scontrol", "show", "job", str(plain)).stdout.replace(
        "AdminComment=", ""
    )
