"""Standard Webhooks, version v1: sign what is sent, and trust what is received only if its signature holds.

    signing = Signing("whsec_...")
    headers = signing.sign(body)                # webhook-id, webhook-timestamp, webhook-signature
    message = signing.verify(headers, body)     # its id is what to deduplicate by; a WebhookError if it does not hold

What is signed is the raw body, byte for byte: verify before anything parses it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets as chance
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from .._contract.policy import duration
from .._runtime.clock import SYSTEM, Clock
from ..errors import ConfigurationError, WebhookError

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
PREFIX = "whsec_"
VERSION = "v1"

SHORTEST = 24  # bytes of a secret, as the standard says
# A full stop in an id would let one signed text be read as another: id, timestamp and body are joined by it.
GOOD_ID = re.compile(r"[\x21-\x2D\x2F-\x7E]{1,256}")
GOOD_TIMESTAMP = re.compile(r"[1-9][0-9]{0,11}")
# Nobody rotates more secrets than that; more is an attempt to keep us busy.
MOST_SIGNATURES = 32
LONGEST_HEADER = 8192

Headers = Mapping[str, str] | Iterable[tuple[str | bytes, str | bytes]]


class Message(NamedTuple):
    """What a verified webhook is called, the same on every delivery, and when this delivery was signed."""

    id: str
    timestamp: int


class Signing:
    """Signs and verifies with one or more *secrets*: all of them sign, and each of them is accepted, so that they can rotate.

    A secret is `whsec_` and base64, as the standard writes it, or raw bytes.  A message whose timestamp is further from
    now than *tolerance*, in the past or in the future, is refused: a recorded one cannot be played again later.
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
        """The headers to send with *body*.  The *id* is the same on every attempt to deliver; the timestamp is not."""
        id = new_id() if id is None else id
        timestamp = int(self._clock.time()) if timestamp is None else timestamp
        if not GOOD_ID.fullmatch(id):
            raise ConfigurationError(f"{id!r} cannot be a webhook's id: write up to 256 visible characters without '.'")
        if not GOOD_TIMESTAMP.fullmatch(str(timestamp)):
            raise ConfigurationError(f"{timestamp!r} is not a time in whole seconds since 1970")
        signatures = (f"{VERSION},{each}" for each in self._signatures(id, str(timestamp), body))
        return {ID: id, TIMESTAMP: str(timestamp), SIGNATURE: " ".join(signatures)}

    def verify(self, headers: Headers, body: bytes) -> Message:
        """The message that *headers* and *body* are; a WebhookError where they are not what the sender signed."""
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        id, timestamp, given = (one_header(pairs, name) for name in (ID, TIMESTAMP, SIGNATURE))
        if not GOOD_ID.fullmatch(id):
            raise WebhookError(f"The {ID} header is malformed")
        if not GOOD_TIMESTAMP.fullmatch(timestamp):
            raise WebhookError(f"The {TIMESTAMP} header is not a time in seconds")
        if not self._holds(given, self._signatures(id, timestamp, body)):
            raise WebhookError("No signature fits this body: it was changed on the way, or signed with another secret")
        # After the signature: how far the clocks are apart is only a genuine sender's business.
        age = self._clock.time() - int(timestamp)
        if abs(age) > self._tolerance:
            side = "old" if age > 0 else "far in the future"
            raise WebhookError(f"The webhook is too {side}: {abs(age):.0f} s, and {self._tolerance:g} s are tolerated")
        return Message(id, int(timestamp))

    def _signatures(self, id: str, timestamp: str, body: bytes) -> list[str]:
        """What each secret makes of it."""
        if not isinstance(body, bytes | bytearray | memoryview):  # text would be signed in somebody's encoding
            raise ConfigurationError(
                f"The body is {type(body).__name__}: give the raw bytes, before anything parses them"
            )
        content = f"{id}.{timestamp}.".encode() + body
        return [
            base64.b64encode(hmac.new(secret, content, hashlib.sha256).digest()).decode() for secret in self._secrets
        ]

    def _holds(self, given: str, expected: list[str]) -> bool:
        """Whether one of the *given* signatures is one of those *expected*; how long it takes does not tell which."""
        offered = [word.removeprefix(f"{VERSION},") for word in given.split(" ") if word.startswith(f"{VERSION},")]
        if len(offered) > MOST_SIGNATURES:
            raise WebhookError(f"The {SIGNATURE} header has more than {MOST_SIGNATURES} signatures")
        fits = [hmac.compare_digest(one.encode(), other.encode()) for one in offered for other in expected]
        return any(fits)


def one_header(pairs: Sequence[tuple[str | bytes, str | bytes]], name: str) -> str:
    """The value of the one header of that name, however it is spelt; a WebhookError where there is none, or two."""
    found = [value for spelt, value in pairs if text(spelt).lower() == name]
    if len(found) != 1:
        raise WebhookError(f"The {name} header is missing" if not found else f"There are several {name} headers")
    value = text(found[0])
    if not value.isascii() or len(value) > LONGEST_HEADER:
        raise WebhookError(f"The {name} header is malformed")
    return value


def text(value: object) -> str:
    """A header's name or value, which servers hand over as text or as bytes; anything else is no header's."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    return value if isinstance(value, str) else "\N{REPLACEMENT CHARACTER}"


def read_secret(secret: str | bytes) -> bytes:
    """The bytes of a secret, which must not be guessable; never shown in an error."""
    if isinstance(secret, str):
        text = secret.removeprefix(PREFIX)
        try:
            secret = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)  # some providers leave the = out
        except (binascii.Error, ValueError):
            raise ConfigurationError(
                f"A webhook secret is not base64: write it as {PREFIX}..., or give raw bytes"
            ) from None
    if len(secret) < SHORTEST:
        raise ConfigurationError(
            f"A webhook secret has {len(secret)} bytes: {SHORTEST} is the least; new_secret() makes one"
        )
    return bytes(secret)


def new_secret() -> str:
    """A secret to share with one receiver."""
    return PREFIX + base64.b64encode(chance.token_bytes(32)).decode()


def new_id() -> str:
    """An id for one message."""
    return f"msg_{chance.token_hex(16)}"
