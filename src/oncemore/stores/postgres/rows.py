"""What goes into PostgreSQL and comes out: items as JSON rows, rows as records, and text that it can hold."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..._ledger.model import Outcome, Record, decode_outcome
from ..._ledger.states import State
from ..._runtime.clock import SYSTEM
from ...errors import InvalidKey

LONGEST_SPAN = 1e11  # seconds: PostgreSQL's calendar has an end
LONGEST_ID = 2600  # bytes of scope and key that an index entry has room for

UNSAFE = re.compile(r"[\\\x00\ud800-\udfff]")
ESCAPED = re.compile(r"\\(?:([\\0])|u([0-9a-f]{4}))")


def safe(text: str) -> str:
    """The text as it is stored.  PostgreSQL knows no NUL and no half of a surrogate pair, but a key may have both."""
    if text.isascii() and "\\" not in text and "\0" not in text:
        return text if type(text) is str else str.__str__(text)  # the encoder takes none of a class of its own
    return UNSAFE.sub(_escape, text)


def plain(text: str) -> str:
    """The text that `safe` was given."""
    return ESCAPED.sub(_unescape, text) if "\\" in text else text


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return {"\\": "\\\\", "\0": "\\0"}.get(character) or f"\\u{ord(character):04x}"


def _unescape(found: re.Match[str]) -> str:
    return {"\\": "\\", "0": "\0"}[found[1]] if found[1] else chr(int(found[2], 16))


def check_length(scope: str, key: str) -> None:
    """Refuse a name that the index has no room for."""
    if len(scope) + len(key) <= LONGEST_ID // 4:
        return
    size = len(scope.encode()) + len(key.encode())
    if size > LONGEST_ID:
        raise InvalidKey(f"The scope and the key have {size} bytes together; PostgreSQL has room for {LONGEST_ID}")


# The rows of the grouped statements' first parameter; their fields are the columns that the SQL reads.


class Named(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A row that names a record; *n* is its place in the group."""

    n: int = -1
    scope: str
    key: str


class Claimed(Named, kw_only=True):
    name: str
    fingerprint: str
    holder: str
    lease: float


class Moved(Named, kw_only=True):
    token: int
    state: State
    lease: float | None = None
    retention: float | None = None
    status: int | None = None
    response_hash: str | None = None
    note: str | None = None
    audit: bool = False

    @property
    def ends(self) -> bool:
        """Whether those who wait for the record should look at it now."""
        return self.state != "running" or self.lease == 0.0


class Touched(Named, kw_only=True):
    token: int
    retention: float


class Watched(Named, kw_only=True):
    token: int


class Found(Named, kw_only=True):
    token: int = 0


class Item:
    """One caller's part of a group: its *row*, *what* it is about, and since when it has been waiting.

    *met*: a record was in its way before.
    """

    __slots__ = ("asked", "id", "met", "outcome", "row", "what")

    def __init__(self, row: Any, what: Any = None, outcome: bytes | None = None) -> None:
        self.row = row
        self.what = what
        self.outcome = outcome
        self.id = (row.scope, row.key)
        self.asked = SYSTEM.monotonic()
        self.met = False


OUTCOME, NOTE = (Record.__struct_fields__.index(name) for name in ("outcome", "note"))

encode_rows = msgspec.json.Encoder().encode


def read_record(row: Sequence[Any]) -> Record:
    """The record in a row of the columns RECORD; an outcome that cannot be read is as one that was not kept."""
    columns: list[Any] = [*map(plain, row[:4]), *row[4:]]
    if columns[OUTCOME] is not None:
        try:
            columns[OUTCOME] = decode_outcome(columns[OUTCOME])
        except (msgspec.MsgspecError, ValueError):
            columns[OUTCOME], columns[NOTE] = Outcome("tombstone"), "unreadable record"
    columns[NOTE] = plain(columns[NOTE])
    return Record(*columns)
