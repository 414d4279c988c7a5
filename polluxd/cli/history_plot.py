"""The picture of `polluxctl history JOB --plot FILE`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from polluxd.errors import ConfigError
from polluxd.printable import printable
from polluxd.store import HistoryPoint

_PANELS = (
    ("gpus", "GPUs", True),
    ("batch_size", "batch size", True),
    ("goodput", "goodput\n[examples/s]", False),
    ("noise_scale", "noise scale\n[examples]", False),
)


def draw(points: Sequence[HistoryPoint], title: str, path: Path) -> None:
    """Write the picture; the path's suffix names the format.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - the extra `sim`
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib beside polluxd") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    times = [datetime.fromtimestamp(point.at) for point in points]
    figure, panels = plt.subplots(len(_PANELS), 1, figsize=(9, 8), sharex=True, layout="constrained")
    # A job's name may hold dollar signs, which are no formulae here.
    figure.suptitle(printable(title), parse_math=False)
    for axes, (key, label, steps) in zip(panels, _PANELS, strict=True):
        values = [getattr(point, key) for point in points]
        # No value, or a rate of 0: nothing is measured yet after a start or a move.
        known = [float(value) if value else float("nan") for value in values]
        if steps:
            axes.step(times, known, where="post")
        else:
            axes.plot(times, known)
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        plt.close(figure)
