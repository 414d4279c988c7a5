"""`pollux wrap` on real Slurm: trainers with a loop of their own, each beside the same trainer run alone."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from polluxd.apply.placed import held
from polluxd.model import Placement, Step

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

DIRECTIVE = "#POLLUX min-gpus=1 max-gpus=4 adaptive=no resize=requeue gpu-counts=1,2,4"
STEPS = 300


class Trained:
    """A wrapped training; `ended` waits for its end."""

    def __init__(
        self,
        loop: Loop,
        name: str,
        wrap: str = "",
        trainer: str = "",
        *,
        launch: str = "",
        directive: str = DIRECTIVE,
        steps: int = STEPS,
    ) -> None:
        self._loop, self._out, self._steps = loop, loop.folder / name, steps
        self.body = (
            f"pollux wrap --checkpoints '{self._out}/step-*.json' --batch 48 --steps {steps} {wrap} -- "
            f"{launch} python tests/integration/loop/own_loop.py --out {self._out} --steps {steps} {trainer}"
        )
        self._name, self._told = name, ""
        self.job_id = loop.sbatch(name, self.body, directive=directive)

    def explained(self, words: str) -> None:
        # polluxctl itself takes most of a second of CPU time.
        wait_until(lambda: words in self._loop.daemon.explain(self.job_id), 360.0, words, every_s=3.0)
        self._told = words

    def made_so_far(self) -> int:
        return sum(len(made.read_text().splitlines()) for made in self._out.glob("made.txt"))

    @property
    def log(self) -> str:
        return (self._loop.folder / f"{self._name}.log").read_text()

    def ended(self) -> Self:
        self.restarts = self._loop.completed(self.job_id, 400.0).restart_count
        rows = [line.split() for line in (self._out / "made.txt").read_text().splitlines()]
        self.made = Counter(int(step) for step, *_ in rows)
        self.sizes = [int(gpus) for _, gpus, _ in rows]
        digest = ""
        for step in range(self._steps):
            digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
        assert f"finished {digest}" in self.log, "the same samples in the same order as alone"
        assert set(self.made) == set(range(1, self._steps + 1))
        moves = self._loop.store.moves(self.job_id)
        # One that was withdrawn, at the training's end or before its first checkpoint, is none.
        failed = [
            m for m in moves if m.step is Step.FAILED and not re.search("ended|cannot be moved", m.detail)
        ]
        # A refusing trainer's move fails, as it goes back to the queue before its first step there.
        assert bool(failed) is ("did not start" in self._told), failed
        return self

    @property
    def repeated(self) -> int:
        return sum(count - 1 for count in self.made.values())


@pytest.fixture(scope="module")
def loop(scratch: Path) -> Iterator[Loop]:
    folder = scratch / "wrap-jobs"
    folder.mkdir()
    with DevCluster(
        scratch / "wrap", nodes=8, gpus_per_node=4, lease_s=60, publish_interval_s=1.0
    ) as cluster:
        yield from loop_on(
            cluster, polluxd(cluster, folder, cooldown=1.0, drain_timeout=3.0, training_timeout=120.0), folder
        )


@pytest.fixture(scope="module")
def trainings(loop: Loop) -> dict[str, Trained]:
    """Trainings at the same time, with nodes to grow on."""
    return {
        "silent": Trained(loop, "silent", trainer="--evaluates"),
        "asked": Trained(loop, "asked", "--signal TERM", "--saves-on-term"),
        "rigid": Trained(loop, "rigid", trainer="--rigid"),
        # Each 17 s, under a drain of 3 s.
        "seldom": Trained(loop, "seldom", trainer="--save-every 80"),
        "deaf": Trained(loop, "deaf", "--signal TERM --grace 1", "--deaf"),
        "requeues": Trained(loop, "requeues", "--signal TERM", "--saves-on-term --requeues"),
        "torn": Trained(loop, "torn", trainer="--in-place"),
        "mute": Trained(loop, "mute", trainer="--mute --work 0.5", steps=100_000),
    }


def test_a_trainer_that_starts_at_no_other_size_goes_back_and_stays(trainings: dict[str, Trained]) -> None:
    # First of the tests, as a job that has ended is explained in other words.
    trainings["rigid"].explained(
        "did not start on 2 GPUs (status 1: cannot resume at another data-parallel degree)"
    )
    trained = trainings["rigid"].ended()
    assert set(trained.sizes) == {1}
    assert trained.log.count("cannot resume at another data-parallel degree") == 1
    assert "polluxd will not start it on" in trained.log


def test_a_trainer_that_names_no_step_keeps_its_size_and_its_log_says_what_explain_says(
    loop: Loop, trainings: dict[str, Trained]
) -> None:
    mute = trainings["mute"]
    said = "cannot be moved: no line of its trainer has named a step, so it cannot be measured"
    loop.until(lambda: f"{said}. polluxd keeps this job on its 1 GPUs" in mute.log, 140.0, why="its log")
    mute.explained(said)
    assert "Predicted speedup" not in loop.daemon.explain(mute.job_id)
    assert loop.job(mute.job_id).restart_count == 0
    loop.cluster.command("scancel", str(mute.job_id))


def test_a_trainer_that_is_asked_nothing_grows_at_its_own_checkpoints(trainings: dict[str, Trained]) -> None:
    trained = trainings["silent"].ended()
    assert max(trained.sizes) == 4
    assert trained.restarts >= 1
    # The order waits for a checkpoint, which comes each 20 steps; Slurm ends the job within seconds of it.
    assert trained.repeated <= 19 * trained.restarts


def test_a_trainer_that_saves_seldom_moves_at_its_checkpoint_all_the_same(
    trainings: dict[str, Trained],
) -> None:
    trained = trainings["seldom"].ended()
    assert trained.restarts >= 1
    assert "no acknowledgement" not in trained.log
    assert trained.repeated <= 79 * trained.restarts


def test_a_trainer_that_ignores_the_signal_moves_at_its_own_checkpoint(trainings: dict[str, Trained]) -> None:
    trained = trainings["deaf"].ended()
    assert trained.restarts >= 1
    assert trained.log.count("it is not asked again") == 1, "in any later attempt"


def test_a_trainer_that_requeues_itself_is_moved(trainings: dict[str, Trained]) -> None:
    trained = trainings["requeues"].ended()
    assert trained.restarts >= 1
    assert trained.repeated == 0


def test_a_checkpoint_that_is_written_in_place_is_never_cut(trainings: dict[str, Trained]) -> None:
    trained = trainings["torn"].ended()
    assert trained.restarts >= 1


def test_a_trainer_that_saves_on_a_signal_makes_no_step_twice(trainings: dict[str, Trained]) -> None:
    trained = trainings["asked"].ended()
    assert max(trained.sizes) == 4
    assert trained.restarts >= 1
    assert set(trained.made.values()) == {1}
    assert "saved at step" in trained.log, "and its exit status of 0 was no end of the training"


def test_a_ddp_loop_under_torchrun_makes_the_same_losses_wherever_it_is_moved(loop: Loop) -> None:
    """1 -> 4 -> parked -> two nodes. The training ends once it has been everywhere."""
    out, end = loop.folder / "ddp", loop.folder / "ddp-end"
    launch = loop.folder / "launch.sh"
    launch.write_text(
        "export OMP_NUM_THREADS=1; ulimit -c 0\n"
        "exec srun --nodes=$POLLUX_NODES --ntasks=$POLLUX_NODES --ntasks-per-node=1 --wait=0 "
        f"{sys.executable} -m torch.distributed.run --nnodes=$POLLUX_NODES --nproc-per-node=$POLLUX_GPUS_PER_NODE "
        "--rdzv-backend=c10d --rdzv-id=$SLURM_JOB_ID-$SLURM_RESTART_COUNT --local-addr=127.0.0.1 "
        '--rdzv-endpoint=127.0.0.1:$((21000 + SLURM_JOB_ID + SLURM_RESTART_COUNT)) "$@"\n'
    )
    trainer = "tests/integration/loop/own_ddp.py --out"
    body = f"pollux wrap --checkpoints '{out}/step-*.pt' --batch 48 -- bash {launch} {trainer} {out} --until {end}"
    job_id = loop.sbatch("ddp", body, directive=DIRECTIVE)
    log = loop.folder / "ddp.log"

    def reaches(place: Placement) -> None:
        """Have it moved, as often as polluxd moves it elsewhere or has no checkpoint to move it by; wait for steps."""
        words = f"on {place.gpus}\n"
        before = log.read_text().count(words)

        def trains_there() -> bool:
            under_way = [move for move in loop.store.moves(job_id) if not move.step.terminal]
            here = held(loop.job(job_id))
            if not under_way and here not in (place, Placement()):
                loop.plan(job_id, "requeue", None, place)
            return here == place and log.read_text().count(words) > before + 20

        loop.until(trains_there, 200.0, why=f"steps on {place}")

    loop.until(lambda: log.exists() and "on 1\n" in log.read_text(), why="its first steps")
    reaches(Placement(("n2",), 4))
    loop.park(job_id)
    loop.until(lambda: any(m.step is Step.PARKED for m in loop.store.moves(job_id)), why="to be parked")
    loop.until(lambda: held(loop.job(job_id)), why="a place again")
    reaches(Placement(("n3", "n4"), 1))
    end.touch()
    loop.completed(job_id, 300.0)
    steps = max(int(number) for number in re.findall(r"step (\d+): loss", log.read_text()))
    control = subprocess.run(
        [sys.executable, *trainer.split(), str(loop.folder / "alone"), "--steps", str(steps)],
        capture_output=True,
        text=True,
        check=True,
    )

    def found(text: str) -> dict[int, tuple[float, str]]:
        lines = re.finditer(r"step (\d+): loss ([\d.]+) sample (\d+)", text)
        return {int(one[1]): (float(one[2]), one[3]) for one in lines}

    ours, fixed = found(log.read_text()), found(control.stdout)
    assert {step: sample for step, (_, sample) in ours.items()} == {
        step: sample for step, (_, sample) in fixed.items()
    }
    assert max(abs(ours[step][0] - fixed[step][0]) for step in fixed) < 1e-4


def test_a_signal_reaches_the_ranks_of_all_nodes_and_nothing_is_made_twice(loop: Loop) -> None:
    srun = "srun --nodes=$POLLUX_NODES --ntasks=$POLLUX_NODES --ntasks-per-node=1 --wait=0"
    (loop.folder / "two.sh").write_text(f'exec {srun} "$@"\n')
    trained = Trained(
        loop, "two", "--signal TERM", "--saves-on-term --work 0.8", launch=f"bash {loop.folder}/two.sh"
    )
    loop.until(lambda: trained.made_so_far() > 10, why="steps on one node")
    loop.plan(trained.job_id, "requeue", None, Placement(("n5", "n6"), 2))
    begun = trained.made_so_far()
    loop.until(lambda: trained.made_so_far() > begun + 40, why="steps on two nodes")
    loop.plan(trained.job_id, "requeue", None, Placement(("n5",), 4))
    trained.ended()
    assert trained.repeated == 0
    assert list((loop.folder / "two").glob("term-*-1")), "the rank on the second node was told, too"


def test_two_wrapped_trainings_of_one_job_are_moved_each_as_its_own(loop: Loop) -> None:
    """A loop over seeds whose trainings share one pattern."""
    out = loop.folder / "seeds"
    out.mkdir()
    # 6 s and more from one to the next on 4 GPUs: a trainer that saves each second is never seen to have completed one.
    one = "python tests/integration/loop/own_loop.py --steps 400 --work 0.3 --save-every 80"
    wrapped = f"pollux wrap --checkpoints '{out}/*/step-*.json' --batch 48 -- {one}"
    body = f"for seed in 1 2; do {wrapped} --out {out}/$seed; done"
    job_id = loop.sbatch("seeds", body, directive=DIRECTIVE)
    made = out / "2" / "made.txt"
    loop.until(lambda: made.exists() and len(made.read_text().splitlines()) > 30, why="the second training")
    restarts = loop.job(job_id).restart_count
    here = held(loop.job(job_id))
    assert here is not None
    loop.plan(job_id, "requeue", None, Placement(("n1",), 1 if here.gpus > 1 else 4))
    loop.until(lambda: loop.job(job_id).restart_count > restarts, why="a move")
    loop.completed(job_id, 300.0)
    for seed in (1, 2):
        rows = [int(line.split()[0]) for line in (out / str(seed) / "made.txt").read_text().splitlines()]
        assert set(rows) == set(range(1, 401))
        assert len(rows) - 400 <= 79 * loop.job(job_id).restart_count
    assert len([*loop.folder.glob("checkpoints-seeds/*/wrap-*.json")]) == 2, "each measures for itself"
