"""The optimizer step under way: micro-batches, weights, state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pollux.noise.uneven import StepWeights


@dataclass
class StepGroup:
    """The micro-batches of one optimizer step."""

    passes: int
    """s + 1; fewer where the pass through the data ends."""
    samples: int
    """Examples of all its micro-batches, over all ranks."""
    local_batch: int
    begun: int = 0
    """Passes begun."""
    taken: int = 0
    """Examples in the passes begun."""
    shared: float = 0.0
    """Weights of the passes begun in the step's mean."""
    weighed: bool = False
    """The loss of the present pass was multiplied by its weight."""
    left_out: bool = False
    """The loop made no backward pass in one of the passes."""
    synchronises: bool = False
    """The present pass is the last one: it synchronises the ranks."""

    def begin(self, samples: int, *, last: bool) -> float:
        """Begin a pass of `samples` examples; return its weight in the step's mean.

        `last`: the data end with it, a stream's perhaps before its stated length. The step's weights add up to 1.
        """
        self.weighed = False
        self.begun += 1
        self.taken += samples
        if last:
            self.passes = min(self.passes, self.begun)
        self.synchronises = self.begun >= self.passes
        as_planned = not self.synchronises or self.taken == self.samples
        weight = samples / self.samples if as_planned else 1.0 - min(self.shared, 1.0)
        self.shared += weight
        return weight


@dataclass
class StepState:
    """Where this rank is in its optimizer steps."""

    group: StepGroup | None = None
    """The step under way; None before the first step, and if the step has to be planned again."""
    alike: int = 0
    """Coming steps that are as the present one: planned already, neither measured nor timed, without an exchange."""
    plain: bool = False
    """The present step is one of these."""
    weight: float = 1.0
    """The weight of the present micro-batch in the step's mean."""
    measured: bool = False
    """The gradients of the present step are measured."""
    gain: float = 1.0
    """Steps of M0 examples that the last step was worth."""
    stepped: bool = False
    """The optimizer has stepped since the last pass began."""
    in_hand: bool = False
    """The step counts as progress, but its examples are not committed yet."""
    failed: bool = False
    """The last pass ran out of memory, and its step will be taken again."""
    accumulates: bool = False
    """The loop uses `micro_batch`; without it each pass ends in a step."""
    looped: bool = False
    """A pass of the loop is over: whether the loop uses `micro_batch` is known."""
    in_epoch: bool = False
    """The script is in the loop over `job.epochs`."""
    managed: bool = False
    """`job.epochs` counts the epochs; else each loop over the loader is one."""
    passes_only: bool = False
    """Epochs are passes through the data."""
    uncommitted: int = 0
    """Examples since the last step."""
    taken: int = 0
    """Passes since the last step."""
    entered: int = 0
    """Passes that the loop has begun to compute since the last step."""
    usual: int = 0
    """Passes that the last step had."""
    tokens: Tensor | None = None
    """[sum of weights, sum of their squares] of the step's passes, where losses are sums; on this rank."""
    per_example: Tensor | None = None
    """Weight per example in the last step with summed losses, equal on all ranks."""
    weights: StepWeights | None = None
    """The weights of the pass that ends the step; None where losses are means."""
    scheduler_calls: int = 0
    """The script's calls of a scheduler in the last step."""
    tried: bool = False
    """The present pass through the data had an optimizer step, or one that AMP or the loop gave up.

    Also True where only the rest of the pass is left.
    """
    idle: int = 0
    """Whole passes through the data without such a step, one after the other."""
    unscaled: Any = None
    """The optimizer states of AMP's scaler at the beginning of the pass. The scaler's `update` replaces them."""
    seconds: float = 0.0
    """Average duration of a step; 0 while unknown."""
    writes: int = -1
    """Writes to the parameters when the loop over the loader ended (`loop.divergence.writes`)."""
    untold: int = 0
    """Steps since then that are not in the average yet."""
    ended_at: float | None = None
    """When the last step ended, by `time.perf_counter`; None after a pause."""

    def change_ranks(self) -> None:
        """Forget what holds for the former ranks only."""
        self.group = None
        self.alike, self.plain = 0, False
        self.entered = 0
        self.per_example = None
        self.usual = 0  # a joining rank has no data on earlier steps
        self.seconds = 0.0
