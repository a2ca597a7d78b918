"""`oncemore complete`: finish operations in steps that were interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import click

from ..._ledger.completer import Completer, End, Tally
from ..._ledger.model import Record
from .options import json_option, load_object
from .output import Output, escape


@click.command()
@click.argument("completer", metavar="MODULE:NAME")
@click.option("--once", is_flag=True, help="Run one round, instead of running until it is interrupted.")
@json_option
@click.pass_obj
def complete(output: Output, completer: str, once: bool) -> int:
    """Finish operations in steps that a crash interrupted, with the Completer that MODULE:NAME names.

    Prints a line for each operation.  With --once, the exit code is 1 if an operation failed again or is held.
    """

    def report(line: str) -> None:
        click.echo(escape(line), err=output.json)  # with --json, standard output has the JSON only

    try:
        tally = run_completer(load_object(completer, "a completer", Completer), once, report)
    except KeyboardInterrupt:
        if once:
            raise
        return 0  # without --once, an interrupt is the ordinary end
    counts = {name: getattr(tally, name) for name in ("total", "completed", "failing", "held", "unreadable")}
    output.show(
        counts,
        f"{tally.total} unfinished: {tally.completed} completed, {tally.failing} to be tried again, "
        f"{tally.held} held, {tally.unreadable} without a request",
    )
    return 1 if tally.failing or tally.held else 0


def run_completer(completer: Completer, once: bool, report: Callable[[str], object]) -> Tally:
    """Run one round or, without *once*, rounds until an interrupt.  Pass a line for each operation to *report*.

    The rounds run on an event loop, so that both sync and async performers can be called.
    """
    progress = completer.progress

    def report_operation(record: Record, end: End) -> None:
        report(f"{end:10} {record.name} {record.key} (attempt {record.attempts + 1})")
        if progress is not None:
            progress(record, end)

    completer.progress = report_operation
    try:
        if not once:
            asyncio.run(completer.arun())
        return asyncio.run(completer.arun_once())
    finally:
        completer.progress = progress
