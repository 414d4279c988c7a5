"""What pages and messages say of a setting, as annotations of its type."""

from __future__ import annotations

from typing import Any

from pydantic import Field


def unit(name: str) -> Any:
    """Return the annotation of a number that names its unit."""
    return Field(json_schema_extra={"unit": name})


def expected(text: str, metavar: str) -> Any:
    """Return the annotation that says what a value must be; `metavar` stands for it in help."""
    return Field(json_schema_extra={"expected": text, "metavar": metavar})


def example(value: Any) -> Any:
    """Return the annotation with what the example file shows, where the default shows too little."""
    return Field(examples=[value])


def run_time_only(command: str, **names: str) -> Any:
    """Return the annotation of a setting that `command` changes, never polluxd.toml.

    `names`: of a table, what its names are (`expected_name`), and what stands for one in help (`name_metavar`).
    """
    return Field(json_schema_extra={"run_time_only": command, **names})
