"""Items of a batch as JSON rows, rows as records, and text in a form that PostgreSQL can store."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ..._ledger.model import UNREADABLE, Outcome, Record, decode_outcome
from ..._ledger.states import State
from ..._runtime.clock import SYSTEM
from ..._runtime.wakeups import Id
from ...errors import InvalidKey

LONGEST_SPAN = 1e11  # seconds: PostgreSQL's calendar has an end
LONGEST_ID = 2600  # bytes of scope and key that fit into an index entry

UNSAFE = re.compile(r"[\\\x00\ud800-\udfff]")
ESCAPED = re.compile(r"\\(?:([\\0])|u([0-9a-f]{4}))")


def escape_text(text: str) -> str:
    """Return the text as it is stored.  PostgreSQL cannot store NUL and lone surrogates, but a key may contain both."""
    if text.isascii() and "\\" not in text and "\0" not in text:
        return text if type(text) is str else str.__str__(text)  # the JSON encoder refuses subclasses of str
    return UNSAFE.sub(_escape, text)


def unescape_text(text: str) -> str:
    """Return the text that `escape_text` was given."""
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
        raise InvalidKey(
            f"The scope and the key have {size} bytes together; PostgreSQL has room for {LONGEST_ID}: use a shorter key"
        )


class ItemRow(msgspec.Struct, omit_defaults=True, kw_only=True):
    """An item as its statement reads it from JSON: the columns of its verb.  *n* is its position in the batch."""

    n: int = -1
    scope: str
    key: str
    token: int | None = None
    name: str | None = None
    fingerprint: str | None = None
    holder: str | None = None
    state: State | None = None
    lease: float | None = None
    retention: float | None = None
    status: int | None = None
    response_hash: str | None = None
    note: str | None = None
    audit: bool = False


Verb = Literal["claim", "change", "touch", "watch", "find", "unclaim"]


class Item:
    """One call in a batch.

    Args:
        verb: Its statement.  "change" is any write of a lease's owner.
        id: The record's scope and key.
        subject: The Claim or Lease that the call is about, if there is one.
        bytes: The outcome or the request.
        columns: The item's other columns.
    """

    __slots__ = ("asked", "bytes", "id", "row", "subject", "verb")

    def __init__(self, verb: Verb, id: Id, subject: Any = None, bytes: bytes | None = None, **columns: Any) -> None:
        scope, key = self.id = (escape_text(id[0]), escape_text(id[1]))
        self.verb = verb
        self.subject = subject
        self.bytes = bytes
        self.row = ItemRow(scope=scope, key=key, **columns)
        self.asked = SYSTEM.monotonic()  # the time when its caller began to wait

    @property
    def wakes(self) -> bool:
        """Whether this change should wake the callers that wait for the record."""
        return self.row.state != "running" or self.row.lease == 0.0


OUTCOME, NOTE, REQUEST = (Record.__struct_fields__.index(name) for name in ("outcome", "note", "request"))

encode_rows = msgspec.json.Encoder().encode


def read_record(row: Sequence[Any]) -> Record:
    """Return the record in a row of the columns RECORD.  An outcome that cannot be decoded becomes a tombstone."""
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
