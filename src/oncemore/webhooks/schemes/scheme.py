"""What every signature scheme does: verify the raw bytes, then say which event they are."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from ..._runtime.clock import TimeSource
from ...errors import ConfigurationError, InvalidPayload, WebhookError
from ..signature import GOOD_TIMESTAMP, MOST_SIGNATURES, check_bytes, check_time, one_header

Pairs = Sequence[tuple[str | bytes, str | bytes]]  # the headers of a request, as they came


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The event in a verified webhook.

    Attributes:
        id: Equal on every delivery of the event; the inbox remembers it.
        type: The name by which handlers are chosen; empty if the sender has none.
        time: When the event happened, if the sender says so.
        subject: The thing that the event is about, if the sender says so.
        compared: The part of the body that is equal on every delivery.  Another one under the same id is flagged.
    """

    id: str
    type: str
    compared: Any
    time: datetime | None = None
    subject: str = ""


class Scheme(Protocol):
    """How one kind of sender signs its webhooks, and names its events."""

    name: str  # also the source of its events, unless the receiver is given another

    def verify(self, headers: Pairs, body: bytes) -> None:
        """Raise WebhookError unless *body* is signed with one of the secrets, and fresh.  Raises nothing else."""

    def describe(self, headers: Pairs, data: Any) -> Description:
        """Return the event in *data*, the body of a verified webhook, or raise InvalidPayload if it has no id."""

    def challenge(self, data: Any) -> bytes | None:
        """Return the plain text that a sender asks for to see that we are there, or None for an ordinary event."""
        return None


def read_secrets(secrets: Iterable[str | bytes]) -> tuple[bytes, ...]:
    """Return the secrets as bytes.  These senders use the text as it is, also if it looks like base64."""
    found = tuple(each.encode() if isinstance(each, str) else bytes(each) for each in secrets)
    if not found or not all(found):
        raise ConfigurationError("A receiver needs the secret that its sender signs with: secrets=['...']")
    return found


def check_signature(
    secrets: Sequence[bytes], content: Sequence[bytes], offered: Sequence[bytes], algorithm: str = "sha256"
) -> None:
    """Raise WebhookError unless an *offered* digest is that of *content* with one of the secrets.

    All are compared, in constant time, so the time tells nothing.
    """
    if len(offered) > MOST_SIGNATURES:
        raise WebhookError(f"The webhook has more than {MOST_SIGNATURES} signatures")
    matches = []
    for secret in secrets:
        digest = hmac.new(secret, digestmod=algorithm)
        for part in content:
            check_bytes(part)
            digest.update(part)
        matches += [hmac.compare_digest(digest.digest(), each) for each in offered]
    if not any(matches):
        raise WebhookError("No signature matches this body: it was changed on the way, or signed with another secret")


def hex_digest(text: str) -> bytes:
    """Return the bytes of a digest in hexadecimal digits; nothing, which matches no digest, for any other text."""
    try:
        return bytes.fromhex(text) if text.isalnum() else b""
    except ValueError:
        return b""


def base64_digest(text: str) -> bytes:
    """Return the bytes of a digest in base64; nothing, which matches no digest, for any other text."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def check_timestamp(text: str, tolerance: float, clock: TimeSource) -> None:
    """Raise WebhookError unless *text* is a time in seconds that is not further from now than *tolerance*."""
    if not GOOD_TIMESTAMP.fullmatch(text):
        raise WebhookError("The webhook's timestamp is not a time in seconds")
    check_time(int(text), tolerance, clock)


def optional_header(headers: Pairs, name: str) -> str:
    """Return the value of the header *name*, or an empty text if it did not come, came twice or is no plain text."""
    try:
        return one_header(headers, name.lower())
    except WebhookError:
        return ""


def required_id(value: object, place: str) -> str:
    """Return the event's id, or raise InvalidPayload: without one, a repeated event could not be told from a new one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidPayload(f"The event has no id: {place} is missing, or is no text")
    return value


def member(data: Any, name: str) -> Any:
    """Return a member of a JSON object, or None if it has none, or *data* is no object."""
    return data.get(name) if isinstance(data, dict) else None


def text_member(data: Any, name: str) -> str:
    value = member(data, name)
    return value if isinstance(value, str) else ""


def time_of(value: object) -> datetime | None:
    """Return the time in *value*: seconds since 1970, or a text of RFC 3339; None for anything else."""
    try:
        if isinstance(value, str):
            found = datetime.fromisoformat(value)
            return found if found.tzinfo else found.replace(tzinfo=UTC)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None
