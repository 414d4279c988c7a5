"""Write the settings' pages, and the commands of polluxctl(1) and polluxd(8) from their own help: `make reference`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from contrib.man.roff import roff
from contrib.man.settings_pages import FILES
from polluxd.cli.ctl import app as polluxctl
from polluxd.cli.daemon import app as polluxd
from polluxd.config.setting_info import OPTIONS
from polluxd.config.settings_reference import default_in_words

MAN = Path(__file__).parent
PAGES = {"polluxctl.1": polluxctl, "polluxd.8": polluxd}
_OF_EVERY_COMMAND = ("config", "as_json", "help")
"""Parameters that the pages describe before the commands. `simulate --json` takes a file, and is described there."""
_SETTINGS = {info.key: info for info in OPTIONS}


def page(name: str) -> str:
    """Return a page with the commands as they are: the text between the sections COMMANDS and OPTIONS."""
    command = typer.main.get_command(PAGES[name])
    head, _, rest = (MAN / name).read_text().partition(".SH COMMANDS\n")
    _, _, tail = rest.partition(".SH OPTIONS\n")
    return f"{head}.SH COMMANDS\n{''.join(_commands(command, ''))}.SH OPTIONS\n{tail}"


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


if __name__ == "__main__":
    for name in PAGES:
        (MAN / name).write_text(page(name))
    for name, render in FILES.items():
        (MAN.parents[1] / name).write_text(render())
