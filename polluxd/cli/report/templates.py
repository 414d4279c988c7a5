"""The Jinja templates of the live page, and charts as a page of their own.

Names of jobs, users and accounts, and reasons of Slurm's, are hostile: Jinja escapes every value, `printable` takes the
control characters out before, and a page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from polluxd.printable import printable

from ..output import clock, duration, number, write_page
from .drawings import Chart


def write_charts(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write charts as a page that needs no network. Raises ConfigError: the file cannot be written."""
    text = environment().get_template("charts.html.jinja").render(title=title, charts=charts)
    write_page(path, text)


def environment() -> Environment:
    """Return the environment of the templates."""
    packages = ("polluxd.cli.report", "polluxd.cli.web")
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        clock=clock, duration=duration, number=number(3), coordinate=lambda value: f"{value:.1f}"
    )
    return made


def _finalize(value: Any) -> Any:
    """Show control characters as escapes, and nothing as a dash."""
    if value is None or value == "":
        return "-"
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
