"""Events as log records: one line for people, and the same facts as fields for a log collector.

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

# The record's state before and after each kind of event, unless the event itself has them.
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
# The value of the field `outcome`, for searches and alerts.
OUTCOMES: dict[EventKind, str] = {"settled": "created", "unstored": "created", "replayed": "replayed"}
LEVELS: dict[EventKind, int] = {
    "waiting": logging.DEBUG,
    "renewed": logging.DEBUG,
    "lapsed": logging.WARNING,
    "missed": logging.WARNING,
    "held": logging.WARNING,
    "suspected": logging.WARNING,
    "shadowed": logging.INFO,
    "fenced": logging.WARNING,
    "published": logging.DEBUG,
    "received": logging.DEBUG,
    "unpublished": logging.WARNING,
    "dead": logging.ERROR,
    "unstored": logging.ERROR,
    "failed": logging.ERROR,
}
LINE_FIELDS = (
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
    """Return an observer that logs each event, with its facts as fields of the log record (`extra`).

    Args:
        logger: The logger, or its name.
        keys: With "digest", keys and scopes appear only as digests, because they may name people.  Equal keys have equal
            digests, so the lines of an operation can still be found together.
        secret: A key for the digests.  Without it, anyone can compute the digest of a key that they guess.
    """
    to = logging.getLogger(logger) if isinstance(logger, str) else logger
    display = key_display(keys, secret)

    def observe(event: Event) -> None:
        level = LEVELS.get(event.kind, logging.INFO)
        if to.isEnabledFor(level):
            fields = event_fields(event, display)
            to.log(level, f"{event.kind} %s", format_line(fields), extra=fields)

    return observe


def key_display(keys: Keys, secret: bytes) -> Callable[[str], str]:
    """Return the function that converts keys and scopes for display."""
    if keys not in ("plain", "digest"):
        raise ConfigurationError(f"keys = {keys!r} is unknown: choose 'plain' or 'digest'")
    if secret and keys == "plain":
        raise ConfigurationError("secret is used with keys = 'digest' only: add keys='digest', or remove secret")
    return show_plain if keys == "plain" else digest_with(secret)


def show_plain(text: str) -> str:
    return text


def digest_with(secret: bytes) -> Callable[[str], str]:
    """Return a function that computes digests, with *secret* as HMAC's key if it is not empty."""

    def digest(text: str) -> str:
        data = text.encode("utf-8", "surrogatepass")
        hashed = hmac.digest(secret, data, "sha256") if secret else hashlib.sha256(data).digest()
        return f"sha256:{hashed.hex()[:32]}"

    return digest


def event_fields(event: Event, display: Callable[[str], str]) -> dict[str, Any]:
    """Return the fields of a log record or span event.  Their names are part of the public interface."""
    before, after = STATES.get(event.kind, ("", ""))
    if event.kind == "claimed" and event.attempt > 1:  # an earlier attempt failed
        before = "released"
    operation = event.operation
    return {
        "event": event.kind,
        "operation": operation.name,
        "scope": display(operation.scope),
        "idempotency_key": display(operation.key),
        "payload_hash": operation.fingerprint,
        "status": event.status,
        "attempt": event.attempt,
        "token": event.token,
        "from_state": event.from_state or before,
        "to_state": event.to_state or after,
        "error_code": event.code,
        "outcome": OUTCOMES.get(event.kind, ""),
        "detail": event_detail(event, display),
    }


def event_detail(event: Event, display: Callable[[str], str]) -> str:
    """Return the event's detail with keys and scopes replaced by their digests, if digests are wanted.

    The detail of a suspected duplicate is the other key.  The message of a store may quote the key or the scope.
    """
    if display is show_plain or not event.detail:
        return event.detail
    if event.kind == "suspected":
        return display(event.detail)
    digests = {way: display(name) for name in event.operation.id if name for way in (name, repr(name)[1:-1])}
    # The longest name first, because a scope may contain the key.  One pass, because a digest may contain a short key.
    names = "|".join(map(re.escape, sorted(digests, key=len, reverse=True)))
    return re.sub(names, lambda found: digests[found[0]], event.detail) if names else event.detail


def format_line(fields: dict[str, Any]) -> str:
    """Return the fields that have a value as one line.  `repr` escapes line breaks, so no key can forge a second line."""
    before, after = fields["from_state"], fields["to_state"]
    parts = [f"{name}={fields[name]!r}" for name in LINE_FIELDS if fields[name]]
    return " ".join([*parts, f"{before}→{after}"] if before != after else parts)
