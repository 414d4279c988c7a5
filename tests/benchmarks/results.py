"""What the benchmarks share: options, comparisons of runs, and files of figures."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the text of the benchmark's module."""
    return argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)


def save(path: Path, figures: object) -> None:
    """Write figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")


def standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def mean_with_error(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.4f} +- {standard_error(values):.4f}"


def at_most(values: Sequence[float]) -> float:
    """Return what their mean is below with 95 % confidence (one-sided, Student's t)."""
    from scipy import stats  # not for all benchmarks: `scale` measures memory

    return statistics.mean(values) + float(stats.t.ppf(0.95, len(values) - 1)) * standard_error(values)
