"""Standard Webhooks, version v1: sign webhooks that you send, and verify those that you receive.

    signing = Signing("whsec_...")
    headers = signing.sign(body)                # webhook-id, webhook-timestamp, webhook-signature
    message = signing.verify(headers, body)     # deduplicate by message.id; raises WebhookError

The signature is of the raw body, byte for byte: verify before anything parses it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_bytes, token_hex
from typing import NamedTuple

from .._contract.policy import duration
from .._runtime.clock import SYSTEM, Clock
from ..errors import ConfigurationError, WebhookError

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
PREFIX = "whsec_"
VERSION = "v1"

SHORTEST = 24  # bytes of a secret, as the standard requires
# No full stop: it joins id, timestamp and body, so with one in the id, two messages could have the same signed text.
GOOD_ID = re.compile(r"[\x21-\x2D\x2F-\x7E]{1,256}")
GOOD_TIMESTAMP = re.compile(r"[1-9][0-9]{0,11}")
# More than a rotation of secrets needs, and few enough that a hostile header costs little time.
MOST_SIGNATURES = 32
LONGEST_HEADER = 8192

Headers = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]


class Message(NamedTuple):
    """The id of a verified webhook, equal on every delivery, and the time at which this delivery was signed."""

    id: str
    timestamp: int


class Signing:
    """Signs and verifies webhooks with one or more secrets.

    Args:
        secrets: Each is `whsec_` and base64, as in the standard, or raw bytes.  `sign` adds a signature with each of them,
            and `verify` accepts any of them, so that secrets can rotate.
        tolerance: `verify` refuses a timestamp further from now than this, in the past or the future, so that a recorded
            message cannot be sent again later.
        clock: The clock by which messages are signed and judged.
    """

    def __init__(self, *secrets: str | bytes, tolerance: float | str = "5m", clock: Clock = SYSTEM) -> None:
        if not secrets:
            raise ConfigurationError("Signing needs a secret: Signing('whsec_...'); new_secret() makes one")
        self._secrets = tuple(map(read_secret, secrets))
        self._tolerance = duration(tolerance)
        self._clock = clock

    def __repr__(self) -> str:
        return f"Signing(<{len(self._secrets)} secrets>, tolerance={self._tolerance:g})"

    def sign(self, body: bytes, *, id: str | None = None, timestamp: int | None = None) -> dict[str, str]:
        """Return the headers to send with *body*.  Give the same *id* on each attempt to deliver; the timestamp changes."""
        id = new_id() if id is None else id
        timestamp = int(self._clock.time()) if timestamp is None else timestamp
        if not GOOD_ID.fullmatch(id):
            raise ConfigurationError(
                f"{id!r} cannot be a webhook's id: use up to 256 visible ASCII characters without '.'"
            )
        if not GOOD_TIMESTAMP.fullmatch(str(timestamp)):
            raise ConfigurationError(f"{timestamp!r} is not a time in whole seconds since 1970")
        signatures = (f"{VERSION},{each}" for each in self._signatures(id, str(timestamp), body))
        return {ID: id, TIMESTAMP: str(timestamp), SIGNATURE: " ".join(signatures)}

    def verify(self, headers: Headers, body: bytes) -> Message:
        """Return the message, or raise WebhookError if its signature does not match or its timestamp is out of tolerance."""
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        id, timestamp, given = (one_header(pairs, name) for name in (ID, TIMESTAMP, SIGNATURE))
        if not GOOD_ID.fullmatch(id):
            raise WebhookError(f"The {ID} header is malformed")
        if not GOOD_TIMESTAMP.fullmatch(timestamp):
            raise WebhookError(f"The {TIMESTAMP} header is not a time in seconds")
        if not self._any_matches(given, self._signatures(id, timestamp, body)):
            raise WebhookError(
                "No signature matches this body: it was changed on the way, or signed with another secret"
            )
        # Checked after the signature, so that the error tells only a genuine sender how far the clocks are apart.
        age = self._clock.time() - int(timestamp)
        if abs(age) > self._tolerance:
            side = "old" if age > 0 else "far in the future"
            raise WebhookError(
                f"The webhook is too {side}: {abs(age):.0f} s from now, and at most {self._tolerance:g} s are accepted"
            )
        return Message(id, int(timestamp))

    def _signatures(self, id: str, timestamp: str, body: bytes) -> list[str]:
        """Return the signature by each secret."""
        if not isinstance(body, bytes | bytearray | memoryview):  # the encoding of a text is not known
            raise ConfigurationError(
                f"The body is {type(body).__name__}: pass the raw bytes, before anything parses them"
            )
        content = f"{id}.{timestamp}.".encode() + body
        return [
            base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode() for secret in self._secrets
        ]

    def _any_matches(self, given: str, expected: list[str]) -> bool:
        """Return whether a *given* signature is an *expected* one.  All are compared, so the time tells nothing."""
        offered = [word.removeprefix(f"{VERSION},") for word in given.split(" ") if word.startswith(f"{VERSION},")]
        if len(offered) > MOST_SIGNATURES:
            raise WebhookError(f"The {SIGNATURE} header has more than {MOST_SIGNATURES} signatures")
        matches = [hmac.compare_digest(one.encode(), other.encode()) for one in offered for other in expected]
        return any(matches)


def one_header(pairs: Sequence[tuple[str | bytes, str | bytes]], name: str) -> str:
    """Return the value of the header *name*, or raise WebhookError unless there is exactly one."""
    found = [value for key, value in pairs if header_text(key).lower() == name]
    if len(found) != 1:
        raise WebhookError(f"The {name} header is missing" if not found else f"The {name} header came more than once")
    value = header_text(found[0])
    if not value.isascii() or len(value) > LONGEST_HEADER:
        raise WebhookError(f"The {name} header is malformed")
    return value


def header_text(value: object) -> str:
    """Return a header's name or value as text.  A value of another type becomes a character that no header contains."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else "\N{REPLACEMENT CHARACTER}"


def read_secret(secret: str | bytes) -> bytes:
    """Return the bytes of a secret, or raise ConfigurationError, which never shows the secret."""
    if isinstance(secret, str):
        text = secret.removeprefix(PREFIX)
        try:
            secret = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)  # some providers omit the padding
        except (binascii.Error, ValueError):
            raise ConfigurationError(
                f"A webhook secret is not base64: write it as {PREFIX}..., or pass raw bytes"
            ) from None
    if len(secret) < SHORTEST:
        raise ConfigurationError(
            f"A webhook secret has {len(secret)} bytes, but needs at least {SHORTEST}; new_secret() makes one"
        )
    return bytes(secret)


def new_secret() -> str:
    """Return a random secret, to be shared with one receiver."""
    return PREFIX + base64.b64encode(token_bytes(32)).decode()


def new_id() -> str:
    """Return a random id for a message."""
    return f"msg_{token_hex(16)}"
