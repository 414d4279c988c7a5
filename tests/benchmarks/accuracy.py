"""Compare the accuracy of training under Pollux with plain training.

    python -m tests.benchmarks.accuracy [--seeds 10] [--examples digits_mlp ...] [--json FILE]

Each example trains with several seeds, both ways, and both ways end after the same statistical epochs.

Plain: the script alone, in one process, at its own batch size. Adaptive: the same script through the resizes
1 -> 4 -> 2 -> 8 ranks, with batch size and learning rate adapted. The ranks are real, over gloo, with a checkpoint and
a restart between two sizes. The resizes come at given shares of the progress. The emulated accelerator is fast here,
and larger batches pay on it.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import runpy
import signal
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import pollux.loop.session
from contrib.commit import COMMIT
from contrib.devcluster.processes import free_ports
from pollux.errors import PolluxAgentError
from tests.benchmarks.results import ROOT, at_most, parser_of, save

EXAMPLES = ROOT / "contrib" / "examples"
RESIZES = ((1, 0.15), (4, 0.45), (2, 0.7), (8, 1.0))
"""(ranks, share of the training's progress at which they are taken away)."""

ACCELERATOR = ["--alpha", "0.004", "--beta", "0.00002", "--sync", "0.004", "0.008"]

PATIENCE = 900.0

MARGINS = {"accuracy": 0.01, "loss": 0.03}
"""How much worse than plain training adaptive training may be."""


def _attach_until(share: float, log: Path) -> None:
    """Make `pollux.attach` log the batch sizes and drain at a given progress.

    The batch sizes go to `log`. The drain comes at `share` of the job's progress.
    """
    original = pollux.loop.session.attach

    def attach(*args: Any, **kwargs: Any) -> pollux.loop.session.Job:
        job = original(*args, **kwargs)

        def watch() -> None:
            seen = 0
            while True:
                time.sleep(0.01)
                with contextlib.suppress(PolluxAgentError):
                    if job.batch_size != seen:
                        seen = job.batch_size
                        with log.open("a") as file:
                            file.write(f"{job.world.size} {seen}\n")
                    if job.progress.examples >= share * (job.progress.target or 1e18):
                        break
            if share < 1.0:
                job.coordinator.drains.order(job.world.size)

        if job.is_main:
            threading.Thread(target=watch, daemon=True).start()
        return job

    pollux.loop.session.attach = attach


def _rank(script: Path, arguments: list[str], env: dict[str, str], share: float, log: Path) -> None:
    os.environ.update(env)
    sys.argv = [str(script), *arguments]
    _attach_until(share, log)
    with contextlib.redirect_stdout(io.StringIO()):
        found = runpy.run_path(str(script), run_name="__main__")
    if found["job"].is_main:
        _add_loss(found)
    os._exit(0)


def _add_loss(found: dict[str, Any]) -> None:
    """Write the held-out loss beside the script's own result."""
    result: Path = found["args"].result
    x, y = found["data"].test.tensors
    model = found["job"].module.eval()
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(model(x), y))
    result.write_text(json.dumps({**json.loads(result.read_text()), "loss": loss}))


def _run(
    script: Path, arguments: list[str], ranks: int, share: float, folder: Path, env: dict[str, str]
) -> None:
    """Make one attempt, until the script ends or has drained.

    A drained attempt is ended as polluxd would end it.
    """
    context = multiprocessing.get_context("fork")
    port = str(free_ports(1)[0])
    checkpoints = folder / "checkpoints"
    before = {p.name for p in checkpoints.glob("checkpoint-*")}
    processes: list[BaseProcess] = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", **env}
        process = context.Process(target=_rank, args=(script, arguments, place, share, folder / "batches"))
        process.start()
        processes.append(process)
    end = time.monotonic() + PATIENCE
    while any(p.is_alive() for p in processes):
        if share < 1.0 and {p.name for p in checkpoints.glob("checkpoint-*")} - before:
            break
        if time.monotonic() > end or any(p.exitcode for p in processes):
            raise SystemExit(f"{script.name} on {ranks} ranks failed or hung")
        time.sleep(0.02)
    for process in reversed(processes):
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    if share < 1.0 and not {p.name for p in checkpoints.glob("checkpoint-*")} - before:
        raise SystemExit(f"{script.name} on {ranks} ranks ended before it was to be resized")


