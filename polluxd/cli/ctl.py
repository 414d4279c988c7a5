"""polluxctl: see what polluxd does and why, and tune it.

The commands parse, read the store and print. A command's module is imported when the command runs: a health check that
runs every few seconds does not pay for the solver.

Exit status: 0 done, 1 failed (one line on standard error says why), 2 a wrong call. `status` has its own: see `health`.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from polluxd.errors import ConfigError, PolluxError
from polluxd.printable import printable

COMMANDS = {
    "jobs": ("lists:jobs", "List Pollux jobs: GPUs, batch size, goodput, reason."),
    "top": ("top:top", "Watch the jobs live."),
    "explain": ("explain:explain", "Say why a job has what it has, and what more would do."),
    "moves": ("lists:moves", "List moves: from, to, seconds by part, why."),
    "status": ("status:status", "Show who leads and when polluxd last decided."),
    "pause": ("pausing:pause", "Start, move and stop nothing more until `resume`."),
    "resume": ("pausing:resume", "Let polluxd act again."),
    "pin": ("pinning:pin", "Keep a job's GPUs until `unpin`."),
    "unpin": ("pinning:unpin", "Let polluxd move a job again."),
    "cancel-move": ("pinning:cancel_move", "Take back a job's move while the job still runs where it was."),
    "audit": ("lists:audit", "List changes of settings: when, who, from what, to what."),
    "doctor": ("doctor:doctor", "Check this machine's installation; run it as root."),
    "history": ("history:history", "Show how a job's GPUs, batch size, goodput and noise scale changed."),
    "usage": ("usage:usage", "Add up what a job used over its moves and companions, from sacct."),
    "report": ("report:report", "Write one HTML page on a period: jobs, waiting, shares, moves."),
    "recommend-nodes": ("recommend_nodes:recommend_nodes", "Show how many nodes the jobs would use well."),
    "simulate": ("simulate:simulate", "Replay a trace of jobs under one policy or several."),
    "settings": ("setting_commands:app", "How the cluster is shared: fitness, weights, limits."),
    "decisions": ("decisions:app", "The decisions made so far, and their replay."),
    "hooks": ("hooks:app", "Install, check or remove Slurm's hooks."),
    "db": ("database:app", "Create, upgrade, check and back up the database."),
}
"""Of each command: module and name of its function or its group, and the first sentence of its help."""


class LazyCommands(TyperGroup):
    """A group that imports the module of the command that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            module, _, name = COMMANDS[cmd_name][0].partition(":")
            found = getattr(import_module(f"polluxd.cli.{module}"), name)
            parent = typer.Typer(add_completion=False, rich_markup_mode=None)
            if isinstance(found, typer.Typer):
                parent.add_typer(found, name=cmd_name)
            else:
                parent.callback()(polluxctl)  # without one, typer makes no group of a single command
                parent.command(cmd_name)(found)
            group: Any = typer.main.get_command(parent)
            self.commands[cmd_name] = group.commands[cmd_name]
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


app = typer.Typer(
    cls=LazyCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def polluxctl() -> None:
    """See what polluxd does and why, and tune it."""


def main() -> None:
    """Entry point: every expected failure is one line on standard error."""
    try:
        sys.exit(app(prog_name="polluxctl", standalone_mode=False) or 0)
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
