"""Write what a package holds and the code says: manual pages, and an example of polluxd.toml.

    python -m contrib.man.generate FOLDER

Beside this file are the parts of polluxctl(1) and polluxd(8) that people write; their commands come from `--help`.
polluxd.toml(5) and the example come from the declaration of the settings.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from polluxd.cli.ctl import app as polluxctl
from polluxd.cli.daemon import app as polluxd
from polluxd.config.config_file import mode
from polluxd.config.setting_info import OPTIONS, SettingInfo, infos
from polluxd.config.settings import SECTIONS
from polluxd.config.settings_reference import about, default_in_words, example_file, in_file

MAN = Path(__file__).parent
PAGES = {"polluxctl.1": polluxctl, "polluxd.8": polluxd}
_OF_EVERY_COMMAND = ("config", "as_json", "help")
"""Parameters that the pages describe before the commands. `simulate --json` takes a file, and is described there."""
_SETTINGS = {info.key: info for info in OPTIONS}


def page(name: str) -> str:
    """Return a page with its commands: the text between the sections COMMANDS and OPTIONS."""
    command = typer.main.get_command(PAGES[name])
    head, title, tail = (MAN / name).read_text().partition(".SH COMMANDS\n")
    return f"{head}{title}{''.join(_commands(command, ''))}{tail}"


def _commands(group: Any, before: str) -> Iterator[str]:
    context = group.context_class(group, info_name="")
    described: dict[frozenset[str], str] = {}
    for name in group.list_commands(context):
        command, called = group.get_command(context, name), f"{before}{name}"
        if hasattr(command, "list_commands"):
            yield from _commands(command, f"{called} ")
            continue
        arguments = "".join(f" {_argument(p)}" for p in command.params if p.param_type_name == "argument")
        yield f".SS {called}{arguments}\n"
        yield roff(re.sub(r"\n{2,}", "\n.PP\n", command.help or "")) + "\n"
        options = [p for p in command.params if p.param_type_name == "option" and not _of_every_command(p)]
        same = described.setdefault(frozenset(p.name for p in options), called)
        if same != called and len(options) > 8:
            yield f'Options as for\n.BR "{same}" .\n'
        else:
            yield "".join(_option(option, context) for option in options)


def _argument(parameter: Any) -> str:
    word = parameter.metavar or parameter.name.upper()
    return f"\\fI{word}\\fP" if parameter.required else f"\\fR{word}\\fP"


def _of_every_command(option: Any) -> bool:
    return option.name in _OF_EVERY_COMMAND and (option.is_flag or option.name != "as_json")


def _option(option: Any, context: Any) -> str:
    kind = option.metavar or option.display_type(context).strip("<>").partition(" range")[0].removeprefix(
        "list["
    ).rstrip("]")
    kind = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "path": "FILE", "file": "FILE"}.get(kind, kind)
    value = "" if option.is_flag else f" \\fI{roff(kind).strip()}\\fR"
    names = ", ".join(f"\\fB{roff(each).strip()}\\fR" for each in (*option.opts, *option.secondary_opts))
    info, told = _SETTINGS.get(option.name), (option.help or "").rstrip(".")
    told = told[:1].upper() + told[1:] + "."
    if info is not None:
        told += f" Value: {info.expected}. Default: {default_in_words(info)}."
    elif option.default not in (None, False, ""):
        told += f" Default: {getattr(option.default, 'value', option.default)}."
    return f".TP\n{names}{value}\n{roff(told)}\n"


def manual_page() -> str:
    """Return polluxd.toml(5)."""
    lines = [
        '.\\" Generated from polluxd/config/settings.py.',
        '.TH POLLUXD.TOML 5 "" "polluxd" "File formats"',
        ".SH NAME",
        "polluxd.toml \\- configuration of the Pollux scheduling daemon",
        ".SH DESCRIPTION",
        ".BR polluxd (8)",
        "reads",
        ".IR /etc/pollux/polluxd.toml .",
        "It is a TOML file.",
        ".B polluxd example-config",
        "prints one with every key, and",
        ".B polluxd check",
        "names every fault of a file.",
        *_entry(mode()),
    ]
    for section in SECTIONS:
        lines += [f".SH [{section}]", roff(about(section))]
        for info in in_file(section):
            lines += _entry(info)
    lines += [".SH SETTINGS AT RUN TIME ONLY", "The file cannot hold these settings."]
    for info in infos("policy"):
        if info.run_time_only:
            lines += [*_entry(info), f"Set it with \\fB{roff(info.run_time_only)}\\fR."]
    lines += [".SH SEE ALSO", ".BR polluxd (8),", ".BR polluxctl (1)"]
    return "\n".join(lines) + "\n"


def _entry(info: SettingInfo) -> list[str]:
    return [
        ".TP",
        f".B {roff(info.key)}",
        roff(info.doc),
        roff(f"Value: {info.expected}. Default: {default_in_words(info)}."),
    ]


def roff(text: str) -> str:
    """Return the text with what roff takes for commands escaped, and `code` in bold."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)
    lines = text.split("\n")
    return "\n".join("\\&" + line if line[:1] in ("'", ".") and line != ".PP" else line for line in lines)


def write(folder: Path) -> None:
    """Write all into a folder."""
    for name in PAGES:
        (folder / name).write_text(page(name))
    (folder / "polluxd.toml.5").write_text(manual_page())
    (folder / "polluxd.toml").write_text(example_file())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
