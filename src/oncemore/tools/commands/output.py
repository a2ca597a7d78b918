"""The output of commands: text and tables for people, JSON for programs, errors on standard error."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ...errors import OncemoreError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

LAST_DATE = datetime.max.replace(tzinfo=UTC, microsecond=0).timestamp()
WIDE = 1000  # columns, if the output is not a terminal: long lines are better than cut keys
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # spreadsheets take a cell that begins with one for a formula
STYLES = {"held": "bold red", "lapsed": "yellow", "running": "cyan", "settled": "green"}


class Output:
    """Prints the results and errors of a command.  The option `--json` sets *json*."""

    def __init__(self) -> None:
        self.json = False

    def show(self, data: object, text: str | Callable[[], None]) -> None:
        """Print *data* if the caller asked for JSON, otherwise *text*: a string, or a function that prints."""
        if self.json:
            click.echo(json.dumps(data, indent=2))
        elif isinstance(text, str):
            click.echo(text)
        else:
            text()

    def show_error(self, error: OncemoreError) -> None:
        if self.json:
            problem = error.problem()
            shown = {name: problem[name] for name in ("error_code", "title", "detail", "retryable")}
            click.echo(json.dumps(shown), err=True)
        else:
            click.echo(f"oncemore: {escape(error.detail, keep_lines=True)}", err=True)

    @contextmanager
    def progress(self, total: int) -> Iterator[Callable[..., object]]:
        """Show a progress bar if standard error is a terminal.

        Call the function with the number that is done and, if *total* was not known, the number of all.
        """
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        terminal = console(stderr=True)
        with Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=terminal,
            transient=True,
            disable=not terminal.is_terminal,
        ) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, of=total: bar.update(task, completed=done, total=max(of, done))


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console  # imported late: --help and --json do not need it

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, markup=False, highlight=False, emoji=False)


def print_table(heads: Iterable[str], rows: Iterable[Iterable[object]], *, numbers: bool = False) -> None:
    """Print a table without lines.  With *numbers*, all columns except the first are aligned to the right."""
    out = console()
    texts = [["" if value is None else escape(str(value)) for value in row] for row in rows]
    if not out.is_terminal:
        print_plain_table([list(heads), *texts], numbers=numbers)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, head in enumerate(heads):
        table.add_column(head, overflow="fold", justify="right" if numbers and place else "left")
    for row in texts:
        table.add_row(*(Text(text, STYLES.get(text, "")) for text in row))
    print_trimmed(out, table)


def print_page(heads: Iterable[str], rows: Iterable[Iterable[object]], cursor: str | None) -> None:
    """Print one page of a list, and the option that continues it."""
    print_table(heads, rows)
    if cursor:
        click.echo(f"\nThere are more: --cursor {shell_quote(cursor)}")


def print_csv(heads: Iterable[str], rows: Iterable[Iterable[object]], cursor: str | None) -> None:
    """Print one page of a list for spreadsheets.  A cell that begins like a formula gets an apostrophe before it."""
    written = csv.writer(sys.stdout, lineterminator="\n")
    written.writerow(heads)
    for row in rows:
        written.writerow([f"'{cell}" if str(cell).startswith(FORMULA) else cell for cell in row])
    if cursor:
        click.echo(f"There are more: --cursor {shell_quote(cursor)}", err=True)


def print_plain_table(rows: list[list[str]], *, numbers: bool) -> None:
    """Print the rows without colours or folding, for pipes.  Rich would take ten seconds for ten thousand rows."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        gaps = [" " * (width - cell_len(text)) for text, width in zip(row, widths, strict=False)]
        cells = [
            gap + text if numbers and n else text + gap for n, (text, gap) in enumerate(zip(row, gaps, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Print a line for each name, with its value."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, "" if value is None else escape(str(value)))
    print_trimmed(console(), table)


def print_trimmed(out: Console, table: Table) -> None:
    """Print *table* without the spaces with which rich fills its last column."""
    with out.capture() as printed:
        out.print(table)
    click.echo("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()), nl=False)


def escape(text: str, *, keep_lines: bool = False) -> str:
    """Return *text* with control characters escaped, because a key may contain an attacker's terminal commands."""
    kept = "\n\t" if keep_lines else ""
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)


def struct_fields(row: msgspec.Struct, *hidden: str) -> dict[str, Any]:
    """Return the fields of *row* except the *hidden* ones, with times as text."""
    fields = {name: getattr(row, name) for name in row.__struct_fields__ if name not in hidden}
    for name, value in fields.items():
        if value is not None and (name in ("at", "failing_since") or name.endswith("_at")):
            fields[name] = date(value).isoformat(timespec="milliseconds")
    return fields


def iso_date(seconds: float | None) -> str | None:
    """Return the date in UTC, as ISO 8601 writes it."""
    return None if seconds is None else date(seconds).isoformat(timespec="seconds")


def date(seconds: float) -> datetime:
    """Return the date in UTC.  A time after the year 9999 becomes the end of that year."""
    return datetime.fromtimestamp(min(seconds, LAST_DATE), UTC)


def shell_quote(cursor: str) -> str:
    """Return *cursor* quoted for a shell.

    It may contain keys, and they may contain terminal commands.  Such a cursor is JSON, so JSON escapes mean the same.
    """
    return shlex.quote("".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in cursor))
