"""Converts operations, outcomes and records to the form that Redis stores, and back."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from ..._ledger.model import UNREADABLE, Outcome, Record, decode_outcome, encode_outcome
from ..._ledger.states import State
from ..._runtime.wakeups import Id
from ...errors import InvalidKey

MICRO = 1_000_000
LONGEST = 3_200_000_000.0  # seconds, a century; Lua's numbers are not exact for longer times in microseconds
NOBODY = ("\0", "\0")
DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError)


class RedisRow(msgspec.Struct, array_like=True):
    """A stored record: the fields of `scripts.FIELDS` in their order, and up to two more.

    A settled record also has its outcome and the outcome's hash.  Another record may have its request in *outcome*.
    """

    state: State
    token: int
    attempts: int
    created_at: int
    lease_until: int
    settled_at: int | None
    expires_at: int | None
    accessed_at: int | None
    note: str
    audit: bool
    watched: bool
    lapsed: bool
    decision: str | None
    holder: str
    fingerprint: str
    scope: str
    key: str
    name: str
    outcome: bytes = b""
    response_hash: str = ""


encode = msgspec.msgpack.Encoder().encode
decode_row = msgspec.msgpack.Decoder(RedisRow).decode


def digest(id: Id) -> str:
    """Return the name of an operation's record.  The length keeps scope and key apart."""
    try:
        scope = id[0].encode()
        return blake2b(b"%d:%b%b" % (len(scope), scope, id[1].encode()), digest_size=20).hexdigest()
    except UnicodeEncodeError as error:
        raise InvalidKey("The key or the scope contains half a character (a lone surrogate): remove it") from error


def fields(*values: str | bytes | bool) -> bytes:
    """Encode consecutive fields of a record, fewer than sixteen."""
    try:
        return encode(values)[1:]  # without the byte that makes them an array
    except (UnicodeEncodeError, TypeError):  # msgpack refuses a lone surrogate, and a subclass of str
        return encode([clean(value) if isinstance(value, str) else value for value in values])[1:]


def clean(text: str) -> str:
    """Return *text* as a plain str, with every lone surrogate written as an escape such as `\\ud800`."""
    return str.__str__(text) if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def outcome_fields(outcome: Outcome) -> bytes:
    return fields(encode_outcome(outcome), outcome.digest())


def micros(seconds: float) -> int:
    """Return a duration in whole microseconds, at most LONGEST."""
    return int(seconds * MICRO) if seconds < LONGEST else int(LONGEST * MICRO)


def read_record(id: Id, now: int, value: bytes) -> Record:
    """Return the record *id*.  A record that cannot be read is returned as settled with a tombstone.

    The same is done if the value belongs to another operation, because this caller must not see that outcome.
    A scan does not know which operation a record belongs to, and passes NOBODY.
    """
    try:
        row = decode_row(value)
        readable = id in ((row.scope, row.key), NOBODY)
    except DECODE_ERRORS:
        readable = False
    if not readable:
        row = RedisRow("settled", 0, 0, 0, 0, None, None, None, "", False, False, False, None, "", "", *id, "")
    outcome, request, note = None, row.outcome, row.note
    if row.state == "settled":
        try:
            outcome, request = decode_outcome(row.outcome), b""
        except DECODE_ERRORS:
            outcome, request, note = Outcome("tombstone"), b"", UNREADABLE
    return Record(
        scope=row.scope,
        key=row.key,
        name=row.name,
        fingerprint=row.fingerprint,
        state=row.state,
        token=row.token,
        holder=row.holder,
        attempts=row.attempts,
        created_at=row.created_at / MICRO,
        lease_until=row.lease_until / MICRO,
        now=now / MICRO,
        settled_at=seconds(row.settled_at),
        expires_at=seconds(row.expires_at),
        accessed_at=seconds(row.accessed_at),
        outcome=outcome,
        response_hash=row.response_hash,
        note=note,
        request=request,
    )


def seconds(at: int | None) -> float | None:
    return None if at is None else at / MICRO
