"""The places that CONTRIBUTING's walks and worked examples name exist."""

from __future__ import annotations

import re

import pytest

from contrib.checks.structure import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PLACE = re.compile(r"`([\w/.-]+/[\w.-]+\.(?:py|lua|json|md|1))`(?:: ((?:`[\w.]+`(?:, | and |; )?)+))?")


def places(title: str) -> list[tuple[str, list[str]]]:
    """Return each file of a section, with the names in it that the page gives."""
    section = PAGE[PAGE.index(f"## {title}") :].partition("\n## ")[0]
    return [(path, re.findall(r"`([\w.]+)`", names)) for path, names in PLACE.findall(section)]


@pytest.mark.parametrize(("title", "least"), [("Two walks", 25), ("Three changes, place by place", 10)])
def test_the_places_that_a_section_names_exist(title: str, least: int) -> None:
    found = places(title)
    assert len(found) >= least
    for path, names in found:
        assert (ROOT / path).is_file(), path
        text = (ROOT / path).read_text()
        for name in names:
            last = name.rpartition(".")[2]
            defined = (
                rf"(?:def|class) {last}\b|^{last}\b|^    {last}:" if path.endswith(".py") else rf"\b{last}\b"
            )
            assert re.search(defined, text, re.M), f"{path} has no {name}"


def test_every_room_that_the_page_names_exists() -> None:
    rooms = re.findall(r"`((?:polluxd|agent/pollux|slurm_hooks|sql|docs|contrib)/[a-z_/]*)`", PAGE)
    assert len(rooms) > 12
    assert not [room for room in rooms if not (ROOT / room).is_dir()]
    agent = PAGE[PAGE.index("Rooms of the agent") : PAGE.index("## Two walks")]
    named = {room for room in re.findall(r"`([a-z_]+)/`", agent)}
    there = {path.name for path in (ROOT / "agent/pollux").iterdir() if (path / "__init__.py").is_file()}
    assert named == there
