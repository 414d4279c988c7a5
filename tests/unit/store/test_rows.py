"""Between rows and the model: what is refused at the boundary."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import pytest

from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError, ReportError
from polluxd.store import rows
from polluxd.store.rows import setting_to_json, settings_from_rows
from tests.build import report_row

NOW = 1_700_000_000.0


def test_a_sound_row():
    at = datetime.fromtimestamp(NOW, UTC)
    report = rows.report(report_row(received_at=at, attempt=1, checkpointed=True, times={"first_step_at": 5}))
    assert (report.at, report.attempt, report.first_step_at, report.checkpointed) == (NOW, 1, 5.0, True)
    assert (report.params.gamma, report.noise.var, report.limits.maximum) == (2.0, 3.0, 64)


@pytest.mark.parametrize(
    "edited",
    [
        {"limits": {"initial": 32, "maximum": 16, "local_min": 1, "local_max": 8}},
        {"params": {"alpha_grad": 1.0}},
        {"goodput": "many"},
        {"limits": None},
    ],
)
def test_a_row_edited_by_hand_is_refused_with_the_job_named(edited):
    with pytest.raises(ReportError, match="job 7"):
        rows.report(report_row(**edited))


def test_what_polluxd_knows_beside_a_report_counts():
    found = rows.report(report_row(known_gpus=1, known_nodes=1, drained=True))
    assert (found.prior_gpus, found.prior_nodes, found.checkpointed) == (1, 1, True)


@pytest.mark.parametrize("power", [-1, 0.5, 1, -math.inf, "-inf"])
def test_powers_travel_as_json(power):
    stored = json.loads(setting_to_json("power", power))
    assert settings_from_rows({"power": stored}, PolicySettings()).power == float(power)


def test_a_setting_of_a_later_version_is_passed_over():
    assert settings_from_rows({"colour": 1, "paused": True}, PolicySettings()) == PolicySettings(paused=True)


def test_an_unusable_value_in_the_database_costs_that_value_only(caplog):
    stored = {"hysteresis": 7, "user_weights": {"ada": 2}}
    found = settings_from_rows(stored, PolicySettings(hysteresis=0.2))
    assert found == PolicySettings(hysteresis=0.2, user_weights={"ada": 2.0})
    assert "setting hysteresis: expected a share from 0 to 1, got 7" in caplog.text


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("power", "max", "up to 1"),
        ("paused", 1, "true or false"),
        ("user_weights", {"a": math.inf}, "above 0"),
        ("account_ceilings", {"a": 1.5}, "a whole number"),
        ("gpu_counts", "0", "powers-of-two"),
        ("waiting_power", math.nan, "-4 to 4"),
        ("pwoer", -1, "there are account_"),
    ],
)
def test_an_unusable_setting_is_refused(name, value, told):
    with pytest.raises(ConfigError, match=told):
        setting_to_json(name, value)
