"""Events as log records: one line for the reader, and the same facts as fields for whatever collects the logs.

guard = Guard(url, observers=[log_events(keys="digest")])
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Callable
from typing import Any, Literal

from .._ledger.events import Event, EventKind, Observer
from ..errors import ConfigurationError

Keys = Literal["plain", "digest"]

# The record's state before and after; an event that says them itself is believed.
STATES: dict[EventKind, tuple[str, str]] = {
    "claimed": ("absent", "running"),
    "settled": ("running", "settled"),
    "released": ("running", "released"),
    "replayed": ("settled", "settled"),
    "waiting": ("running", "running"),
    "renewed": ("running", "running"),
    "lapsed": ("running", "lapsed"),
    "held": ("running", "held"),
    "resolved": ("lapsed", "running"),
    "unstored": ("running", "running"),
}
# What came of the operation, in the one word that searches and alerts look for.
OUTCOMES: dict[EventKind, str] = {"settled": "created", "unstored": "created", "replayed": "replayed"}
LEVELS: dict[EventKind, int] = {
    "waiting": logging.DEBUG,
    "renewed": logging.DEBUG,
    "lapsed": logging.WARNING,
    "held": logging.WARNING,
    "suspected": logging.WARNING,
    "fenced": logging.WARNING,
    "unstored": logging.ERROR,
    "failed": logging.ERROR,
}
IN_A_LINE = (
    "operation",
    "idempotency_key",
    "payload_hash",
    "attempt",
    "status",
    "outcome",
    "error_code",
    "detail",
)


def log_events(
    logger: logging.Logger | str = "oncemore.events", *, keys: Keys = "plain", secret: bytes = b""
) -> Observer:
    """An observer that logs each event, with its facts as fields of the record (`extra`).

    With `keys="digest"`, keys and scopes, which may name people, appear only as digests: the same one for the same key,
    so that lines can still be found together.  With a *secret*, nobody else can tell which key a digest stands for.
    """
    to = logging.getLogger(logger) if isinstance(logger, str) else logger
    shown = shown_by(keys, secret)

    def observe(event: Event) -> None:
        level = LEVELS.get(event.kind, logging.INFO)
        if to.isEnabledFor(level):
            fields = fields_of(event, shown)
            to.log(level, f"{event.kind} %s", line(fields), extra=fields)

    return observe


def shown_by(keys: Keys, secret: bytes) -> Callable[[str], str]:
    """How keys and scopes are shown."""
    if keys not in ("plain", "digest"):
        raise ConfigurationError(f"keys = {keys!r} is unknown: choose 'plain' or 'digest'")
    if secret and keys == "plain":
        raise ConfigurationError("secret: it is for keys = 'digest'; drop one of them")
    return plain if keys == "plain" else digest(secret)


def plain(text: str) -> str:
    return text


def digest(secret: bytes) -> Callable[[str], str]:
    """A function that gives the digest by which a text is shown."""

    def shown(text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        hashed = hmac.digest(secret, data, "sha256") if secret else hashlib.sha256(data).digest()
        return f"sha256:{hashed.hex()[:32]}"

    return shown


def fields_of(event: Event, shown: Callable[[str], str]) -> dict[str, Any]:
    """The facts of an event, under the names that they have in every log."""
    before, after = STATES.get(event.kind, ("", ""))
    if event.kind == "claimed" and event.attempt > 1:  # a former attempt was given back
        before = "released"
    operation = event.operation
    return {
        "event": event.kind,
        "operation": operation.name,
        "scope": shown(operation.scope),
        "idempotency_key": shown(operation.key),
        "payload_hash": operation.fingerprint,
        "status": event.status,
        "attempt": event.attempt,
        "token": event.token,
        "from_state": event.from_state or before,
        "to_state": event.to_state or after,
        "error_code": event.code,
        "outcome": OUTCOMES.get(event.kind, ""),
        "detail": detail_of(event, shown),
    }


def detail_of(event: Event, shown: Callable[[str], str]) -> str:
    """The event's own words; of a suspected duplicate they are its twin's key, and a store's may name the key, too."""
    if shown is plain or not event.detail:
        return event.detail
    if event.kind == "suspected":
        return shown(event.detail)
    spelt = {way: shown(name) for name in event.operation.id if name for way in (name, repr(name)[1:-1])}
    # The longest first, and all at once: a scope may contain the key, and a digest may contain a short one.
    either = "|".join(map(re.escape, sorted(spelt, key=len, reverse=True)))
    return re.sub(either, lambda found: spelt[found[0]], event.detail) if either else event.detail


def line(fields: dict[str, Any]) -> str:
    """The facts that there are, in one line; quoted as Python does, so that a key cannot begin a line of its own."""
    before, after = fields["from_state"], fields["to_state"]
    parts = [f"{name}={fields[name]!r}" for name in IN_A_LINE if fields[name]]
    return " ".join([*parts, f"{before}→{after}"] if before != after else parts)
