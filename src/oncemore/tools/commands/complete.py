"""`oncemore complete module:completer`: finishes the operations that were left unfinished."""

from __future__ import annotations

import click

from ..complete import load, rounds
from .options import json_option
from .screen import Screen, visible


@click.command()
@click.argument("completer", metavar="MODULE:NAME")
@click.option("--once", is_flag=True, help="One round, rather than until it is interrupted.")
@json_option
@click.pass_obj
def complete(screen: Screen, completer: str, once: bool) -> int:
    """Finish the operations in steps whose performers have vanished, by the Completer that MODULE:NAME names.

    Each is told when it ends.  With --once, the exit code is 1 where something is left that failed or is held.
    """

    def report(line: str) -> None:
        click.echo(visible(line), err=screen.json)  # the answer alone is JSON

    try:
        tally = rounds(load(completer), once, report)
    except KeyboardInterrupt:
        if once:
            raise
        return 0  # which is how it ends, where it goes on and on
    counts = {name: getattr(tally, name) for name in ("total", "completed", "failing", "held", "unreadable")}
    screen.answer(
        counts,
        lambda out: click.echo(
            f"{tally.total} unfinished: {tally.completed} completed, {tally.failing} to be tried again, "
            f"{tally.held} held, {tally.unreadable} without a request"
        ),
    )
    return 1 if tally.failing or tally.held else 0
