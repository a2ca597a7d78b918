"""Where a command's answer goes: tables for people, JSON for programs; errors are one sentence, never a traceback."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from itertools import zip_longest
from typing import TYPE_CHECKING

import click

from ...errors import OncemoreError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Where nobody looks at a terminal, a cut-off key is worse than a long line.
WIDE = 1000

# The end of the year 9999: what is kept for longer is shown with this date.
LAST = datetime.max.replace(tzinfo=UTC, microsecond=0).timestamp()

# What needs somebody stands out, on a terminal.
STYLES = {"held": "bold red", "lapsed": "yellow", "running": "cyan", "settled": "green"}


class Screen:
    """What all commands print through; *json* is set by their `--json`."""

    def __init__(self) -> None:
        self.json = False

    def answer(self, data: object, draw: Callable[[Console], None]) -> None:
        """Print *data* as JSON, or let *draw* show the same to a person."""
        if self.json:
            click.echo(json.dumps(data, indent=2))
        else:
            draw(console())

    def failed(self, error: OncemoreError) -> None:
        """Say what went wrong, on standard error."""
        if self.json:
            problem = error.problem()
            told = {name: problem[name] for name in ("error_code", "title", "detail", "retryable")}
            click.echo(json.dumps(told), err=True)
        else:
            click.echo(f"oncemore: {visible(error.detail, keep_lines=True)}", err=True)


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console  # here, because help and JSON do without it

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else WIDE, markup=False, highlight=False, emoji=False)


def draw_table(out: Console, heads: Iterable[str], rows: Iterable[Iterable[object]], *, numbers: bool = False) -> None:
    """A plain table; with *numbers*, all columns but the first are set to the right."""
    texts = [["" if value is None else visible(str(value)) for value in row] for row in rows]
    if not out.is_terminal:
        print_plain([list(heads), *texts], numbers=numbers)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, head in enumerate(heads):
        table.add_column(head, overflow="fold", justify="right" if numbers and place else "left")
    for row in texts:
        table.add_row(*(Text(text, STYLES.get(text, "")) for text in row))
    print_table(out, table)


def print_plain(rows: list[list[str]], *, numbers: bool) -> None:
    """The same where nobody looks: nothing is coloured or folded, and ten thousand rows take no ten seconds."""
    from rich.cells import cell_len

    widths = [max(map(cell_len, column)) for column in zip_longest(*rows, fillvalue="")]
    for row in rows:
        gaps = [" " * (width - cell_len(text)) for text, width in zip(row, widths, strict=False)]
        cells = [
            gap + text if numbers and n else text + gap for n, (text, gap) in enumerate(zip(row, gaps, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())


def draw_pairs(out: Console, pairs: Iterable[tuple[str, object]]) -> None:
    """One line for each name and its value."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, "" if value is None else visible(str(value)))
    print_table(out, table)


def print_table(out: Console, table: Table) -> None:
    """The table, without the blanks that fill its last column."""
    with out.capture() as printed:
        out.print(table)
    click.echo("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()), nl=False)


def visible(text: str, *, keep_lines: bool = False) -> str:
    """*text* with all that a terminal would obey written out: keys and notes are other people's words."""
    kept = "\n\t" if keep_lines else ""
    return "".join(char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text)


def moment(seconds: float | None) -> str | None:
    """A point in time, as the store's clock has it."""
    return None if seconds is None else date(seconds).isoformat(timespec="seconds")


def brief_moment(seconds: float | None) -> str | None:
    """The same for a column of a table, whose head says that it is UTC."""
    return None if seconds is None else date(seconds).strftime("%Y-%m-%d %H:%M:%S")


def date(seconds: float) -> datetime:
    """The date, or the last one that there is."""
    return datetime.fromtimestamp(min(seconds, LAST), UTC)
