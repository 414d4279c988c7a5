"""Write the reference pages that come from code.

`conf.py` calls `write` before each build. Git ignores the pages.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main
from pydantic import TypeAdapter
from typer.cli import get_docs_for_click

from docs.openapi import ERRORS, document, summary
from pollux.version import __version__
from polluxd.cli.ctl import app as polluxctl
from polluxd.cli.daemon import app as polluxd
from polluxd.config.config_file import mode
from polluxd.config.setting_info import SettingInfo, infos
from polluxd.config.settings import SECTIONS
from polluxd.config.settings_reference import about, default_in_words, in_file
from polluxd.gateway.app import ENDPOINTS
from polluxd.metrics import CLUSTER_GAUGES, Metrics
from polluxd.metrics.declared import (
    CYCLE_RESULTS,
    DATABASE_ERRORS,
    MOVE_PATHS,
    MOVE_RESULTS,
    PHASES,
    SLURM_CALLS,
    SLURM_RESULTS,
)
from polluxd.sim.cluster import Scenario

ROOT = Path(__file__).resolve().parents[1]
PAGES = Path(__file__).resolve().parent / "reference"
EXAMPLES = ROOT / "contrib" / "examples"


def commands(app: typer.Typer, name: str) -> str:
    """Return the page of one command-line program."""
    command = typer.main.get_command(app)
    context: Any = command.context_class(command, info_name=name)
    _whole_summaries(command, context)
    return get_docs_for_click(obj=command, ctx=context, name=name, title=f"`{name}`")  # type: ignore[arg-type]


def _whole_summaries(group: Any, context: Any) -> None:
    """Have each list of commands show first sentences, which click would cut after 45 letters."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        command.short_help = (command.help or "").split("\n\n")[0].replace("\n", " ")
        if hasattr(command, "list_commands"):
            _whole_summaries(command, context)


def messages() -> str:
    """Return the page of the gateway's messages."""
    described = document(__version__)
    lines = [
        "# Messages of the gateway",
        "",
        "Agents and `polluxctl` of ordinary users send these requests to `polluxd gateway`; nothing else of polluxd "
        "answers users. The bodies are JSON. Members that are not listed are refused. The same as an OpenAPI "
        "document: {download}`openapi.json`.",
        "",
        "| request | token of | reads | answers | |",
        "|---|---|---|---|---|",
    ]
    for each in ENDPOINTS:
        reads = (
            f"`{each.reads.__name__}`" if each.method == "POST" else _members(each.reads.model_json_schema())
        )
        answers = (
            f"`{each.answers.__name__}`" if each.answers else "" if each.method == "POST" else "a document"
        )
        holder = {"anybody": "nobody", "attempt": "an attempt", "user": "a user"}[each.rights]
        path = each.path.replace(":int", "")
        lines.append(f"| `{each.method} {path}` | {holder} | {reads} | {answers} | {summary(each)} |")
    lines += [
        "",
        "A refusal is `ErrorAnswer`, with one of these statuses:",
        "",
        "| status | meaning |",
        "|---|---|",
    ]
    lines += [f"| {status} | {meaning} |" for status, meaning in ERRORS.items()]
    for name, schema in sorted(described["components"]["schemas"].items()):
        lines += ["", f"## `{name}`", "", " ".join(schema.get("description", "").split()), ""]
        lines += ["| member | value | meaning |", "|---|---|---|"]
        required = schema.get("required", ())
        for member, kind in schema.get("properties", {}).items():
            told = " ".join(kind.get("description", "").split())
            lines.append(
                f"| `{member}`{'' if member in required else ' (optional)'} | {_kind(kind)} | {told} |"
            )
    return "\n".join(lines) + "\n"


def _members(schema: dict[str, Any]) -> str:
    return ", ".join(f"`?{name}=`" for name in schema.get("properties", {}))


