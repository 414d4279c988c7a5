"""`polluxctl decisions` and `settings preview` on a small snapshot."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.goodput import NoiseScale
from polluxd.cli.decisions import differences
from polluxd.config.settings import PolicySettings
from polluxd.model import Allocation, JobSpec, Placement, Plan, Snapshot, SnapshotJob
from polluxd.model.snapshot_json import encode
from polluxd.policy import decide
from polluxd.sim.policies.autoscale import desired_nodes
from polluxd.site_report.shadow import BLOCKS, SAMPLES, gain, plans, sampled, speedups
from polluxd.slurm.shares import ShareWeights
from polluxd.store import CycleSummary, CycleView
from tests.build import job as build_job
from tests.build import nodes, report

from .conftest import MemoryStore


def job(number: int, account: str, kind: float) -> SnapshotJob:
    measured = report(explored=8, noise=NoiseScale(1.0, kind), explored_nodes=2)
    return build_job(number, JobSpec(max_gpus=8), account=account, report=measured)


SNAPSHOT = Snapshot("dev", 1e9, nodes(2), (job(1, "vision", 0.1), job(2, "nlp", 30.0), job(3, "nlp", 100.0)))


class Recorded(MemoryStore):
    """A store that recorded one cycle, 42."""

    plan: Plan = decide(SNAPSHOT)
    solver: str | None = "counts"
    note = ""

    @property
    def data(self) -> Any:
        return self.newest[1] if self.newest else None

    def cycle(self, cycle_id: int) -> CycleView | None:
        plan, solver = self.plan, self.plan.solver if self.solver else None
        bounds = (plan.objective, plan.upper_bound, plan.gap)
        view = CycleView(42, 5, "enforce", 1e9, self.note, *bounds, solver, {"decide_s": 0.01})
        return view if cycle_id == 42 else None

    def cycles(self, newest: int) -> list[CycleSummary]:
        found, plan = self.cycle(42), self.plan
        assert found is not None
        changed = sum(a.changed for a in plan.allocations)
        return [CycleSummary(found, len(plan.allocations), changed, self.data is not None)][:newest]

    def cycle_snapshot(self, cycle_id: int) -> Any:
        return self.data

    def allocations(self, cycle_id: int, *, made_in_it: bool = False) -> list[Allocation]:
        return list(self.plan.allocations)


@pytest.fixture
def recorded(monkeypatch):
    made = Recorded(current=SNAPSHOT.settings, newest=(42, json.loads(json.dumps(encode(SNAPSHOT)))))
    monkeypatch.setattr("polluxd.cli.access.open_store", lambda _config: (made, PolicySettings()))
    return made


def test_a_replay_is_the_recorded_plan(recorded, polluxctl):
    said = polluxctl("decisions", "replay", "42")
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("cycle 42: the same plan, bit for bit: 3 jobs, objective ")
    found = json.loads(polluxctl("decisions", "replay", "42", "--json").out)
    assert (found["identical"], found["jobs"], found["differences"]) == (True, 3, [])
    assert found["objective"] == recorded.plan.objective


def test_a_difference_in_the_last_bit_is_told(recorded, polluxctl):
    first, *others = recorded.plan.allocations
    other = replace(first, goodput=math.nextafter(first.goodput, math.inf), reason="because")
    recorded.plan = replace(recorded.plan, allocations=(other, *others))
    said = polluxctl("decisions", "replay", "42")
    assert said.status == 1
    assert "another plan, in 2 values" in said.out
    assert "because" in said.out
    found = json.loads(polluxctl("decisions", "replay", "42", "--json").out)
    assert found["identical"] is False
    assert [(d["job_id"], d["what"]) for d in found["differences"]] == [(1, "goodput"), (1, "reason")]
    assert found["differences"][0]["recorded"] == other.goodput
    assert found["differences"][0]["replayed"] == first.goodput


def test_each_part_of_a_plan_is_compared(recorded):
    plan, cycle = recorded.plan, recorded.cycle(42)
    assert differences(cycle, plan.allocations, plan) == []
    first = plan.allocations[0]
    assert first.explanation is not None
    for what, other in (
        ("placement", replace(first, placement=Placement(("elsewhere",), 1))),
        ("speedup", replace(first, speedup=first.speedup + 1)),
        ("batch size", replace(first, batch_size=1)),
        ("changed", replace(first, changed=not first.changed)),
        ("explanation: price", replace(first, explanation=replace(first.explanation, price=-1.0))),
    ):
        (found,) = differences(cycle, (other, *plan.allocations[1:]), plan)
        assert (found["job_id"], found["what"]) == (1, what)
    for what, changed in (
        ("objective", replace(cycle, objective=None)),
        ("upper bound", replace(cycle, upper_bound=0.0)),
        ("solver", replace(cycle, solver="luck")),
    ):
        (found,) = differences(changed, plan.allocations, plan)
        assert (found["job_id"], found["what"]) == (None, what)
    (missing,) = differences(cycle, plan.allocations[1:], plan)
    assert (missing["what"], missing["recorded"], missing["replayed"]) == ("decision", "none", "made")


def test_what_cannot_be_replayed_says_why_in_one_line(recorded, polluxctl):
    recorded.newest = None
    for words, told in (
        (("41",), "cycle 41 is not recorded"),
        (("42",), "the snapshot of cycle 42 is not kept any more"),
    ):
        said = polluxctl("decisions", "replay", *words)
        assert said.status == 1
        assert told in said.err
        assert said.err.count("\n") == 1
    recorded.newest, recorded.solver, recorded.note = (42, {}), None, "Slurm is away"
    assert "nothing was decided in cycle 42: Slurm is away" in polluxctl("decisions", "replay", "42").err
    recorded.solver = "counts"
    assert (
        "the stored snapshot cannot be read: Snapshot lacks cluster"
        in polluxctl("decisions", "replay", "42").err
    )


def test_the_list_says_what_can_be_replayed(recorded, polluxctl):
    (row,) = json.loads(polluxctl("decisions", "list", "--json").out)
    assert (row["cycle"], row["jobs"], row["replayable"], row["decide_s"]) == (42, 3, True, 0.01)
    recorded.newest = None
    said = polluxctl("decisions", "list", "-n", "3")
    assert said.out.splitlines()[1].split()[-3:] == ["10ms", "no", "-"]


def test_the_gain_needs_two_decisions_and_is_a_row(recorded, polluxctl, monkeypatch):
    assert "expected two kept decisions" in polluxctl("decisions", "gain").err
    (one,) = recorded.cycles(1)
    later = replace(one, cycle=replace(one.cycle, started_at=one.cycle.started_at + 60))
    monkeypatch.setattr(recorded, "cycles", lambda _newest: [later, one])
    (row,) = json.loads(polluxctl("decisions", "gain", "--json").out)
    assert (row["mode"], row["decisions"], row["held"]) == ("enforce", 1, 0.0)
    assert row["gained_hours"] == pytest.approx(sum(a.speedup for a in recorded.plan.allocations) / 60)


def test_a_preview_is_the_two_decisions_and_changes_nothing(recorded, polluxctl):
    said = polluxctl("settings", "preview", "--power", "1", "--account-weight", "vision=4", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    wished = replace(SNAPSHOT, settings=PolicySettings(power=1.0, account_weights={"vision": 4.0}))
    plans = decide(SNAPSHOT), decide(wished)
    assert [[j["gpus_before"], j["gpus_after"]] for j in found["jobs"]] == [
        [plan.of(n).placement.gpus for plan in plans] for n in (1, 2, 3)
    ]
    assert [j["speedup_after"] for j in found["jobs"]] == [plans[1].of(n).speedup for n in (1, 2, 3)]
    assert plans[0].allocations != plans[1].allocations
    assert found["before"]["objective"] == plans[0].objective
    assert (found["settings_after"]["power"], found["settings_before"]["power"]) == (1.0, -1.0)
    assert recorded.current == PolicySettings()


def test_weights_are_compared_with_slurms_shares_and_set(recorded, polluxctl, monkeypatch):
    recorded.current = PolicySettings(account_weights={"vision": 2.0, "gone": 3.0})
    shares = ShareWeights({"vision": 1.5, "nlp": 0.5}, {"bob": 1.0}, frozenset({"ada"}))
    monkeypatch.setattr("polluxd.cli.settings.read_shares", lambda _ask, _cluster: shares)
    loaded = SimpleNamespace(slurm=SimpleNamespace(conf=None, cluster="dev"))
    monkeypatch.setattr("polluxd.cli.access.configuration", lambda _config: loaded)
    monkeypatch.setattr("polluxd.cli.access.who", lambda: "root")
    found = {row["name"]: row for row in json.loads(polluxctl("settings", "slurm-shares", "--json").out)}
    assert {name: (row["weight"], row["by_share"], row["remark"]) for name, row in found.items()} == {
        "gone": (3.0, None, "unknown to slurmdbd"),
        "nlp": (1.0, 0.5, "differs"),
        "vision": (2.0, 1.5, "differs"),
        "ada": (1.0, None, "share differs by account: --set leaves this weight"),
        "bob": (1.0, 1.0, ""),
    }
    assert recorded.current.account_weights == {"vision": 2.0, "gone": 3.0}, "nothing is set without --set"
    assert polluxctl("settings", "slurm-shares", "--set").status == 0
    assert recorded.current.account_weights == {"vision": 1.5, "gone": 3.0, "nlp": 0.5}
    assert recorded.current.user_weights == {"bob": 1.0}


def test_a_preview_in_words(recorded, polluxctl):
    said = polluxctl("settings", "preview", "--account-ceiling", "nlp=2")
    assert "With the jobs and nodes of cycle 42; nothing is changed" in said.out
    assert "least speedup: " in said.out
    held = {
        line.split()[0]: line.split()[5:7] for line in said.out.splitlines() if line.strip()[:1].isdigit()
    }
    assert sum(int(held[n][0]) for n in "23") > sum(int(held[n][1]) for n in "23") == 2


def test_a_preview_of_fairness_per_user(recorded, polluxctl):
    owners = {1: "ann", 2: "mallory", 3: "mallory"}
    jobs = tuple(replace(j, user=owners[j.job_id]) for j in SNAPSHOT.jobs)
    recorded.newest = (42, encode(replace(SNAPSHOT, jobs=jobs)))
    said = polluxctl("settings", "preview", "--per", "user", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert (found["settings_before"]["fairness_per"], found["settings_after"]["fairness_per"]) == (
        "job",
        "user",
    )
    ann = next(j for j in found["jobs"] if j["user"] == "ann")
    assert ann["gpus_before"] < ann["gpus_after"] == 4
    assert "expected" in polluxctl("settings", "preview", "--per", "group").err


def test_a_preview_without_anything_to_try_or_to_try_it_on(recorded, polluxctl):
    assert "nothing to set" in polluxctl("settings", "preview").err
    recorded.newest = None
    said = polluxctl("settings", "preview", "-p", "0")
    assert (said.status, said.err.count("\n")) == (1, 1)
    assert "no snapshot is stored yet" in said.err


def test_recommend_nodes_shows_the_size_that_the_policy_wishes_for(recorded, polluxctl):
    said = polluxctl("recommend-nodes", "--least", "1", "--most", "6", "--json")
    assert said.status == 0, said.err
    found, wished = json.loads(said.out), desired_nodes(SNAPSHOT, least=1, most=6)
    assert (found["desired"], found["utility"], found["reason"]) == (
        wished.nodes,
        wished.utility,
        wished.reason,
    )
    assert found["nodes"] == len(SNAPSHOT.nodes)
    assert [(t["nodes"], t["utility"]) for t in found["tried"]] == list(wished.tried)
    words = polluxctl("recommend-nodes", "--least", "1", "--most", "6").out
    assert f"{wished.reason}." in words
    assert f"Desired: {wished.nodes} node" in words
    assert (found["jobs"], "This rests on 3 jobs: with fewer than 20" in words) == (3, True)
    forced = polluxctl("recommend-nodes", "--least", "5", "--most", "5", "--json")
    assert json.loads(forced.out)["desired"] == 5
    assert polluxctl("recommend-nodes", "--least", "3", "--most", "2").status == 2
    recorded.newest = None
    assert "no snapshot is stored yet" in polluxctl("recommend-nodes").err


def test_rented_nodes_are_recommended_and_their_cost_previewed_by_the_daemon_s_rule(recorded, polluxctl):
    off = tuple(
        replace(n, name=f"c{n.name}", power="off", features=frozenset({"p4"})) for n in SNAPSHOT.nodes
    )
    settings = replace(SNAPSHOT.settings, cloud_prices={"p4": 1.5}, cloud_hour_value=1e6)
    rented = replace(SNAPSHOT, nodes=(*SNAPSHOT.nodes, *off), settings=settings)
    recorded.newest = (42, encode(rented))
    used = {name for a in decide(rented).allocations for name in a.placement.nodes if name.startswith("c")}
    assert used
    found = json.loads(polluxctl("recommend-nodes", "--json").out)
    assert found["rented"] == [{"type": "p4", "price": 1.5, "nodes": len(off), "desired": len(used)}]
    assert found["cost_per_hour"] == 1.5 * len(used)
    assert f"p4: {len(used)} of {len(off)} nodes, 1.5 an hour each" in polluxctl("recommend-nodes").out
    said = polluxctl("settings", "preview", "--cloud-price", "p4=2", "--cloud-hour-value", "1000000")
    assert f"cost of the rented nodes in use, per hour: 0.0 before, {2.0 * len(used)} after" in said.out


MEASURED = report(explored=8, noise=NoiseScale(1.0, 30.0), explored_nodes=2)
WAITING = Snapshot(
    "dev", 1e9, nodes(2), tuple(build_job(n, JobSpec(max_gpus=8), report=MEASURED) for n in (1, 2))
)


def held(*placements: Placement) -> Snapshot:
    return replace(
        WAITING, jobs=tuple(replace(j, placement=p) for j, p in zip(WAITING.jobs, placements, strict=True))
    )


def test_waiting_jobs_have_nothing_now():
    now, planned = speedups(plans(WAITING))
    assert now == 0.0
    assert planned == math.fsum(a.speedup for a in decide(WAITING).allocations) > 0


def test_jobs_that_hold_what_is_decided_gain_nothing():
    plan = decide(WAITING)
    now, planned = speedups(plans(held(*(a.placement for a in plan.allocations))))
    assert now == pytest.approx(planned)


def test_jobs_on_fewer_gpus_than_decided_gain():
    now, planned = speedups(plans(held(Placement(("n1",), 1), Placement(("n2",), 1))))
    assert 0 < now < planned


def test_the_sum_weighs_each_decision_by_its_time():
    found = gain([(100.0, 1.0, 2.0), (300.0, 1.0, 4.0)])
    assert found is not None
    assert (found.decisions, found.hours) == (2, pytest.approx(400 / 3600))
    assert (found.held, found.planned) == (1.0, pytest.approx((2 * 100 + 4 * 300) / 400))
    assert found.gained_hours == pytest.approx((1 * 100 + 3 * 300) / 3600)
    assert found.error is None, "two decisions show no spread"
    assert gain([]) is None


def decided(*cycles: tuple[float, str]) -> list[CycleView]:
    """Cycles at so many seconds, in a mode."""
    bounds = (1.0, 1.0, 0.0, "counts", {})
    return [CycleView(n, 5, mode, at, "", *bounds) for n, (at, mode) in enumerate(cycles, 1)]


def test_a_sample_stands_for_all_the_time():
    sample = sampled(decided(*((60.0 * n, "observe") for n in range(10_001))), "observe")
    assert len(sample) == SAMPLES
    assert sum(seconds for _, seconds in sample) == 600_000.0
    assert {seconds for _, seconds in sample} == {50 * 60.0}


def test_the_time_that_polluxd_did_not_run_does_not_count():
    assert [seconds for _, seconds in sampled(decided((0.0, "observe"), (1e6, "observe")), "observe")] == [
        600.0
    ]
    assert sampled(decided((0.0, "observe")), "observe") == []


def test_decisions_in_another_mode_do_not_count():
    times = decided(
        (0.0, "observe"), (60.0, "enforce"), (120.0, "enforce"), (180.0, "observe"), (240.0, "observe")
    )
    assert [(cycle.id, seconds) for cycle, seconds in sampled(times, "observe")] == [(1, 60.0), (4, 60.0)]


def test_the_error_is_the_spread_of_blocks():
    blocks = [n % 2 for n in range(BLOCKS) for _ in range(7)]
    found = gain([(60.0, 1.0, 1.0 + won) for won in blocks])
    assert found is not None
    # Ten means, five of them 0 and five 1: standard deviation sqrt(10/4/9); Student's t is 2.262.
    assert found.error == pytest.approx(2.262 * math.sqrt(2.5 / 9) / math.sqrt(10))
