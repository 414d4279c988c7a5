"""A real Prometheus scrapes a real polluxd: `make metrics-test`.

Slurm, Postgres, polluxd, the trainings and Prometheus are real. The alert rules are tested by promtool, and every
panel of the dashboard is asked of Prometheus.
"""

from __future__ import annotations

import json
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import free_ports, wait_until
from contrib.grafana.__main__ import dashboard
from tests.integration.conftest import scratch
from tests.integration.loop.conftest import Loop, loop_cluster, polluxd

__all__ = ["loop_cluster", "scratch"]

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]
CONTRIB = Path(__file__).parents[2] / "contrib"
RULES = CONTRIB / "prometheus" / "polluxd.rules.yml"


def until(holds: Callable[[], object], why: str) -> None:
    wait_until(holds, 120, why, every_s=0.5)


class Prometheus:
    """A Prometheus of its own, on loopback, that scrapes every second."""

    def __init__(self, folder: Path, target: str) -> None:
        (self.port,) = free_ports(1)
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
            f"rule_files: [{json.dumps(str(RULES))}]\n"
            "scrape_configs:\n"
            f"  - {{job_name: polluxd, static_configs: [{{targets: [{json.dumps(target)}]}}]}}\n"
        )
        self._log = (folder / "prometheus.log").open("wb")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{self.port}",
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def get(self, path: str, **words: str) -> Any:
        query = urllib.parse.urlencode(words)
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{query}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        try:
            found = self.get("query", query=expression)["result"]
        except OSError:
            return []  # not up yet
        return [(series["metric"], float(series["value"][1])) for series in found]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="module")
def watched(
    loop_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Loop, Prometheus, str]]:
    """One polluxd that serves metrics, and a Prometheus that scrapes it."""
    folder = tmp_path_factory.mktemp("metrics")
    folder.chmod(0o755)
    (port,) = free_ports(1)
    listen = f"127.0.0.1:{port}"
    daemon = polluxd(loop_cluster, folder)
    text = daemon.config.read_text()
    assert 'listen = ""' in text
    daemon.config.write_text(
        text.replace('listen = ""', f'listen = "{listen}"') + '\n[log]\nformat = "json"\n'
    )
    daemon.start()
    loop = Loop(loop_cluster, daemon, folder)
    prometheus = Prometheus(folder, listen)
    try:
        yield loop, prometheus, listen
        loop.cancel_all()
    finally:
        prometheus.close()
        daemon.stop()
        loop.store.close()


def test_promtool_accepts_the_rules_and_their_tests() -> None:
    for words in (["check", "rules", RULES.name], ["test", "rules", "polluxd.rules.test.yml"]):
        done = subprocess.run(
            ["promtool", *words], cwd=RULES.parent, capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_sees_a_training_start_and_polluxd_end(watched: tuple[Loop, Prometheus, str]) -> None:
    loop, prometheus, listen = watched
    until(lambda: prometheus.ask("polluxd_is_leader == 1"), "no leader in Prometheus")
    with urllib.request.urlopen(f"http://{listen}/metrics", timeout=30) as answer:
        exposed = answer.read()
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=exposed, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr

    job = loop.train("evil", 1000)
    until(
        lambda: prometheus.ask('polluxd_moves_total{path="start", result="completed"} >= 1'),
        "no start counted",
    )
    until(lambda: prometheus.ask('polluxd_jobs{state="RUNNING"} == 1'), "no job runs")
    until(lambda: prometheus.ask('polluxd_reports{state="fresh"} == 1'), "no report")

    def held() -> int:
        return sum(loop.job(job).gpus_per_node_held.values())

    def agree() -> bool:
        # polluxd may move the job between two looks: Slurm's answer has to be the same before and after Prometheus'.
        before, seen = held(), prometheus.ask('polluxd_gpus{state="pollux"}')
        return bool(seen) and 0 < before == seen[0][1] == held()

    until(agree, "Prometheus never shows the GPUs that Slurm says")
    assert {target["health"] for target in prometheus.get("targets")["activeTargets"]} == {"up"}

    # Everything that the dashboard shows is there, and nobody's text is in a label.
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            until(lambda e=target["expr"]: prometheus.ask(e), f"panel {panel['title']} shows nothing")
    labels = prometheus.get("labels")
    assert set(labels) <= {
        "__name__", "instance", "job", "le", "version", "python_version", "result", "phase", "path", "call", "kind",
        "state", "step", "reason", "objective", "alertname", "alertstate", "severity",
    }  # fmt: skip
    for label in labels:
        assert not [value for value in prometheus.get(f"label/{label}/values") if "evil" in value]

    # The log of the same polluxd: every line is one JSON object, and the move has its ids.
    lines = [json.loads(line) for line in loop.daemon.log.read_text().splitlines()]
    assert any(line.get("job") == job and "move" in line for line in lines)
    assert any("cycle" in line for line in lines)

    rules = prometheus.get("rules")["groups"][0]["rules"]
    assert {rule["health"] for rule in rules} == {"ok"}
    loop.cancel_all()
    loop.daemon.stop()
    until(lambda: prometheus.ask('ALERTS{alertname="PolluxdDown"}'), "polluxd ended, and no alert is pending")
    until(lambda: prometheus.ask('ALERTS{alertname="PolluxdNobodyLeads"}'), "no alert that nobody leads")
