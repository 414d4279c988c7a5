"""Declarations are complete."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter

from polluxd.config.config_file import Config, mode
from polluxd.config.setting_info import OPTIONS, checked, infos, option_name
from polluxd.config.settings import SECTIONS
from polluxd.config.settings_reference import toml_value
from polluxd.errors import ConfigError

EVERY = [mode(), *(info for section in SECTIONS for info in infos(section))]


CERTIFICATE = ("tls_certificate", "tls_key")


def takes(info, value):
    """Check a value by the class that declares the setting."""
    kind = SECTIONS.get(info.section, Config)
    least = {"cluster": "c"} if info.section == "slurm" else {}
    least |= {"url": "postgresql://h/d"} if info.section == "database" else {}
    if info.key in CERTIFICATE:  # both are given, or none
        least |= dict.fromkeys(CERTIFICATE, "/etc/pollux/gateway.pem")
    whole = {"slurm": {"cluster": "c"}, "database": {"url": "postgresql://h/d"}} if kind is Config else least
    return TypeAdapter(kind).validate_python({**whole, info.key: value}) is not None


@pytest.mark.parametrize("info", EVERY, ids=lambda info: info.name)
def test_a_setting_says_what_it_means_and_what_it_takes(info):
    assert info.doc.endswith("."), "a docstring of whole sentences"
    assert info.expected != "text", "say what the text is, with `expected`"
    if info.example is not None:
        assert takes(info, info.example)
    if not info.required and info.default is not None:
        assert takes(info, info.default)
    # What the example file shows must be TOML: None has no form there.
    assert info.default is not None or info.example is not None, (
        "a setting that may be unset needs an example"
    )


@pytest.mark.parametrize("info", infos("policy"), ids=lambda info: info.key)
def test_a_setting_of_the_database_is_strict(info):
    """`"60"` for a number, or 1 for true, is a mistake."""
    wrong = {
        "boolean": [1, "true", None],
        "number": ["1", True],
        "integer": ["1", True, 1.5],
        "string": [1, None],
    }
    for value in wrong[info.entry_type if info.is_table else info.type]:
        with pytest.raises(ConfigError):
            checked(info.key, {"1": value} if info.is_table else value)


def test_options_are_named_after_their_settings_and_stand_for_their_values_by_unit():
    stands = {option_name(info): info.metavar for info in OPTIONS}
    assert stands["--cloud-boot-s"] == "SECONDS"
    assert stands["--account-ceiling"] == "NAME=GPUS"
    assert stands["--job-weight"] == "ID=WEIGHT"
    assert stands["--gpu-counts"] == "RULE"
    assert stands["--hysteresis"] == "SHARE"


def test_ranges_in_words():
    words = {info.name: info.expected for info in EVERY}
    assert words["mode"] == '"observe", "advise" or "enforce"'
    assert words["cycle.interval_s"] == "a number of seconds above 0"
    assert words["moves.max_concurrent"] == "a whole number from 0"
    assert words["policy.cloud_month_budgets"] == "a table from names to an amount of money from 0"
    assert words["policy.job_weights"] == "a table from a Slurm job id to a weight above 0, up to 1000"


def test_max_min_fairness_has_a_name_in_json_and_toml():
    assert checked("power", "max-min") == checked("power", "-inf") == float("-inf")
    assert toml_value(float("-inf")) == "-inf"


@pytest.mark.parametrize("kappa", [2000.0, float("inf"), "inf"])
def test_kappa_is_bounded(kappa):
    with pytest.raises(ConfigError, match="from 0 to 1000"):
        checked("kappa", kappa)