def plain(script: Path, seed: int) -> dict[str, Any]:
    """Run the script as plain PyTorch does."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        env = {"POLLUX_ADAPTIVE": "no"}
        _run(script, ["--seed", str(seed), "--result", str(result)], 1, 1.0, Path(folder), env)
        return dict(json.loads(result.read_text()))


def adaptive(script: Path, seed: int) -> dict[str, Any]:
    """Run the script through all resizes."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        arguments = ["--seed", str(seed), "--result", str(result), *ACCELERATOR]
        env = {"POLLUX_ADAPTIVE": "yes", "POLLUX_CHECKPOINT_DIR": f"{folder}/checkpoints"}
        for ranks, share in RESIZES:
            _run(script, arguments, ranks, share, Path(folder), env)
        found = dict(json.loads(result.read_text()))
        found["batches"] = (Path(folder) / "batches").read_text().split("\n")[:-1]
        return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--examples", nargs="+", default=["digits_mlp", "tumours_mlp"])
    parser.add_argument("--json", type=Path, help="write all results there")
    parser.add_argument("--markdown", type=Path, help="write the tables there, as a page")
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))  # the scripts' own
    everything: dict[str, Any] = {}
    lines = ["| example | mean of | plain | adaptive | difference | 95 % bound | margin |", "|" + "---|" * 7]
    print(HEAD, flush=True)
    details = [HEAD]
    for name in options.examples:
        script = EXAMPLES / f"{name}.py"
        pairs = []
        for seed in range(options.seeds):
            a, b = plain(script, seed), adaptive(script, seed)
            pairs.append((a, b))
            largest = max(int(line.split()[1]) for line in b["batches"])
            details.append(
                f"| {name} | {seed} | {a['accuracy']:.4f} | {b['accuracy']:.4f} | {a['loss']:.4f} | {b['loss']:.4f} "
                f"| {a['optimizer_steps']} | {b['optimizer_steps']} | {largest} ({a['batch_size']}) |"
            )
            print(details[-1], flush=True)
        everything[name] = [{"plain": a, "adaptive": b} for a, b in pairs]
        lines += [_difference(name, key, pairs) for key in MARGINS]
    print("\n" + "\n".join(lines))
    if options.json is not None:
        save(options.json, everything)
    if options.markdown is not None:
        options.markdown.write_text(page_of(options.seeds, lines, details))


HEAD = (
    "| example | seed | accuracy, plain | adaptive | loss, plain | adaptive | steps | adaptive | largest (M0) |\n"
    + "|"
    + "---|" * 9
)


def _difference(name: str, key: str, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Format a row that compares adaptive with plain training: means over the seeds, and a bound of the loss."""
    means = [statistics.mean(r[key] for r in side) for side in zip(*pairs, strict=True)]
    worse = [(a[key] - b[key]) * (1 if key == "accuracy" else -1) for a, b in pairs]
    bound = at_most(worse)
    kept = "kept" if bound < MARGINS[key] else "not kept"
    return (
        f"| {name} | {key} | {means[0]:.4f} | {means[1]:.4f} | {means[1] - means[0]:+.4f} "
        f"| worse by {bound:.4f} at most | {MARGINS[key]}: {kept} |"
    )


def page_of(seeds: int, lines: list[str], details: list[str]) -> str:
    """Return the text of the committed page."""
    return f"""# Accuracy under move and batch adaptation

`make bench-accuracy` (some 12 minutes on two quiet cores) trains each example twice per seed: plainly, in one process
at its own batch size, and through the resizes 1 -> 4 -> 2 -> 8 ranks with batch size and learning rate adapted,
checkpoint and restart in between. Equal statistical epochs each way; accuracy and loss are of held-out examples:
359 digits, 113 tumours, so that one example is 0.003 or 0.009 of accuracy. {seeds} seeds, torch {torch.__version__},
commit {COMMIT}.

The margin: with 95 % confidence adaptive training's accuracy is worse by less than {MARGINS["accuracy"]}, and its
loss by less than {MARGINS["loss"]}.

""" + "\n".join([*lines, "", *details, ""])


if __name__ == "__main__":
    main()
