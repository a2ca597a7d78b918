"""Items of a batch as JSON rows, rows as records, and text in a form that PostgreSQL can store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..._ledger.model import UNREADABLE, Outcome, Record, decode_outcome
from ..._ledger.states import State
from ..._runtime.clock import SYSTEM
from ...errors import InvalidKey

LONGEST_SPAN = 1e11  # seconds: PostgreSQL's calendar has an end
LONGEST_ID = 2600  # bytes of scope and key that an index entry has room for

UNSAFE = re.compile(r"[\\\x00\ud800-\udfff]")
ESCAPED = re.compile(r"\\(?:([\\0])|u([0-9a-f]{4}))")


def escape_text(text: str) -> str:
    """The text as it is stored.  PostgreSQL has no NUL and no lone surrogates, but a key may contain both."""
    if text.isascii() and "\\" not in text and "\0" not in text:
        return text if type(text) is str else str.__str__(text)  # the JSON encoder refuses subclasses of str
    return UNSAFE.sub(_escape, text)


def unescape_text(text: str) -> str:
    """The text that `escape_text` was given."""
    return ESCAPED.sub(_unescape, text) if "\\" in text else text


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    return {"\\": "\\\\", "\0": "\\0"}.get(character) or f"\\u{ord(character):04x}"


def _unescape(found: re.Match[str]) -> str:
    return {"\\": "\\", "0": "\0"}[found[1]] if found[1] else chr(int(found[2], 16))


def check_length(scope: str, key: str) -> None:
    """Refuse a scope and key that are too long for an index entry."""
    if len(scope) + len(key) <= LONGEST_ID // 4:
        return
    size = len(scope.encode()) + len(key.encode())
    if size > LONGEST_ID:
        raise InvalidKey(f"The scope and the key have {size} bytes together; PostgreSQL has room for {LONGEST_ID}")


# The rows of a batch, which are the first parameter of its statement; their fields are the columns that the SQL reads.


class IdRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Names a record; *n* is the row's position in the batch."""

    n: int = -1
    scope: str
    key: str


class ClaimRow(IdRow, kw_only=True):
    name: str
    fingerprint: str
    holder: str
    lease: float


class ChangeRow(IdRow, kw_only=True):
    token: int
    state: State
    lease: float | None = None
    retention: float | None = None
    status: int | None = None
    response_hash: str | None = None
    note: str | None = None
    audit: bool = False

    @property
    def wakes(self) -> bool:
        """Whether callers that wait for the record should look at it now."""
        return self.state != "running" or self.lease == 0.0


class UnclaimRow(IdRow, kw_only=True):
    holder: str


class TouchRow(IdRow, kw_only=True):
    token: int
    retention: float


class WatchRow(IdRow, kw_only=True):
    token: int


class FindRow(IdRow, kw_only=True):
    token: int = 0


class Item:
    """One call in a batch: its *row*, its *subject* (an Operation, a Lease or a Claim), its *bytes* (an outcome or request).

    *asked* is the time at which its caller began to wait.
    """

    __slots__ = ("asked", "bytes", "id", "row", "subject")

    def __init__(self, row: Any, subject: Any = None, bytes: bytes | None = None) -> None:
        self.row = row
        self.subject = subject
        self.bytes = bytes
        self.id = (row.scope, row.key)
        self.asked = SYSTEM.monotonic()


OUTCOME, NOTE, REQUEST = (Record.__struct_fields__.index(name) for name in ("outcome", "note", "request"))

encode_rows = msgspec.json.Encoder().encode


def read_record(row: Sequence[Any]) -> Record:
    """The record in a row of the columns RECORD.  An outcome that cannot be decoded counts as one that was not kept."""
    columns: list[Any] = [*map(unescape_text, row[:4]), *row[4:]]
    if columns[OUTCOME] is not None:
        try:
            columns[OUTCOME] = decode_outcome(columns[OUTCOME])
        except (msgspec.MsgspecError, ValueError):
            columns[OUTCOME], columns[NOTE] = Outcome("tombstone"), UNREADABLE
    columns[NOTE] = unescape_text(columns[NOTE])
    columns[REQUEST] = columns[REQUEST] or b""
    return Record(*columns)


def is_expired(record: Record) -> bool:
    return record.expires_at is not None and record.expires_at <= record.now
