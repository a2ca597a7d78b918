"""What a load asks of a store, computed from what was measured: pure arithmetic, no store is asked.

The constants are bench/storage.py's: settled records written through the guard, with outcomes that no compression makes
smaller, in a ledger that has been purged and filled again.  Responses in JSON take less on PostgreSQL, which compresses
what is longer than 2 kB.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

# For which sizes of outcome it was measured, in bytes, with so many bytes of scope and key together.
SIZES = (0, 256, 1024, 2048, 4096, 16384)
NAMES = 80

# A claim and its settlement: each is durable before anyone hears of it.
WRITES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One store: bytes that a record takes, and bytes written for it, by size of outcome; and what a process opens."""

    kept: tuple[int, ...]
    kept_per_name_byte: float
    written: tuple[int, ...]
    written_per_name_byte: float
    connections: int
    writers: int | None  # how many syncs can go on at once: for each process, or None where all processes share one
    where: str  # what is filled


STORES = {
    "sqlite": Measured(
        kept=(565, 864, 2214, 4265, 4798, 17086),
        kept_per_name_byte=2.5,
        written=(11128, 11845, 14996, 19561, 20126, 45754),
        written_per_name_byte=53.5,
        connections=2,
        writers=None,
        where="disk",
    ),
    "postgresql": Measured(
        kept=(1285, 1587, 2344, 4076, 6841, 18552),
        kept_per_name_byte=6.9,
        written=(1495, 1767, 2541, 3854, 6044, 19176),
        written_per_name_byte=5.0,
        connections=4,
        writers=2,
        where="disk",
    ),
    "redis": Measured(
        kept=(515, 772, 1541, 2567, 4621, 16914),
        kept_per_name_byte=1.3,
        written=(802, 1060, 1829, 2853, 4901, 17190),
        written_per_name_byte=2.0,
        connections=4,
        writers=None,
        where="memory",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """So many new operations a second, each kept for *ttl* seconds; *outcome* and *names* are in bytes, *sync* in seconds."""

    rate: float
    ttl: float
    outcome: int
    names: int
    processes: int
    sync: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What the load needs of one store."""

    records: int
    record_bytes: int
    kept_bytes: int
    where: str
    written_per_second: int
    syncs_per_second: int
    connections: int


def need(load: Load, store: Measured) -> Need:
    """Records pile up for one retention; from then on as many expire as are added."""
    record = along(store.kept, load.outcome) + store.kept_per_name_byte * (load.names - NAMES)
    written = along(store.written, load.outcome) + store.written_per_name_byte * (load.names - NAMES)
    # Who comes while a sync is under way shares the next one, so there is never more than one after the other.
    most = (store.writers or 1) * (load.processes if store.writers else 1) / load.sync
    records = round(load.rate * load.ttl)
    return Need(
        records=records,
        record_bytes=round(record),
        kept_bytes=round(records * record),
        where=store.where,
        written_per_second=round(load.rate * written),
        syncs_per_second=round(min(WRITES * load.rate, most)),
        connections=store.connections * load.processes,
    )


def along(curve: tuple[int, ...], size: int) -> float:
    """The figure for *size*, on the straight line between the two sizes beside it that were measured."""
    at = min(max(bisect_right(SIZES, size), 1), len(SIZES) - 1)
    low, high = SIZES[at - 1], SIZES[at]
    return curve[at - 1] + (curve[at] - curve[at - 1]) * (size - low) / (high - low)
