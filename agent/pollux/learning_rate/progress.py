"""How far a training is, in units that the batch size does not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Progress in M0-equivalent examples, M times the efficiency per step: a run at M0 counts exactly."""

    initial: int
    """M0"""
    examples: float = 0.0
    """Scale-invariant steps times M0."""
    samples: int = 0
    """Examples trained on, whatever they were worth."""
    optimizer_steps: int = 0
    epoch: int = 0
    """The epoch that the training loop is in, or is about to enter."""
    epoch_from: float = 0.0
    """`examples` at which the present epoch counts as begun."""
    pass_from: int = 0
    """The loader's pass in which it began."""
    target: float | None = None
    """Examples declared: epochs times |D|; None where the length is declared in passes."""
    passes: float | None = None
    """Passes declared; None where the length is declared otherwise."""
    finished: bool = False

    @property
    def steps(self) -> float:
        """Scale-invariant steps: steps of M0 examples that this training is worth so far."""
        return self.examples / self.initial

    def target_steps(self, length: int, pass_index: int, position: int, efficiency: float) -> float | None:
        """Scale-invariant steps at the training's end; None where nothing was declared.

        Passes are worth what they turn out to be: those to come of `length` samples are taken to be worth the present
        `efficiency`, from `position` of pass `pass_index` on.
        """
        if self.target is not None:
            return self.target / self.initial
        if self.passes is None:
            return None
        done = (pass_index - self.pass_from) * length + position
        left = max((self.passes - self.epoch) * length - done, 0.0)
        return self.steps + left * efficiency / self.initial

    def advance(self, samples: int, efficiency: float) -> float:
        """Count one optimizer step over `samples` examples; returns the scale-invariant steps that it was worth."""
        self.examples += samples * efficiency
        self.samples += samples
        self.optimizer_steps += 1
        return samples * efficiency / self.initial

    def epoch_done(self, length: int) -> bool:
        """Whether the present statistical epoch's |D| = `length` examples of progress are made."""
        # A sum of many floats: half an example short is not short.
        end = self.epoch_from + length
        return self.examples >= (end if self.target is None else min(end, self.target)) - 0.5

    def next_epoch(self, length: int, pass_index: int) -> None:
        """Enter the next epoch. What the last step made beyond the end counts in it; an epoch left early is left."""
        ended = self.epoch_from + length
        self.epoch_from = ended if self.examples >= ended - 0.5 else self.examples
        self.pass_from = pass_index
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; a job restarted with another M0 keeps its examples, so that its epochs stay where they were."""
        for name, value in state.items():
            if name not in ("initial", "target", "passes") and hasattr(self, name):
                setattr(self, name, value)
