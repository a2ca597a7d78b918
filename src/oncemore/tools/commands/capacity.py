"""`oncemore capacity`: compute the storage, connections and syncs that a load needs on each store.

The constants are measured by bench/storage.py: settled records, written through the guard, with outcomes that cannot be
compressed, in a ledger that was purged and filled again.  JSON responses take less on PostgreSQL, which compresses values
longer than 2 kB.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import click

from ..._contract.settings import size
from .options import json_option, number_or_text, read_duration
from .output import Output, print_table

SIZES = (0, 256, 1024, 2048, 4096, 16384)  # bytes of the outcomes that were measured
NAMES = 80  # bytes of scope and key together, in all measurements
WRITES = 2  # durable writes per operation: the claim and the settlement

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
HEADS = ("store", "records", "bytes each", "kept", "written", "syncs", "connections")
NOTE = (
    "Computed from measurements of settled records on SQLite, PostgreSQL and Valkey (python -m bench.storage), with outcomes "
    "that do not compress.  Syncs are an upper limit: operations that come at the same time share one."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFigures:
    """The measurements of one store.

    Attributes:
        kept: Bytes that a record takes, for each of SIZES.
        kept_per_name_byte: Additional bytes for each byte of scope and key beyond NAMES.
        written: Bytes that are written for a record, for each of SIZES.
        written_per_name_byte: Additional bytes for each byte of scope and key beyond NAMES.
        connections: Connections that a process opens.
        writers: Syncs that a process can have under way, or None if all processes share one.
        where: The medium that records fill.
    """

    kept: tuple[int, ...]
    kept_per_name_byte: float
    written: tuple[int, ...]
    written_per_name_byte: float
    connections: int
    writers: int | None
    where: str


STORES = {
    "sqlite": StoreFigures(
        kept=(565, 864, 2214, 4265, 4798, 17086),
        kept_per_name_byte=2.5,
        written=(11128, 11845, 14996, 19561, 20126, 45754),
        written_per_name_byte=53.5,
        connections=2,
        writers=None,
        where="disk",
    ),
    "postgresql": StoreFigures(
        kept=(1285, 1587, 2344, 4076, 6841, 18552),
        kept_per_name_byte=6.9,
        written=(1495, 1767, 2541, 3854, 6044, 19176),
        written_per_name_byte=5.0,
        connections=4,
        writers=2,
        where="disk",
    ),
    "redis": StoreFigures(
        kept=(515, 772, 1541, 2567, 4621, 16914),
        kept_per_name_byte=1.3,
        written=(802, 1060, 1829, 2853, 4901, 17190),
        written_per_name_byte=2.0,
        connections=4,
        writers=None,
        where="memory",
    ),
}


def requirements(
    store: StoreFigures, *, rate: float, ttl: float, outcome: int, names: int, processes: int, sync: float
) -> dict[str, Any]:
    """Compute the needs of a load once a retention has passed.  From then on, as many records expire as are added.

    The load is *rate* new operations per second, kept for *ttl* seconds; *outcome* and *names* are bytes, *sync* is seconds.
    """
    record = interpolate(store.kept, outcome) + store.kept_per_name_byte * (names - NAMES)
    written = interpolate(store.written, outcome) + store.written_per_name_byte * (names - NAMES)
    # Operations that arrive during a sync share the next one, so a writer's syncs follow each other.
    most_syncs = (store.writers or 1) * (processes if store.writers else 1) / sync
    records = round(rate * ttl)
    return {
        "records": records,
        "record_bytes": round(record),
        "kept_bytes": round(records * record),
        "where": store.where,
        "written_per_second": round(rate * written),
        "syncs_per_second": round(min(WRITES * rate, most_syncs)),
        "connections": store.connections * processes,
    }


def interpolate(figures: tuple[int, ...], size: int) -> float:
    """Return the figure for *size*, on the straight line through the two nearest sizes that were measured."""
    at = min(max(bisect_right(SIZES, size), 1), len(SIZES) - 1)
    low, high = SIZES[at - 1], SIZES[at]
    return figures[at - 1] + (figures[at] - figures[at - 1]) * (size - low) / (high - low)


class FiniteNumber(click.FloatRange):
    """A number within a range.  click alone accepts `nan` in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return number if math.isfinite(number) else self.fail(f"{value} is not a finite number", param, ctx)


read_size = number_or_text(size)


@click.command()
@click.option(
    "--rate", type=FiniteNumber(0, min_open=True), default=100.0, show_default=True, help="New operations per second."
)
@click.option(
    "--ttl", metavar="TIME", callback=read_duration, default="1d", show_default=True, help="How long records are kept."
)
@click.option(
    "--outcome",
    metavar="SIZE",
    callback=read_size,
    default="1KiB",
    show_default=True,
    help="Size of a response's body.",
)
@click.option(
    "--names",
    metavar="SIZE",
    callback=read_size,
    default="80",
    show_default=True,
    help="Size of scope and key together.",
)
@click.option(
    "--processes", type=click.IntRange(1), default=4, show_default=True, help="Processes that use the ledger."
)
@click.option(
    "--sync",
    metavar="TIME",
    callback=read_duration,
    default="2ms",
    show_default=True,
    help="Time of a sync to your disk.",
)
@click.option(
    "--on", "stores", type=click.Choice(list(STORES)), multiple=True, help="Only this store; may be repeated."
)
@json_option
@click.pass_obj
def capacity(output: Output, /, stores: tuple[str, ...], **load: Any) -> None:
    """Compute the storage, connections and syncs that a load needs on each store.

    Replays are not counted, because they write nothing.  Records of failed operations are kept too, without an outcome.
    """
    if load["ttl"] <= 0 or load["sync"] <= 0:
        raise click.UsageError("--ttl and --sync must be longer than zero.")
    needed = {name: requirements(STORES[name], **load) for name in stores or STORES}

    def print_needed() -> None:
        print_table(HEADS, (store_cells(name, each) for name, each in needed.items()), numbers=True)
        click.echo(f"\n{NOTE}")

    output.show({"load": load, "stores": needed}, print_needed)


def store_cells(name: str, needed: dict[str, Any]) -> list[object]:
    """Return the cells of a store's line in the table."""
    return [
        name,
        f"{needed['records']:,}",
        f"{needed['record_bytes']:,}",
        f"{bytes_text(needed['kept_bytes'])} of {needed['where']}",
        f"{bytes_text(needed['written_per_second'])}/s",
        f"{needed['syncs_per_second']:,}/s",
        needed["connections"],
    ]


def bytes_text(count: float) -> str:
    """Return a number of bytes in a unit that leaves at most three digits before the point."""
    power = min(int(math.log10(count)) // 3, len(UNITS) - 1) if count >= 1 else 0
    return f"{count / 1000**power:.3g} {UNITS[power]}"
