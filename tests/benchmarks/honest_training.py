"""The real agent's report in virtual time: its progress, profile, noise averages, fit, choice of batch sizes.

`HonestTraining` is the agent's own `Training` without a model, a loader and ranks. It measures the truth
of one of the simulator's applications. All from a measurement to `pollux.loop.report.report_of` is the agent's code.
"""

from __future__ import annotations

from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from pollux.learning_rate.progress import Progress
from pollux.loop.report import report_of
from pollux.noise.noise_scale import NoiseAverages, SampleKind
from pollux.training.training import Training
from pollux.tuning.batch_choice import FIRST_REFIT, LAST_REFIT, Advisor, choose_on_arrival, initial_choice
from pollux.tuning.measurements import Configuration
from pollux.tuning.mode import Mode
from pollux.tuning.profile import StepProfile
from polluxd.gateway.payloads import ReportMessage
from polluxd.model import Report
from polluxd.sim.applications import Application
from polluxd.store import rows

MEASURED = 6
"""Steps of a look whose times are measured, at most."""
OFF = 0.1
"""Largest log-error of a measured step time."""
SCATTER = 0.15
"""Log-error (sd) of a gradient norm."""


class HonestTraining(Training):
    """A training whose user counts passes through the data (`job.epochs`), or statistical epochs."""

    def __init__(
        self,
        app: Application,
        draw: np.random.Generator,
        *,
        statistical: bool,
        profile: StepProfile | None = None,
    ) -> None:
        self.app, self._draw = app, draw
        self.now = 0.0
        self.world: Any = SimpleNamespace(size=0, nodes=0, racks=1, rank=0)
        factors = SimpleNamespace(rates=SimpleNamespace(factors=[1.0]), ranks_per_replica=1)
        self.models: Any = [factors]
        self.profile = profile or StepProfile(clock=lambda: self.now)
        self.memory: Any = SimpleNamespace(by_type=lambda _limits: {})
        self.mode, self.adaptive = Mode.ENFORCE, app.fixed_batch is None
        self.timer: Any = SimpleNamespace(data_wait=0.0)
        self.step: Any = SimpleNamespace(gain=1.0)
        self.advisor: Advisor | None = None
        self.state = None
        self._refit_at, self._pause = 0.0, FIRST_REFIT
        self._size: int | None = None
        """The batch size in use last."""
        self._params: ThroughputParams | None = None
        """The fit of the attempt before."""
        self.growth, self.jump, self.slowness = 1.0, 1.0, 1.0
        """Factors on the true noise scale, over the training and now, and on the true step times."""
        examples = app.progress(app.epochs) * app.limits.initial
        self.length = max(int(examples / app.epochs), 1)
        self._samples_of_passes = 0.0
        self.progress = Progress(initial=app.limits.initial)
        if statistical:
            self.progress.target = examples
        else:
            self.progress.passes = float(app.epochs)
        self._averages = NoiseAverages(1)
        self.limit(app.limits, app.limits.local_max, 0)
        self.data: Any = SimpleNamespace(length=self.length, pass_index=0, position=0)
        self.begun = True

    @property
    def noise_scale(self) -> NoiseScale | None:
        """What the agent's averages say."""
        found = self._averages.groups()
        return None if found is None or not self.adaptive else found[0]

    @property
    def done(self) -> float:
        """Share of the training that is over."""
        progress = self.progress
        if progress.target is not None:
            return progress.examples / progress.target
        assert progress.passes is not None
        return progress.samples / (progress.passes * self.length)

    def place(self, nodes: int, gpus: int) -> None:
        """Train here from now on, as `Training.enter_groups` and `Job.loader` begin."""
        size = self._size
        self.world.nodes, self.world.size = nodes, gpus
        if size is None or not self.adaptive:
            self.choice = initial_choice(self.limits, nodes, gpus, adaptive=self.adaptive)
        else:
            noise, params = self.noise_scale, self.params or self._params
            self.choice = choose_on_arrival(self.limits, nodes, gpus, noise=noise, params=params, size=size)
        self.widen()
        if self.advisor is None:
            self.advisor = Advisor(
                self.profile,
                self.limits,
                nodes,
                gpus,
                lambda: (self.noise_scale, self.choice),
                adaptive=self.adaptive,
                params=self._params,
            )
        else:
            self.advisor.moved(nodes, gpus)
        self._refit_at, self._pause = self.now, FIRST_REFIT

    def restart(self, limits: BatchLimits | None = None) -> None:
        """Begin again from the checkpoint, in new processes; `limits`: the user chose another M0."""
        self._params, self.advisor = self.params, None
        saved, self.profile = self.profile.state_dict(), StepProfile(clock=lambda: self.now)
        self.profile.load_state_dict(saved)
        if limits is not None:
            kept, user = self.progress.state_dict(), self.progress
            self.progress = Progress(initial=limits.initial, target=user.target, passes=user.passes)
            self.progress.load_state_dict(kept)
            self._averages = NoiseAverages(1)
            self.limit(limits, limits.local_max, 0)

    def train(self, seconds: float, noise_epoch: int) -> None:
        """Train for so many seconds."""
        gpus, nodes = self.world.size, self.world.nodes
        each = gpus // nodes
        m, passes = self.choice.local_batch, self.choice.accumulation + 1
        step, sync = self.app.times((each,) * nodes, m)
        step, sync = step * self.slowness, sync * self.slowness
        whole = step + (passes - 1) * (step - sync)
        steps = seconds / whole
        samples = steps * self.batch_size
        worth = self.efficiency(self.batch_size)
        self.step.gain = worth * self.batch_size / self.limits.initial
        self._samples_of_passes += samples
        taken, self._samples_of_passes = divmod(self._samples_of_passes, 1.0)
        self.progress.advance(int(taken), worth)
        self.progress.optimizer_steps += max(int(steps) - 1, 0)
        self.data.pass_index, self.data.position = divmod(self.progress.samples, self.length)
        self._measure(min(max(int(steps), 1), MEASURED), step, sync)
        if self.adaptive:
            self._sample(max(int(steps), 1), noise_epoch)
        self.now += seconds
        self._tune()
        self._size = self.batch_size

    def _measure(self, number: int, step: float, sync: float) -> None:
        off = np.exp(self._draw.uniform(-OFF, OFF, size=(2, number)))
        key = Configuration(self.world.nodes, self.world.size, self.choice.local_batch)
        local = (step - sync) * off[0]
        self.profile.add(key, local.tolist(), (step * off[1]).tolist())

    def _sample(self, steps: int, epoch: int) -> None:
        """Sample norms of gradients of the ranks, or of the halves of one GPU's batch."""
        batch, initial = self.batch_size, self.limits.initial
        true = self.app.noise(batch, min(epoch, self.app.epochs - 1))
        # The application's is over its own M0.
        var = true.var * self.growth**self.done * self.jump * self.app.limits.initial / initial
        gradients = max(self.world.size * (self.choice.accumulation + 1), 2)
        b = batch / gradients
        number = min(steps, MEASURED)
        kind = SampleKind(gradients, b, batch / initial, max(round(steps / number), 1))
        off = np.exp(self._draw.normal(0.0, SCATTER, size=(number, 1)))
        self._averages.add(
            kind, (true.sqr + var * initial / b) * off, (true.sqr + var * initial / batch) * off, initial
        )

    def _tune(self) -> None:
        """Refit as often as the advisor's thread does, and take its proposal."""
        advisor = self.advisor
        if advisor is None or self.now < self._refit_at:
            return
        advisor.advise()
        self._pause = min(self._pause * 1.3, LAST_REFIT)
        self._refit_at = self.now + self._pause
        if advisor.proposal is not None:
            self.choice, advisor.proposal = advisor.proposal, None
            self.widen()

    def report(self, attempt: int, arrived: float, first_step_at: float | None) -> Report:
        """Return the report as polluxd reads it: sent, checked by the gateway, stored, read."""
        sent = {**report_of(self), "at": self.now, "checkpointed": True}
        if first_step_at is not None:
            sent["times"] = {"first_step_at": first_step_at}
        document = ReportMessage.model_validate(sent).document()
        row = {
            "job_id": 1,
            "attempt": attempt,
            "received_at": datetime.fromtimestamp(arrived, UTC),
            "report": document,
        }
        return rows.report(row)
