"""The attack suite as a list: it covers every row, and its parts exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import contrib.attack
from contrib.attack.__main__ import THEMES
from contrib.attack.registry import ATTACKS

FOLDER = Path(contrib.attack.__file__).parent
MODULES = sorted(
    ".".join(("contrib.attack", *path.relative_to(FOLDER).with_suffix("").parts))
    for path in FOLDER.rglob("*.py")
)


@pytest.mark.parametrize("name", MODULES)
def test_every_part_finds_what_it_imports(name: str) -> None:
    importlib.import_module(name)


def test_every_row_of_the_table_has_an_attack() -> None:
    for theme in THEMES:
        importlib.import_module(f"contrib.attack.{theme}")
    names = [attack.name for attack in ATTACKS]
    rows = {int(found[1]) for name in names if (found := re.match(r"row (\d+)", name))}
    assert rows == set(range(1, 27))
    assert len([name for name in names if name.startswith("further")]) >= 20
    assert len([name for name in names if "during a grow" in name]) >= 5
    assert len(set(names)) == len(names)
