"""Make the pictures of the documentation: `make docs-images`.

It runs `make compare` (real Slurm, Postgres and trainings), and asks the simulator how objectives share a cluster.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from contrib.demo.gain import COMPARISON
from polluxd.sim.plots import page

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m contrib.docs_images", description=__doc__)
    parser.add_argument("--demo-out", type=Path, help="take the results of an earlier demo from this folder")
    options = parser.parse_args()
    demo: Path = options.demo_out or ROOT / "demo-out"
    if options.demo_out is None:
        subprocess.run(
            [sys.executable, "-m", "contrib.demo", "--compare", "--out", str(demo)], cwd=ROOT, check=True
        )
    IMAGES.mkdir(exist_ok=True)
    for name in ("compare.png", "timeline.png"):
        shutil.copy(demo / name, IMAGES / name)
    runs = json.loads((demo / "compare.json").read_text())
    figures = {name: part for name, part in runs.items() if name != "jobs"}
    COMPARISON.write_text(json.dumps(figures, indent=1) + "\n")
    fairness(IMAGES / "fairness.png")


OBJECTIVES = {
    "completion-time": ("completion-time", "-1"),
    "fair-share, power 1": ("fair-share", "1"),
    "fair-share, power -1": ("fair-share", "-1"),
    "fair-share, power -inf": ("fair-share", "-inf"),
}
"""What administrator-guide/sharing.md compares: objective and power of a scenario."""


def fairness(picture: Path) -> None:
    """Draw one generated workload under several objectives."""
    program = str(Path(sys.executable).parent / "polluxctl")
    results = {}
    with tempfile.TemporaryDirectory(prefix="pollux-images-") as folder:
        written = Path(folder) / "results.json"
        scenario = Path(folder) / "scenario.toml"
        for name, (objective, power) in OBJECTIVES.items():
            scenario.write_text(
                f'nodes = 8\nseed = 1\npolicy.power = {power}\npolicy.objective = "{objective}"\ntrace.hours = 4\n'
            )
            command = [program, "simulate", "--generate", "60", "--scenario", str(scenario)]
            subprocess.run([*command, "--json", str(written)], check=True)
            results[name] = json.loads(written.read_text())["policies"]["pollux"]
    page(results, "60 generated trainings on 32 GPUs under polluxd's objectives", picture)


if __name__ == "__main__":
    main()
