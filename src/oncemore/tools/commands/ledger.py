"""`oncemore stats` and `oncemore purge`: the ledger as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
import msgspec

from ..._ledger.connect import hide_password
from .options import agreed, json_option, ledger, store_option, yes_option
from .screen import Screen, console, draw_table

MEANING = {
    "running": "someone performs it",
    "settled": "its outcome is kept",
    "released": "failed; the next one performs it",
    "held": "nobody knows whether it happened: oncemore keys resolve",
    "lapsed": "of the running ones: their performer has vanished",
    "expired": "of all: their retention is over, oncemore purge removes them",
    "archived": "kept for the audit",
}


@click.command()
@store_option
@json_option
@click.pass_obj
def stats(screen: Screen, url: str | None) -> None:
    """Count the records of the ledger, by state."""
    with ledger(url) as guard:
        counts: dict[str, int] = msgspec.to_builtins(guard.stats())
    rows = [(name, f"{count:,}", MEANING[name]) for name, count in counts.items()]
    screen.answer(counts, lambda out: draw_table(out, ("state", "records", ""), rows))


@click.command()
@click.option("--batch", type=click.IntRange(1), default=1000, show_default=True, help="Records per step.")
@yes_option
@store_option
@json_option
@click.pass_obj
def purge(screen: Screen, url: str | None, batch: int, yes: bool) -> None:
    """Remove the records whose retention is over.

    They are as good as gone already: this frees their space, in short steps, beside the traffic.  Operations that run or
    are held are never removed; rules with expired = "keep" have theirs archived.
    """
    with ledger(url) as guard:
        due = guard.stats().expired
        if due:
            agreed(f"Remove {due:,} expired records from {hide_password(guard.store.url)}?", yes=yes)
        with progress_bar(due) as advance:
            removed = guard.purge(batch=batch, progress=advance)
    screen.answer({"removed": removed}, lambda out: out.print(f"Removed {removed:,} expired records."))


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[int], object]]:
    """Shows how far it is, on a terminal; the function is told how many are done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    out = console(stderr=True)
    with Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    ) as bar:
        task = bar.add_task("purge", total=total)
        yield lambda done: bar.update(task, completed=done, total=max(total, done))
