"""The table of subcommands.  A command's module is imported when it is called, so that `--help` is fast."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import click
from click.shell_completion import get_completion_class, shell_complete

from ..._contract.problems import did_you_mean
from ...errors import ConfigurationError
from .output import Output

# Command: its module in this package, and its line in the list of commands.
COMMANDS = {
    "init": ("init", "write a first contract, and create the ledger's tables"),
    "contract": ("contract", "check a contract, or show its rules"),
    "keys": ("keys", "list, show, resolve and delete the records of operations"),
    "stats": ("ledger", "count the records, by state"),
    "purge": ("ledger", "delete expired records"),
    "complete": ("complete", "finish operations in steps that were interrupted"),
    "consume": ("inbox", "handle the messages of a broker, each once"),
    "inbox": ("inbox", "list received events, and requeue dead letters"),
    "schedule": ("schedule", "run scheduled jobs, and list, backfill and trigger their slots"),
    "outbox": ("outbox", "count and list messages that wait to be sent, and requeue dead letters"),
    "relay": ("outbox", "send the messages of an outbox to a broker"),
    "capacity": ("capacity", "compute the storage and connections that a load needs"),
    "webhooks": ("webhooks", "send webhooks, look after their deliveries, and receive some while you develop"),
    "demo": ("demo", "run an example service through crashes and retries"),
}
SHELLS = ("bash", "zsh", "fish")
COMPLETE = "_ONCEMORE_COMPLETE"  # a shell sets this variable when it asks for completions


class CommandTable(click.Group):
    """The group of all commands in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f".{COMMANDS[cmd_name][0]}", __package__)
        command: click.Command = getattr(module, cmd_name)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"there is no command {args[0]!r}{did_you_mean(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, description) for name, (_, description) in COMMANDS.items()])


def show_completion(ctx: click.Context, option: click.Parameter, shell: str | None) -> None:
    """Print the completion script for *shell*, and exit."""
    if shell is None or ctx.resilient_parsing:
        return
    kind = get_completion_class(shell)
    assert kind is not None  # click knows each of SHELLS
    click.echo(kind(program, {}, "oncemore", COMPLETE).source())
    ctx.exit()


@click.group(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(version("oncemore"), message="%(version)s")
@click.option(
    "--completion",
    type=click.Choice(SHELLS),
    is_eager=True,
    expose_value=False,
    callback=show_completion,
    help='Print the completion script of a shell, as in: eval "$(oncemore --completion bash)"',
)
def program() -> None:
    """Inspect and operate an oncemore ledger.

    Name the ledger by --store or by ONCEMORE_STORE.  Every command has --help, and --json for programs.
    """


def run(argv: Sequence[str] | None, output: Output) -> int:
    """Run the command line and return its exit code.  OncemoreError, KeyboardInterrupt and OSError pass through.

    click's own `main` is not used, because it handles broken pipes and interrupts with other exit codes.
    """
    if COMPLETE in os.environ:
        return shell_complete(program, {}, "oncemore", COMPLETE, os.environ[COMPLETE])
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with program.make_context("oncemore", words.copy(), obj=output) as context:
            code = program.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.Abort:  # at a prompt, "no" or the end of the input
        click.echo("Nothing was changed.", err=True)
        return 1
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else "")
        return 0
    except click.ClickException as error:
        if "--json" in words:  # a mistake before --json keeps click from parsing --json
            output.json = True
            raise ConfigurationError(error.format_message()) from None
        error.show()
        return error.exit_code
    return code if isinstance(code, int) else 0
