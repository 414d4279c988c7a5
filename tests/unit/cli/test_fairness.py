"""What `polluxctl fairness set` accepts."""

from __future__ import annotations

import math

import pytest

from polluxd.cli.fairness import document, lines, parse_power, parse_weights
from polluxd.errors import ConfigError
from polluxd.model import Settings


@pytest.mark.parametrize(
    ("text", "power"), [("1", 1.0), ("0", 0.0), ("-1.5", -1.5), ("-inf", -math.inf), ("MAX-MIN", -math.inf)]
)
def test_powers(text, power):
    assert parse_power(text) == power


@pytest.mark.parametrize("text", ["1.01", "nan", "inf", "", "harmonic"])
def test_powers_that_are_none(text):
    with pytest.raises(ConfigError, match="power must be a number up to 1"):
        parse_power(text)


def test_a_weight_of_one_is_the_default_and_leaves_the_table():
    assert parse_weights(["a=2", "b=1"], {"b": 4.0, "c": 0.5}, "user") == {"a": 2.0, "c": 0.5}


@pytest.mark.parametrize("word", ["a", "=2", "a=", "a=0", "a=-1", "a=nan", "a=inf", "a=1e9", "a=two"])
def test_weights_that_are_none(word):
    with pytest.raises(ConfigError, match="user weights are NAME=WEIGHT"):
        parse_weights([word], {}, "user")


def test_max_min_survives_json_and_words():
    settings = Settings(power=-math.inf, account_weights={"b": 2.0, "a": 3.0})
    assert document(settings)["power"] == "-inf"
    text = "\n".join(lines(settings))
    assert "max-min" in text
    assert "a=3, b=2" in text
