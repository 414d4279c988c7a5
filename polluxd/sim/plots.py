"""One page of plots: completion times, use over time, fairness."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pollux.private_folder import write_named
from polluxd.errors import ConfigError


def page(results: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Write the page; the path's suffix names the format.

    Raises ConfigError where matplotlib is missing.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - the extra `sim`, needed for plots only
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install ./agent '.[sim]' in the source folder"
        ) from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(2, 2, figsize=(11.7, 8.3), layout="constrained")
    figure.suptitle(title)
    (jct, gpus), (efficiency, fair) = axes
    for name, result in results.items():
        mean = result["avg_jct_s"] / 3600
        times = np.sort(np.array(list(result["jobs"].values()))) / 3600
        jct.step(
            times, np.arange(1, times.size + 1) / times.size, where="post", label=f"{name} ({mean:.2f} h)"
        )
        line = np.array(result["timeline"], dtype=np.float64).reshape(-1, 4)
        gpus.step(line[:, 0] / 3600, line[:, 2], where="post", label=name, linewidth=0.8)
        busy = line[line[:, 2] > 0]
        efficiency.step(busy[:, 0] / 3600, busy[:, 3], where="post", label=name, linewidth=0.8)
        rho = np.sort(np.array([d["fairness"] for d in result["details"]]))
        fair.step(rho, np.arange(1, rho.size + 1) / rho.size, where="post", label=name)
    jct.set(
        xscale="log",
        xlabel="job completion time [h]",
        ylabel="share of jobs",
        title="Completion times (mean)",
        ylim=(0, 1.05),
    )
    gpus.set(xlabel="time [h]", ylabel="GPUs in use", title="GPUs")
    gpus.set_ylim(bottom=0)
    efficiency.set(xlabel="time [h]", ylabel="statistical efficiency", ylim=(0, 1.05), title="Efficiency")
    fair.set(xlabel="completion time / time alone on a fair share", ylabel="share of jobs", title="Fairness")
    fair.set(xlim=(0, 4), ylim=(0, 1.05))
    fair.axvline(1.0, color="grey", linewidth=0.8)
    jct.legend()
    try:
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=120, format=path.suffix[1:] or "png")
        write_named(path, drawn.getvalue())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--plot {path}: cannot be written ({error}); give a .png, .pdf or .svg path"
        ) from None
    finally:
        plt.close(figure)
