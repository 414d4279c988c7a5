"""The Grafana dashboards hold nothing that Grafana's schema does not know."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

FILES = sorted((Path(__file__).parents[3] / "contrib" / "grafana").glob("*.json"))


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


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_grafana_knows_every_key_of_a_dashboard(file: Path) -> None:
    document = json.loads(file.read_text())
    assert document["panels"]
    assert unknown(document) == []


def test_a_key_that_grafana_does_not_know_is_found() -> None:
    document = copy.deepcopy(json.loads(FILES[0].read_text()))
    document["panels"][0]["colour"] = "red"
    document["panels"][0]["gridPos"]["width"] = 3
    assert unknown(document) == [".panels[0].gridPos.width", ".panels[0].colour"]
