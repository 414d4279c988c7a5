"""`polluxctl simulate`: JSON contract, table, page of plots, errors."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from polluxd.cli import ctl
from polluxd.errors import ConfigError

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
    shown = command("--generate", 3, "--hours", 1, "--policy", "fifo")
    assert shown.exit_code == 0, shown.output
    log = tmp_path / "log.csv"
    log.write_text("timestamp,duration,num_gpus\n2017-10-09 07:01:55,660,1\n")
    shown = command(log, "--policy", "fifo")
    assert "1 jobs, taken to train as the nearest in duration" in shown.output


def test_scenario_options_reach_the_result(tmp_path):
    out = tmp_path / "out.json"
    shown = command(
        "--generate", 3, "--hours", 1, "--policy", "fifo", "--autoscale", "1,3", "--node-price", 2,
        "--nodes-per-rack", 2, "--rack-slowdown", 0.5, "--json", out,
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert "COST" in shown.output
    document = json.loads(out.read_text())
    assert document["scenario"]["cloud"]["most"] == document["scenario"]["nodes"] == 3
    assert document["policies"]["fifo"]["cost"] == pytest.approx(
        2 * document["policies"]["fifo"]["node_hours"]
    )
    shown = command("--generate", 3, "--hours", 1, "--policy", "fifo", "--gpu-types", "t4:1:4", "--json", out)
    assert "COST" not in shown.output
    assert json.loads(out.read_text())["scenario"]["groups"][0]["gpu_type"] == "t4"


def test_only_one_source_of_jobs_is_taken(trace):
    for arguments in ((), (trace, "--generate", 3)):
        assert "one of them" in str(command(*arguments).exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nonsense"], "no such policy; there are .*pollux"),
        (["--restart-range", "9"], "expected LOW,HIGH"),
        (["--power", "2"], "power: expected a number up to 1"),
        (["--gpu-types", "t4:4"], "expected NAME:NODES:GPUS_PER_NODE"),
        (["--autoscale", "4,2"], "expected LEAST,MOST nodes"),
        (["--json", "no/such/folder.json"], "its folder does not exist"),
        (["--profiles", "no-such-folder"], "no such directory"),
        (["--nodes", "1", "--gpus-per-node", "2"], "line 3: num_replicas is 4 and the cluster has 2 GPUs"),
    ],
)
def test_wrong_use_is_one_line(trace, arguments, message):
    failed = command(trace, *arguments)
    assert isinstance(failed.exception, ConfigError)
    with pytest.raises(ConfigError, match=message):
        raise failed.exception


def test_every_row_of_the_page_has_its_flags(trace, tmp_path):
    costs, out = tmp_path / "costs.toml", tmp_path / "out.json"
    costs.write_text("requeue = 3\n")
    flags = ("--objective", "completion-time", "--kappa", 3, "--no-priors", "--no-remaining-work")
    shown = command(trace, "--nodes", 2, *flags, "--move-costs", costs, "--lengths", "lies", "--json", out)
    assert shown.exit_code == 0, shown.output
    scenario = json.loads(out.read_text())["scenario"]
    assert scenario["pollux"]["objective"] == "completion-time"
    assert scenario["pollux"]["kappa"] == 3
    assert not scenario["pollux"]["remembers"]
    assert not scenario["pollux"]["remaining_work"]
    assert scenario["moves"]["requeue"] == 3
    assert scenario["lengths"] == "lies"


@pytest.mark.parametrize("flags", [("--objective", "speed"), ("--lengths", "long")])
def test_an_unknown_objective_or_kind_of_length_is_refused(trace, flags):
    shown = command(trace, *flags)
    assert isinstance(shown.exception, ConfigError)
    assert flags[1] in str(shown.exception)
