"""polluxctl: see what polluxd does and why, and tune it.

The commands parse, read the store and print. A command's module is imported when the command runs: a health check that
runs every few seconds does not pay for the solver.

Exit status: 0 done, 1 failed (one line on standard error says why), 2 a wrong call. `status` has its own: see `health`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from pollux.version import __version__
from polluxd.errors import ConfigError, PolluxError, SlurmUnavailable
from polluxd.printable import printable


class Command(NamedTuple):
    """One command of polluxctl, or one group of commands."""

    place: str
    """Module and name of its function or group."""
    summary: str
    """The first sentence of its help."""
    example: str


SECTIONS: Mapping[str, Mapping[str, Command]] = {
    "My jobs": {
        "jobs": Command("show:jobs", "List Pollux jobs: GPUs, batch size, goodput, reason.", "jobs --all"),
        "explain": Command(
            "show:explain", "Say why a job has what it has, and what more would do.", "explain 1234"
        ),
        "history": Command(
            "show:history",
            "Show how a job's GPUs, batch size, goodput and noise scale changed.",
            "history 1234",
        ),
        "usage": Command(
            "show:usage", "Add up what a job used over its moves and companions, from sacct.", "usage 1234"
        ),
        "tune": Command(
            "tune:app",
            "Search over hyper-parameters with one array of jobs.",
            "tune start batch.sh --trials 64 --metric accuracy --max",
        ),
    },
    "Cluster": {
        "top": Command("show:top", "Watch the jobs live.", "top"),
        "web": Command(
            "web.live_page:web", "Serve a live page of the jobs and the cluster on this machine.", "web"
        ),
        "status": Command("status:status", "Show who leads and when polluxd last decided.", "status"),
        "cost": Command(
            "show:cost",
            "Show what rented nodes cost, and the hours that jobs save by them.",
            "cost --by user",
        ),
        "forecast": Command(
            "forecast.ahead_of_time:forecast",
            "Foretell when jobs start and end, and what a change would do.",
            "forecast --drain n3 --at noon",
        ),
        "moves": Command("show:moves", "List moves: from, to, seconds by part, why.", "moves 1234"),
    },
    "Administration": {
        "settings": Command(
            "settings:app",
            "How the cluster is shared: objective, weights, limits.",
            "settings preview --per user",
        ),
        "audit": Command("show:audit", "List changes of settings: when, who, from what, to what.", "audit"),
        "pause": Command("pinning:pause", "Start, move and stop nothing more until `resume`.", "pause"),
        "resume": Command("pinning:resume", "Let polluxd act again.", "resume"),
        "pin": Command("pinning:pin", "Keep a job's GPUs until `unpin`.", "pin 1234"),
        "unpin": Command("pinning:unpin", "Let polluxd move a job again.", "unpin 1234"),
        "cancel-move": Command(
            "pinning:cancel_move",
            "Take back a job's move while the job still runs where it was.",
            "cancel-move 1234",
        ),
        "setup": Command(
            "setup:setup",
            "Bring database, hooks and services of this machine to this version; then check.",
            "setup --yes",
        ),
        "doctor": Command("doctor:doctor", "Check this machine's installation; run it as root.", "doctor"),
        "hooks": Command("hooks:app", "Install, check or remove Slurm's hooks.", "hooks install"),
        "db": Command("database:app", "Create, upgrade, check and back up the database.", "db upgrade"),
    },
    "Analysis": {
        "report": Command(
            "report.site:report",
            "Show what a cluster's GPU hours went to, from Slurm's accounting alone.",
            "report --since 30d --html report.html",
        ),
        "decisions": Command(
            "decisions:app", "The decisions made so far, and their replay.", "decisions list"
        ),
        "simulate": Command(
            "simulate:simulate", "Replay a trace of jobs under one policy or several.", "simulate trace.csv"
        ),
        "recommend-nodes": Command(
            "recommend_nodes:recommend_nodes",
            "Show how many nodes the jobs would use well.",
            "recommend-nodes",
        ),
    },
}
"""The commands, in the sections of `polluxctl --help`."""

COMMANDS: Mapping[str, Command] = {
    name: command for section in SECTIONS.values() for name, command in section.items()
}

_ARGUMENTS = {
    "set": "--account-weight vision=2",
    "preview": "--per user",
    "replay": "567",
    "start": "batch.sh --trials 64 --metric accuracy --max",
    **dict.fromkeys(("status", "best", "stop", "resume"), "digits"),
}
"""What the example of a group's command gives to it."""


class LazyCommands(TyperGroup):
    """A group that imports the module of the command that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            module, _, name = COMMANDS[cmd_name].place.partition(":")
            found = getattr(import_module(f"polluxd.cli.{module}"), name)
            parent = typer.Typer(add_completion=False, rich_markup_mode=None)
            if isinstance(found, typer.Typer):
                parent.add_typer(found, name=cmd_name)
            else:
                parent.callback()(polluxctl)  # without one, typer makes no group of a single command
                parent.command(cmd_name)(found)
            group: Any = typer.main.get_command(parent)
            made = self.commands[cmd_name] = group.commands[cmd_name]
            made.epilog = f"Example: polluxctl {COMMANDS[cmd_name].example}"
            for name, each in getattr(made, "commands", {}).items():
                each.epilog = f"Example: polluxctl {cmd_name} {name} {_ARGUMENTS.get(name, '')}".rstrip()
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in COMMANDS:
            near = get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else "see `polluxctl --help`"
            ctx.fail(f"there is no command '{name}'; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, commands in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, command.summary) for name, command in commands.items()])


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"polluxctl {__version__}")
        raise typer.Exit


@app.callback()
def polluxctl(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and exit"),
    ] = False,
) -> None:
    """See what polluxd does and why, and tune it."""


def main() -> None:
    """Entry point: every expected failure is one line on standard error."""
    try:
        sys.exit(app(prog_name="polluxctl", standalone_mode=False) or 0)
    except SlurmUnavailable as error:
        # "squeue -o ...: slurmctld does not answer: squeue: error: ...": the middle says enough.
        why = str(error).split(": ")
        failure, code = f"no Slurm answers here: run polluxctl where squeue works ({why[:2][-1]})", 1
    except PolluxError as error:
        failure, code = str(error), 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # `polluxctl jobs | head`: the reader has gone, and Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message(), file=sys.stderr)  # type: ignore[attr-defined]
            sys.exit(2)
        # Usage errors of click, whichever package ships it, explain themselves.
        explain_itself = getattr(error, "format_message", None)
        if explain_itself is None:
            raise
        failure, code = explain_itself(), 2
    faults = [" ".join(line.split()) for line in failure.splitlines() if line.strip()]
    print(printable("polluxctl: " + "; ".join(faults)), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