def _kind(schema: dict[str, Any]) -> str:
    """Return the values that a schema allows, in words."""
    if "$ref" in schema:
        return f"`{schema['$ref'].rpartition('/')[2]}`"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{json.dumps(each)}`" for each in schema.get("enum", [schema.get("const")]))
    bounds = [
        f"{word} {schema[key]:g}"
        for key, word in (("minimum", "from"), ("maximum", "to"), ("exclusiveMaximum", "below"))
        if key in schema
    ]
    bounds += [f"at most {schema['maxLength']} characters"] if "maxLength" in schema else []
    bounds += [f"`{schema['pattern']}`"] if "pattern" in schema else []
    if schema.get("type") == "array":
        bounds.append(f"of {_kind(schema['items'])}")
    return " ".join([schema.get("type", "any"), *bounds])


def examples() -> str:
    """Return the page of the complete examples, with what changes in each."""
    lines = [
        "# Complete examples",
        "",
        "Each script stands in `contrib/examples/elastic`, and its plain twin in `contrib/examples/plain`. Both are "
        "tested. This page shows what changes.",
    ]
    for path in sorted((EXAMPLES / "elastic").glob("*.py")):
        plain, elastic = (EXAMPLES / "plain" / path.name).read_text(), path.read_text()
        told = ast.get_docstring(ast.parse(elastic)) or path.stem
        changed = difflib.unified_diff(plain.splitlines(), elastic.splitlines(), lineterm="", n=2)
        lines += [
            "",
            f"## {told.splitlines()[0].rstrip('.')}",
            "",
            f"`contrib/examples/elastic/{path.name}`",
            "",
            "```diff",
            *[line for line in changed if not line.startswith(("---", "+++"))],
            "```",
        ]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of the metrics."""
    lines = [
        "# Metrics",
        "",
        "polluxd serves these metrics at `metrics.listen` ([Configuration](configuration.md)). Every value of a label "
        "is listed here, Python's version and polluxd's own apart: no label holds a text that a user chose.",
        "",
        "## Of the process",
        "",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    words = {"result": CYCLE_RESULTS, "phase": PHASES, "kind": DATABASE_ERRORS, "path": MOVE_PATHS}
    words |= {"call": SLURM_CALLS}
    own = {
        "polluxd_moves": {"result": MOVE_RESULTS},
        "polluxd_slurm_call_duration_seconds": {"result": SLURM_RESULTS},
    }
    for metric in Metrics().registry.collect():
        suffix = {"counter": "_total", "info": "_info"}.get(metric.type, "")
        keys = {key: None for sample in metric.samples for key in sample.labels if key != "le"}
        if metric.name == "polluxd_slurm_call_duration_seconds":
            keys = dict.fromkeys(("call", "result"))
        told = [
            f"`{key}`: {', '.join({**words, **own.get(metric.name, {})}.get(key, ('its version',)))}"
            for key in keys
        ]
        kind = "gauge" if metric.type == "info" else metric.type
        lines.append(f"| `{metric.name}{suffix}` | {kind} | {'; '.join(told)} | {metric.documentation} |")
    lines += [
        "",
        "## Of the cluster",
        "",
        "Only the leader has these gauges, as its newest decision saw the cluster.",
        "",
        "| metric | labels | meaning |",
        "|---|---|---|",
    ]
    for name, gauge in CLUSTER_GAUGES.items():
        told = [f"`{gauge.label}`: {', '.join(gauge.values)}"] if gauge.label else []
        lines.append(f"| `{name}` | {''.join(told)} | {gauge.help} |")
    return "\n".join(lines) + "\n"


def scenario() -> str:
    """Return the page of the keys of a scenario file."""
    whole = TypeAdapter(Scenario).json_schema()
    tables = {
        "trace": "Trace",
        "pollux": "Knowledge",
        "moves": "MoveCosts",
        "cloud": "Cloud",
        "groups": "NodeGroup",
    }
    lines = [
        "# Scenario",
        "",
        "`polluxctl simulate --scenario FILE.toml` reads these keys. A key may be missing, unless it is required. "
        "Times are in seconds.",
        "",
        *_keys({key: value for key, value in whole["properties"].items() if key not in {*tables, "policy"}}),
        "",
        "## [policy]",
        "",
        "The keys of `[policy]` in [polluxd.toml](configuration.md), with their defaults there. `power` also holds for "
        "policy `pollux-paper`. A rented node's price is `cloud.price`.",
    ]
    for key, name in tables.items():
        schema = whole["$defs"][name]
        title = f"[[{key}]]" if key == "groups" else f"[{key}]"
        lines += [
            "",
            f"## {title}",
            "",
            " ".join(schema["description"].split()),
            "",
            *_keys(schema["properties"]),
        ]
    return "\n".join(lines) + "\n"


def _keys(properties: dict[str, dict[str, Any]]) -> list[str]:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for key, schema in properties.items():
        default = schema.get("default", {} if schema.get("type") == "object" else "required")
        shown = (
            "none" if default is None else default if default == "required" else f"`{json.dumps(default)}`"
        )
        rows.append(f"| `{key}` | {shown} | {' '.join(schema['description'].split())} |")
    return rows


def configuration() -> str:
    """Return the page of the settings."""
    lines = [
        "# Configuration",
        "",
        "polluxd reads `/etc/pollux/polluxd.toml`. `polluxd example-config` prints a file with every key, "
        "`polluxd check` names every fault of a file, and `systemctl reload polluxd` makes polluxd read it again.",
        "",
        *_settings([mode()]),
    ]
    for section in SECTIONS:
        lines += ["", f"## [{section}]", "", about(section), "", *_settings(in_file(section))]
    lines += [
        "",
        "## At run time only",
        "",
        "The file cannot hold these settings. They live in the database, and every change is audited "
        "(`polluxctl audit`).",
        "",
        *_settings((info for info in infos("policy") if info.run_time_only), name=lambda info: info.key),
    ]
    return "\n".join(lines) + "\n"


def _settings(
    settings: Iterator[SettingInfo] | list[SettingInfo],
    name: Callable[[SettingInfo], str] = lambda info: info.key,
) -> list[str]:
    return [
        "| key | value | default | meaning |",
        "|---|---|---|---|",
        *(
            f"| `{name(i)}` | {i.expected} | {_shown(default_in_words(i))} | {i.doc}"
            f"{f' Set it with `{i.run_time_only}`.' if i.run_time_only else ''} |"
            for i in settings
        ),
    ]


def _shown(text: str) -> str:
    return text if text in ("required", "none") else f"`{text}`"


def _pages() -> Iterator[tuple[str, str]]:
    yield "polluxctl.md", commands(polluxctl, "polluxctl")
    yield "polluxd.md", commands(polluxd, "polluxd")
    yield "configuration.md", configuration()
    yield "messages.md", messages()
    yield "openapi.json", json.dumps(document(__version__), indent=1) + "\n"
    yield "metrics.md", metrics()
    yield "examples.md", examples()
    yield "scenario.md", scenario()


def write() -> None:
    """Write every page that has changed, so that Sphinx reads no other again."""
    for name, text in _pages():
        path = PAGES / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
