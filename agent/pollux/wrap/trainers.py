"""What trainers print, save and need, as data: one row each."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trainer:
    """One trainer as its own sources have it."""

    name: str
    line: str
    """Regular expression of the line that it prints for a step; its first group is the step."""
    checkpoints: str
    """What changes once a checkpoint is complete, below the trainer's folder."""
    sizes: str
    """GPU counts at which it can go on from a checkpoint."""
    data: str
    """Whether its data go on where they stopped."""
    flags: str
    """What its user has to set."""


TRAINERS = (
    Trainer(
        "torchtitan",
        r"\bstep:\s*([\d,]+)\s+loss:",
        "checkpoint/step-*/.metadata",
        "one; any if the loader's state is left out",
        "at the same size only",
        "--checkpoint.enable; a batch per rank: divide it by hand, or keep one size",
    ),
    Trainer(
        "Megatron-LM, NeMo",
        r"\biteration\s+([\d,]+)\s*/\s*[\d,]+\s*\|",
        "latest_checkpointed_iteration.txt",
        "multiples of TP x PP x CP",
        "yes, with the loader `single`",
        "--save, --load and --save-interval; --exit-signal-handler for `--signal TERM`",
    ),
    Trainer(
        "nanoGPT",
        r"^\s*iter\s+([\d,]+):\s+loss\b",
        "out/ckpt.pt",
        "any whose accumulation steps divide",
        "no: each start draws the first batches again",
        "--init_from=resume from the second start on",
    ),
    Trainer(
        "Hugging Face Trainer",
        r"'epoch':\s*'?([\d.]+)'?",
        "out/checkpoint-*/trainer_state.json",
        "any under DDP; not with DeepSpeed",
        "yes, if accumulation keeps the batch size",
        "resume_from_checkpoint; gradient_accumulation_steps divided by the number of ranks",
    ),
    Trainer(
        "Lightning",
        r"^Epoch (\d+)(?::|/\d+[ :]).*?\b(?P<done>\d+)/(?P<of>\d+)\b",
        "checkpoints/last.ckpt",
        "any under DDP, with the batch per rank divided by hand",
        "no: the rest of an epoch begins with its first batches, unless the loader keeps its place, and one rank takes "
        "another order than several, unless use_distributed_sampler=False and a sampler of your own",
        "TQDMProgressBar(), ModelCheckpoint(save_last=True, every_n_train_steps=N), fit(ckpt_path=...); "
        "SLURMEnvironment(auto_requeue=False)",
    ),
    Trainer(
        "verl",
        r"\bstep:\s*([\d,]+)\s+-\s",
        "checkpoints/latest_checkpointed_iteration.txt",
        "one",
        "by the driver's loader",
        "gpu-counts= with one number",
    ),
    Trainer(
        "DeepSpeed",
        r"\[Rank 0\] step=(\d+), skipped=",
        "out/latest",
        "one: ZeRO refuses another",
        "by the script",
        'gpu-counts= with one number; steps_per_print, and set_log_level_from_string("info") of '
        "deepspeed.utils.logging, without which newer releases print no steps",
    ),
    Trainer(
        "any other",
        r"(?i)(?<![\w.])(?<!eval )(?<!val )(?<!test )(?<!per )(?:global[_ ]?|train[_ ]?)?(?:step|iteration|iter)"
        r"\W{0,3}([\d,]+)\b(?!\.\d)",
        "",
        "as it says",
        "as it says",
        "--step PATTERN",
    ),
    Trainer(
        "accelerate",
        r"(?i)^(?![^|]*(?:eval|valid|test|predict|dataset|tokeniz|map|filter|load|split|fetch))"
        r"[^|]*\d%\|[^|]*\| *(\d+)/\d+ \[",
        "out/checkpoint_*/random_states_0.pkl",
        "any under DDP with split_batches",
        "yes, with skip_first_batches",
        "save_state() and load_state(); a tqdm bar over the steps",
    ),
)
"""Patterns are tried in this order: one that matches a line shuts out those below it."""

PATTERNS = tuple(re.compile(trainer.line) for trainer in TRAINERS)


def table() -> str:
    """Return the trainers as the table of the page `docs/user-guide/own-loop.md`."""
    head = "| trainer | `--checkpoints` | sizes | data go on | set |\n|---|---|---|---|---|\n"
    return head + "".join(
        f"| {t.name} | {f'`{t.checkpoints}`' if t.checkpoints else 'as it says'} | {t.sizes} | {t.data} | {t.flags} |\n"
        for t in TRAINERS
    )
