"""The Grafana dashboard holds nothing that Grafana's schema does not know."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from contrib.grafana.__main__ import dashboard


def unknown(document: dict[str, Any]) -> list[str]:
    """Return the paths that Grafana's own types lose or change."""
    plugins.register_default_plugins()
    return list(_differences(document, json.loads(JSONEncoder().encode(Dashboard.from_json(document))), ""))


def _differences(given: Any, kept: Any, path: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from _differences(value, kept.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from _differences(value, other, f"{path}[{index}]")
    elif given != kept:
        yield path


def test_grafana_knows_every_key_of_the_dashboard() -> None:
    document = dashboard()
    assert document["panels"]
    assert unknown(document) == []


def test_a_key_that_grafana_does_not_know_is_found() -> None:
    document = copy.deepcopy(dashboard())
    document["panels"][0]["colour"] = "red"
    document["panels"][0]["gridPos"]["width"] = 3
    assert unknown(document) == [".panels[0].gridPos.width", ".panels[0].colour"]
