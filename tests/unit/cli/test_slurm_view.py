"""What `top` and the live page show of Slurm itself: plain jobs, nodes, how a job ended."""

from __future__ import annotations

from polluxd.cli.slurm_view import SlurmView, gpus_held
from polluxd.errors import SlurmRefused
from polluxd.slurm.configuration import Slurm
from tests.unit.slurm.scontrol_output import NODE
from tests.unit.slurm.squeue_stand_in import PENDING, RUNNING, squeue

PLAIN = {"admin_comment": "", "UserName": "bob", "Name": "cfd"}
ONE_GPU = {"NodeList": "n1", "NumNodes": "1", "tres-per-node": "gres:gpu:1"}
COMPANION = f"pollux:v1 companion-of=7 attempt=0 move=3 nonce={'0' * 32} cpus-per-gpu=2 submitted=1"
ENDED = (
    "JobId=7 JobName=train UserId=ada(1001) GroupId=g(1) JobState=FAILED Reason=NonZeroExitCode ExitCode=0:9 "
    "BatchHost=n4 Command=/home/ada/train.sh WorkDir=/home/ada StdErr=/x StdIn=/dev/null StdOut=/home/ada/train-7.log "
    "Power= AdminComment=pollux:v1 min-gpus=1 submitted=1795271000\n"
)


class Answers(Slurm):
    """Slurm's commands, from texts."""

    def __init__(self, *, record: str = "", nodes: str = NODE, sacct: str = "") -> None:
        super().__init__()
        self.jobs = [
            {**RUNNING, "NodeList": "n1", "BatchHost": "n1", "NumNodes": "1", "tres-per-node": "gres:gpu:2"},
            {**RUNNING, **PLAIN, **ONE_GPU, "JobID": "8"},
            {**PENDING, **PLAIN, "JobID": "9", "Reason": "Resources"},
            {**RUNNING, **ONE_GPU, "JobID": "10", "admin_comment": COMPANION},
        ]
        self.record, self.nodes, self.sacct = record, nodes, sacct
        self.asked = 0

    def ask(self, *argv, environment=None, given="") -> str:
        self.asked += 1
        if argv[0] == "squeue":
            return squeue(self.jobs, environment["SQUEUE_FORMAT2"])
        found = self.nodes if argv[-1] == "node" else self.record if argv[0] == "scontrol" else self.sacct
        if not found:
            raise SlurmRefused(f"{argv}: Invalid job id specified")
        return found


def test_plain_jobs_are_those_without_a_mark_and_running_ones_come_first() -> None:
    used = NODE.replace("GresUsed=gpu:0", "GresUsed=gpu:4")
    found = SlurmView(Answers(nodes=used)).read()
    assert found is not None
    rows = [(row["job_id"], row["state"], row["gpus"], row["reason"]) for row in found.plain_jobs]
    assert rows == [(8, "RUNNING", 1, ""), (9, "PENDING", 8, "Resources")]
    assert found.states == {"n1": "idle"}, "and not what an administrator wrote about it"
    assert gpus_held(found, [{"gpus": 2}]) == "4 GPUs: 3 held by Pollux jobs, 1 by others, 0 idle", (
        "with a companion's"
    )


def test_a_drained_node_without_jobs_has_no_idle_gpus() -> None:
    drained = SlurmView(Answers(nodes=NODE.replace("State=IDLE Thr", "State=IDLE+DRAIN Thr"))).read()
    assert drained is not None
    assert drained.states == {"n1": "idle+drain"}
    assert gpus_held(drained, []) == "0 GPUs: 0 held by Pollux jobs, 0 by others, 0 idle"


def test_slurm_is_not_asked_at_each_look_also_while_it_does_not_answer() -> None:
    for nodes, answers in ((NODE, True), ("", False)):
        slurm = Answers(nodes=nodes)
        view = SlurmView(slurm)
        assert (view.read() is not None) is answers
        before = slurm.asked
        assert (view.read() is not None) is answers
        assert slurm.asked == before


def test_an_ended_job_names_signal_output_and_checkpoints() -> None:
    how, output, checkpoint = SlurmView(Answers(record=ENDED)).ending(7)
    assert how == "Slurm's record: FAILED, by signal 9 on n4."
    assert output == "Its output: /home/ada/train-7.log."
    assert "/home/ada/pollux-checkpoints/7-1795271000, unless" in checkpoint
    assert "checkpoint_dir=" in checkpoint


def test_what_slurmctld_has_forgotten_comes_from_sacct_or_is_not_told() -> None:
    sacct = "CANCELLED by 1001|0:15|n1|pollux:v1 min-gpus=1 submitted=17|/home/ada\n"
    how, output, checkpoint = SlurmView(Answers(sacct=sacct)).ending(7)
    assert how == "Slurm's record: CANCELLED by 1001, by signal 15 on n1."
    assert "/home/ada/slurm-7.out, unless" in output
    assert "/home/ada/pollux-checkpoints/7-17," in checkpoint
    assert SlurmView(Answers()).ending(7) == []
