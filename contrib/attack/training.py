"""Alice's training, which grows in place while others attack it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from contrib.attack.registry import Outcome
from contrib.attack.site import Site
from polluxd.model import Move, Placement, Step

ROOT = Path(__file__).resolve().parents[2]


class Training:
    """A job of alice's on two nodes with one GPU each."""

    def __init__(self, site: Site, name: str) -> None:
        self._site = site
        self.folder = site.home("alice") / name
        shutil.rmtree(self.folder, ignore_errors=True)  # of an attempt that broke
        self._own(self.folder)
        self._own(self.folder / "ledger")
        variables = {"POLLUX_CHECKPOINT_DIR": f"{self.folder}/checkpoints", "OMP_NUM_THREADS": "1"}
        script = site.script(
            f"{name}.sh",
            "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --cpus-per-task=1 --open-mode=append",
            f"#SBATCH --job-name={name}",
            "#POLLUX min-gpus=2 max-gpus=2",
            *(f"export {key}='{value}'" for key, value in variables.items()),
            f"export PATH={Path(sys.executable).parent}:$PATH",
            f"cd {ROOT}",
            f"exec pollux run contrib/chaos/counted.py --passes 100000 --ledger {self.folder}/ledger",
        )
        self.job_id = site.submit("alice", script, f"--output={self.folder}/log")
        try:
            site.until(self._reported, f"the first step of {name}", 240.0)
        except TimeoutError as error:
            raise RuntimeError(f"{error}; its log ends with: {self._tail()}") from error
        site.kept.add(self.job_id)
        site.polluxd.command("polluxctl", "pin", str(self.job_id))
        job = site.job(self.job_id)
        self.nodes = (job.batch_host, *sorted(set(job.nodes) - {job.batch_host}))

    def _own(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        os.chown(folder, self._site.uid("alice"), -1)

    def _reported(self) -> bool:
        told = self._site.store.reports().get(self.job_id)
        return told is not None and told.first_step_at is not None

    def _tail(self) -> str:
        log = self.folder / "log"
        return log.read_text(errors="replace")[-400:] if log.exists() else "(none)"

    @property
    def steps(self) -> int:
        """The number of optimizer steps, by the ranks' own files."""
        return sum(p.read_text().count("done") for p in (self.folder / "ledger").glob("*.txt"))

    def goes_on(self) -> bool:
        """Wait for three further steps."""
        before = self.steps
        try:
            self._site.until(lambda: self.steps >= before + 3, "further steps", 20.0)
        except TimeoutError:
            return False
        return True

    def order(self, *nodes: str) -> Move:
        """Have polluxd resize the job in place."""
        return self._site.plan(self.job_id, Placement(self.nodes, 1), Placement(nodes, 1))

    def move(self, number: int) -> Move:
        return next(m for m in self._site.store.moves(self.job_id) if m.id == number)

    def ended(self, number: int, seconds: float = 90.0) -> Move:
        """Wait for the end of a move."""
        self._site.until(lambda: self.move(number).step.terminal, f"the end of move {number}", seconds)
        return self.move(number)

    def meeting(self) -> dict[str, Any]:
        """Wait for the file for the joiners; return what it says."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            for path in (self.folder / "checkpoints").glob("*/companion-*.json"):
                with suppress(OSError, ValueError):
                    found.append(json.loads(path.read_text()))
            return bool(found)

        self._site.until(there, "the file for the joiners", 60.0)
        return found[0]

    @contextmanager
    def growing(self) -> Iterator[Move]:
        """Order a growth to a third node, and take it back at the end; `grown` then says how it went."""
        before = self.nodes
        move = self.order(*before, self._site.free_nodes()[0])
        try:
            yield move
        finally:
            self.grown = self.ended(move.id)
            if self.grown.step is Step.TRAINING:
                self.nodes = self.grown.target.nodes
                back = self.ended(self.order(*before).id)
                if back.step is Step.TRAINING:
                    self.nodes = before

    def harmed(self, words: str, won: bool = False) -> Outcome:
        """Return the outcome of an attack on a growth: it succeeds, too, where that failed or the training stands."""
        grown, lives = self.grown, self.goes_on()
        said = (
            f"{words}; the growth ended as {grown.step} {grown.detail[:160]}; the training goes on: {lives}"
        )
        return Outcome(won or grown.step is not Step.TRAINING or not lives, said)


def training(site: Site) -> Training:
    """Return alice's training, which runs until the end of the suite."""
    if site.residents_training is None:
        site.residents_training = Training(site, "training")
    return site.residents_training  # type: ignore[no-any-return]
