"""`polluxctl simulate`: JSON contract, table, page of plots, errors."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polluxd.cli import ctl
from polluxd.errors import ConfigError, PolluxError

TRACE = """name,time,application,num_replicas,batch_size
a,0,speech,2,40
b,30,vision-small,4,512
c,45,recommendation,1,32768
"""
FIGURES = {
    "avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s", "avg_restarts", "gpu_hours", "avg_efficiency",
    "finish_time_fairness", "decision_ms", "jobs",
}  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def command(*arguments):
    return CliRunner().invoke(ctl.app, ["simulate", *map(str, arguments)])


def test_json_table_and_plot(trace, tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    shown = command(
        trace, "--policy", "tiresias", "--policy", "pollux", "--nodes", 2, "--json", out, "--plot", plot
    )
    assert shown.exit_code == 0, shown.output
    assert "tiresias" in shown.output
    document = json.loads(out.read_text())
    assert list(document["policies"]) == ["tiresias", "pollux"]
    for result in document["policies"].values():
        assert result.keys() >= FIGURES
        assert result["jobs"].keys() == {"a", "b", "c"}
        assert result["avg_jct_s"] == pytest.approx(sum(result["jobs"].values()) / 3)
        assert result["finish_time_fairness"].keys() >= {"mean", "worst", "share_above_1"}
        assert result["decision_ms"].keys() == {"median", "max"}
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_generated_trace_and_a_log_need_no_other_file(tmp_path):
    shown = command("--generate", 3, "--policy", "fifo")
    assert shown.exit_code == 0, shown.output
    assert "on 16 x 4 GPUs. JCT is a job's time" in " ".join(shown.output.split()), (
        "the cluster, and the columns"
    )
    log = tmp_path / "log.csv"
    log.write_text("timestamp,duration,num_gpus\n2017-10-09 07:01:55,660,1\n")
    shown = command(log, "--policy", "fifo")
    assert "give --nodes and --gpus-per-node" in str(shown.exception)
    shown = command(log, "--policy", "fifo", "--nodes", 4, "--gpus-per-node", 4)
    assert "Trainings: 1, of 1 rows." in shown.output
    assert "the log has no states" in shown.output.replace("\n", " ").lower()


@pytest.mark.parametrize("policy", ["fifo", "pollux"])
def test_a_log_whose_times_span_centuries_is_an_error_in_words(tmp_path, policy):
    log = tmp_path / "log.csv"
    rows = "".join(f"{year}-10-09 07:01:55,660,1\n" for year in ("0001", "2017", "9999"))
    log.write_text("timestamp,duration,num_gpus\n" + rows)
    shown = command(log, "--policy", policy, "--nodes", 4, "--gpus-per-node", 4)
    assert isinstance(shown.exception, PolluxError)
    assert "is each time of submission in the trace right?" in str(shown.exception)


def test_the_scenario_reaches_the_result(tmp_path):
    out, scenario = tmp_path / "out.json", tmp_path / "scenario.toml"
    scenario.write_text("nodes_per_rack = 2\n[trace]\nhours = 1\n[cloud]\nleast = 1\nmost = 3\nprice = 2\n")
    shown = command("--generate", 3, "--policy", "fifo", "--scenario", scenario, "--seed", 5, "--json", out)
    assert shown.exit_code == 0, shown.output
    assert "COST" in shown.output
    document = json.loads(out.read_text())
    assert document["workload"] == "3 jobs generated over 1 h"
    assert document["scenario"]["cloud"]["most"] == document["scenario"]["nodes"] == 3
    assert document["scenario"]["seed"] == 5
    assert document["policies"]["fifo"]["cost"] == pytest.approx(
        2 * document["policies"]["fifo"]["node_hours"]
    )
    shown = command("--generate", 3, "--policy", "fifo", "--objective", "fair-share", "--json", out)
    assert "COST" not in shown.output
    assert json.loads(out.read_text())["scenario"]["policy"]["objective"] == "fair-share"


def test_output_of_sacct_is_recognised_and_its_first_jobs_can_be_taken(tmp_path):
    log, out, scenario = tmp_path / "october.txt", tmp_path / "out.json", tmp_path / "scenario.toml"
    row = "{}|2024-05-01T10:00:00|01:00:00|billing=8,gres/gpu=4,node=1\n"
    log.write_text("JobID|Submit|Elapsed|AllocTRES\n" + row.format(71) + row.format(72))
    scenario.write_text("trace.most_jobs = 1\n")
    shown = command(log, "--policy", "fifo", "--scenario", scenario, "--json", out)
    assert "Trainings: 2, of 2 rows." in shown.output
    assert "The first 1 are simulated" in shown.output
    found = json.loads(out.read_text())
    for assumed in ("tuned", "untuned"):
        assert [*found[assumed]["policies"]["fifo"]["jobs"]] == ["job-71"]
        assert found[assumed]["recorded_gpu_hours"] == 4


def test_a_log_says_how_many_jobs_are_elastic_and_warns_where_they_are_few(tmp_path):
    log, scenario = tmp_path / "october.txt", tmp_path / "scenario.toml"
    rows = [f"{n}|2024-05-01T{n:02}:00:00|00:10:00|gres/gpu=1\n" for n in range(20)]
    log.write_text("JobID|Submit|Elapsed|AllocTRES\n" + "".join(rows))
    said = command(log, "--policy", "fifo", "--nodes", 4, "--gpus-per-node", 4).output.replace("\n", " ")
    assert "Elastic: 20 of 20" in said
    assert "This rests on" not in said
    scenario.write_text("[trace]\nrigid_share = 1.0\nrigid_gpus = 1\nmost_jobs = 19\n")
    said = command(log, "--policy", "fifo", "--scenario", scenario).output
    assert "Elastic: 0 of 19" in said
    assert "This rests on 19 jobs: with fewer than 20" in said


def test_a_policy_of_ones_own_is_named_by_module_and_class(tmp_path, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2] / "contrib" / "examples" / "policy")
    out, mine = tmp_path / "out.json", "least_attained:LeastAttained"
    # Two policies run in processes of their own.
    shown = command("--generate", 8, "--policy", mine, "--policy", "fifo", "--nodes", 2, "--json", out)
    assert shown.exit_code == 0, shown.output
    assert [*json.loads(out.read_text())["policies"]] == [mine, "fifo"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return {job.number: ((0, 99),) for job in view.jobs}",
            "gave 99 GPUs of node 0, which has 4|gave 198",
        ),
        ("return {job.number: ((7, 1),) for job in view.jobs}", "expected at least 1 GPU of nodes 0 to 1"),
        ("return {job.number: ((0, -1),) for job in view.jobs}", "gave job 0 -1 GPUs"),
        ("return {1000: ((0, 1),)}", "placed job 1000, which is not in view.jobs"),
    ],
)
def test_a_policy_that_gives_what_is_not_there_is_refused(tmp_path, monkeypatch, body, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    head = "from polluxd.sim.engine import Policy\n\n\nclass Mine(Policy):\n    def decide(self, view):\n"
    (tmp_path / "mine.py").write_text(f"{head}        {body}\n")
    failed = command("--generate", 3, "--policy", "mine:Mine", "--nodes", 2)
    assert isinstance(failed.exception, ConfigError)
    assert re.search(message, str(failed.exception))


def test_only_one_source_of_jobs_is_taken(trace):
    for arguments in ((), (trace, "--generate", 3)):
        assert "one of them" in str(command(*arguments).exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nonsense"], "no such policy; there are .*pollux"),
        (["--policy", "no_such_module:Policy"], "No module named 'no_such_module'; expected MODULE:CLASS"),
        (["--policy", "json:loads"], "loads has no method decide"),
        (["--policy", ":"], "expected MODULE:CLASS"),
        (["--nodes", "0"], "simulate: nodes: .*got 0"),
        (["--objective", "speed"], "simulate: policy.objective: .*got 'speed'"),
        (["--scenario", "no-such.toml"], "no-such.toml: cannot be read"),
        (["--json", "no/such/folder.json"], "its folder does not exist"),
        (["--plot", "a" * 252 + ".png"], "File name too long: give another file"),
        (["--profiles", "no-such-folder"], "no such directory"),
    ],
)
def test_wrong_use_is_one_line(trace, arguments, message):
    failed = command(trace, *arguments)
    assert isinstance(failed.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise failed.exception


def test_files_without_an_end_are_refused(tmp_path):
    with (tmp_path / "hole.csv").open("w") as file:
        file.write("name,time,application,num_replicas,batch_size\na,0,")
        file.truncate(1 << 40)
    (tmp_path / "deep.toml").write_text(f"nodes = {'[' * 100_000}")
    for arguments in ((tmp_path / "hole.csv",), ("--generate", 3, "--scenario", tmp_path / "deep.toml")):
        failed = command(*arguments)
        assert "is not a CSV file" in str(failed.exception) or "not TOML" in str(failed.exception)


def test_a_job_larger_than_the_cluster_is_refused(trace, tmp_path):
    (tmp_path / "small.toml").write_text("nodes = 1\ngpus_per_node = 2\n")
    failed = command(trace, "--scenario", tmp_path / "small.toml")
    assert "line 3: num_replicas is 4 and the cluster has 2 GPUs" in str(failed.exception)
