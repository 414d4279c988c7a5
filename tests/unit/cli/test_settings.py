"""What `polluxctl settings set` accepts, and how settings are shown."""

from __future__ import annotations

import math

import pytest

from polluxd.cli.settings import changes, in_words, setting_rows
from polluxd.config.setting_info import OPTIONS, infos
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError

OTHERS = PolicySettings(
    objective="fair-share", kappa=3.5, power=-math.inf, fairness_per="user", gpu_counts="1,2,4",
    waiting_power=-0.5, start_gpus=2, partial_nodes=True,
    cloud_month_budgets={"physics": 500.0},
)  # fmt: skip


@pytest.mark.parametrize("info", OPTIONS, ids=lambda info: info.key)
def test_every_option_takes_what_is_shown_of_its_setting(info):
    """Of a table, an entry; of a switch, itself."""
    for settings in (PolicySettings(), OTHERS):
        value = getattr(settings, info.key)
        given = ["1=4"] if info.is_table else value if info.type == "boolean" else in_words(value)
        entry = int if info.entry_type == "integer" else float
        assert changes({info.key: given}, PolicySettings()) == {
            info.key: {"1": entry(4)} if info.is_table else value
        }


def test_every_setting_but_one_is_an_option():
    assert {info.key for info in infos("policy")} - {info.key for info in OPTIONS} == {"paused"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"cloud_prices": ["p4d=0"]}, "cloud_prices.p4d: expected a price above 0, got 0"),
        (
            {"user_guarantees": ["a=1.5"]},
            "user_guarantees.a: expected a whole number of GPUs from 0, got '1.5'",
        ),
        ({"user_guarantees": ["7"]}, "--user-guarantee: expected NAME=GPUS"),
        ({"cloud_boot_s": "soon"}, "cloud_boot_s: expected a number of seconds"),
        ({"hysteresis": "1.5"}, "setting hysteresis: expected a share from 0 to 1, got 1.5"),
        (
            {"account_guarantees": ["b=9"]},
            r"account_guarantees.b \(9\) must not be above account_ceilings.b \(4\)",
        ),
        ({}, "nothing to set"),
        ({"user_weights": []}, "nothing to set"),
        *(
            ({"power": text}, "setting power: expected a number up to 1, or -inf")
            for text in ("1.01", "nan", "inf", "", "harmonic")
        ),
        *(
            ({"user_weights": [word]}, "--user-weight: expected NAME=WEIGHT, or NAME=none")
            for word in ("a", "=2", "a=")
        ),
        *(
            ({"user_weights": [word]}, r"setting user_weights\.a: expected a weight above 0, up to 1000, got")
            for word in ("a=0", "a=-1", "a=nan", "a=inf", "a=1e9", "a=two")
        ),
    ],
)
def test_an_unusable_value_is_refused(words, told):
    with pytest.raises(ConfigError, match=told):
        changes(words, PolicySettings(account_ceilings={"b": 4}))


def test_every_setting_is_shown_in_words():
    settings = PolicySettings(
        power=-math.inf,
        account_weights={"b": 2.0, "a": 3.0},
        cloud_boot_s=90.0,
        gpu_counts="1,2",
        paused=True,
    )
    shown = {row["name"]: row["value"] for row in setting_rows(settings)}
    assert set(shown) == {info.key for info in infos("policy")}
    assert all(row["help"] for row in setting_rows(settings))
    assert (shown["power"], shown["account_weights"], shown["user_weights"]) == ("-inf", "a=3, b=2", "-")
    assert (shown["cloud_boot_s"], shown["paused"], shown["gpu_counts"]) == ("90", "yes", "1,2")
