"""The commands that `make install-test` takes from the install page."""

from __future__ import annotations

import pytest

from contrib.packaging.page_commands import PAGE, commands


def test_the_commands_lead_from_packages_to_a_job():
    found = commands(PAGE.read_text())
    assert found[0].startswith("apt-get install")
    assert found[-1].startswith("sbatch ")


def test_commands_outside_the_section_do_not_count():
    page = "```console\na\n```\n## Step by step\n1. x\n\n   ```console\n   b c\n   ```\n## Advice\n```console\nd\n```\n"
    assert commands(page) == ["b c"]
    with pytest.raises(ValueError, match="Step by step"):
        commands("## Step by step\nnothing\n## Advice\n")


def test_the_upgrade_page_has_commands():
    page = PAGE.with_name("upgrade.md").read_text()
    assert commands(page, "Upgrade")[0] == "polluxctl db init"
