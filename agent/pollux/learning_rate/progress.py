"""Count a training's progress in units that no batch size changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Progress:
    """Progress in M0-equivalent examples: each step adds M * EFFICIENCY(M)."""

    initial: int
    """M0"""
    examples: float = 0.0
    """Scale-invariant steps times M0."""
    samples: int = 0
    """Examples trained on."""
    optimizer_steps: int = 0
    gpu_seconds: float = 0.0
    """Seconds of training times the GPUs in use, from the first step of each start."""
    epoch: int = 0
    """The present epoch of the training loop, or the next one between epochs."""
    epoch_from: float = 0.0
    """Value of `examples` at the start of the present epoch."""
    pass_from: int = 0
    """The loader's pass in which the epoch began."""
    target: float | None = None
    """Declared length in examples, epochs times |D|; None if declared in passes."""
    passes: float | None = None
    """Declared length in passes; None if declared in examples."""
    finished: bool = False

    @property
    def steps(self) -> float:
        """Scale-invariant steps: progress in steps of M0 examples."""
        return self.examples / self.initial

    def target_steps(self, length: int, pass_index: int, position: int, efficiency: float) -> float | None:
        """Return the scale-invariant steps at the training's end, if declared.

        The samples of passes that remain after `position` of pass `pass_index` count with the present `efficiency`.
        `length` is the number of samples of a pass.
        """
        if self.target is not None:
            return self.target / self.initial
        if self.passes is None:
            return None
        done = (pass_index - self.pass_from) * length + position
        left = max((self.passes - self.epoch) * length - done, 0.0)
        return self.steps + left * efficiency / self.initial

    def advance(self, samples: int, efficiency: float) -> float:
        """Count one optimizer step; return its scale-invariant steps."""
        self.examples += samples * efficiency
        self.samples += samples
        self.optimizer_steps += 1
        return samples * efficiency / self.initial

    def take_back(self, samples: int, gain: float) -> None:
        """Undo `advance` for a step of `samples` examples, worth `gain`."""
        self.examples -= gain * self.initial
        self.samples -= samples
        self.optimizer_steps -= 1

    def epoch_done(self, length: int) -> bool:
        """Tell whether the present epoch has its |D| = `length` examples."""
        # The sum of many floats may fall short by rounding.
        end = self.epoch_from + length
        return self.examples >= (end if self.target is None else min(end, self.target)) - 0.5

    def next_epoch(self, length: int, pass_index: int) -> None:
        """Enter the next epoch; the last step's excess counts in it.

        An epoch that the script leaves early is not completed later.
        """
        ended = self.epoch_from + length
        self.epoch_from = ended if self.examples >= ended - 0.5 else self.examples
        self.pass_from = pass_index
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore, with the M0 of then; with another one the examples, and so the epochs, stay."""
        for name, value in state.items():
            if name not in ("target", "passes") and hasattr(self, name):
                setattr(self, name, value)
