"""Data and a model for the loops of other libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from tests.integration.integrations.orders import EXAMPLES

BASE = 16
QUIET = {
    **{"accelerator": "cpu", "logger": False, "enable_checkpointing": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}
"""Options of Lightning's Trainer."""


def arguments(folder: Path | str, **more: Any) -> Any:
    """Return Hugging Face's arguments of a quiet training on CPUs that leaves nothing."""
    import transformers

    quiet = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return transformers.TrainingArguments(str(folder), **{**quiet, **more})


def data() -> TensorDataset:
    """Return a regression with the number of each example."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(EXAMPLES, 6, generator=generator)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(EXAMPLES, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(EXAMPLES))


class Numbers(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens that encode their own index.

    The model's inputs therefore show which examples were used.
    """

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([1 + index // BASE, 1 + index % BASE, 3, 5, 7])
        return {"input_ids": tokens, "labels": torch.tensor(index % 2)}


def model() -> Any:
    """Return a small classifier of sequences."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)
