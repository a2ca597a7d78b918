"""Standard Webhooks, versions v1 (HMAC) and v1a (Ed25519): sign webhooks, and verify received ones.

    signing = Signing("whsec_...")
    headers = signing.sign(body)                # webhook-id, webhook-timestamp, webhook-signature
    message = signing.verify(headers, body)     # deduplicate by message.id; raises WebhookError

The signature is of the raw body, byte for byte: verify before anything parses it.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_bytes, token_hex
from typing import TYPE_CHECKING, NamedTuple

from .._contract.policy import duration
from .._ledger.connect import naming_extras
from .._runtime.clock import SYSTEM, TimeSource
from ..errors import ConfigurationError, WebhookError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ID, TIMESTAMP, SIGNATURE = "webhook-id", "webhook-timestamp", "webhook-signature"
SVIX = ("svix-id", "svix-timestamp", "svix-signature")  # Svix's names for the same headers
PREFIX = "whsec_"
PRIVATE, PUBLIC = "whsk_", "whpk_"  # the prefixes of Ed25519 keys
SIGNATURE_LENGTH = 64  # bytes of an Ed25519 signature
# A private key is its seed, or the seed and the public key behind it, as libsodium and Svix write it.
SEED, PUBLIC_LENGTH = 32, 32  # bytes

SHORTEST = 24  # the fewest bytes of a secret that the standard allows
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


class HmacSecret:
    """A secret that sender and receiver share (version v1)."""

    version = "v1"  # written before each signature in the header
    signs = True

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign(self, content: bytes) -> str:
        return base64.b64encode(hmac.digest(self._secret, content, "sha256")).decode()

    def matches(self, content: bytes, offered: Sequence[str]) -> bool:
        """Return whether one of the *offered* signatures is right.  All are compared, so the time reveals nothing."""
        expected = self.sign(content).encode()
        matches = [hmac.compare_digest(one.encode(), expected) for one in offered]
        return any(matches)


class Ed25519Key:
    """A private or public Ed25519 key (version v1a).  Both verify; only a private one signs."""

    version = "v1a"

    def __init__(self, text: str) -> None:
        self._private: Ed25519PrivateKey | None = None
        prefix, data = text[:5], decode_key(text)
        with naming_extras("A webhook key of version v1a"):
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
        if prefix == PUBLIC:
            self._public = Ed25519PublicKey.from_public_bytes(data)
        else:
            self._private = Ed25519PrivateKey.from_private_bytes(data[:SEED])
            self._public = self._private.public_key()
            if data[SEED:] not in (b"", self._public.public_bytes_raw()):
                raise ConfigurationError(
                    f"A {PRIVATE} key is damaged: its second half is not the public key of the first"
                )

    @property
    def signs(self) -> bool:
        return self._private is not None

    @property
    def public(self) -> str:
        """The public key as text, for the receivers."""
        return PUBLIC + base64.b64encode(self._public.public_bytes_raw()).decode()

    def sign(self, content: bytes) -> str:
        assert self._private is not None, "Signing.sign() uses private keys only"
        return base64.b64encode(self._private.sign(content)).decode()

    def matches(self, content: bytes, offered: Sequence[str]) -> bool:
        return any(self._verify(content, text) for text in offered)

    def _verify(self, content: bytes, text: str) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            signature = base64.b64decode(text, validate=True)
            if len(signature) != SIGNATURE_LENGTH:
                return False
            self._public.verify(signature, content)
        except (binascii.Error, ValueError, InvalidSignature):
            return False
        return True


class Signing:
    """Signs and verifies webhooks with one or more secrets.

    Args:
        secrets: Each is `whsec_` and base64, as in the standard, or raw bytes; or an Ed25519 key, `whsk_` (private) or
            `whpk_` (public, which only verifies).  `sign` adds a signature with each of them, and `verify` accepts any
            of them, so that secrets can rotate.
        tolerance: `verify` refuses a timestamp further from now than this, in the past or the future, so that a recorded
            message cannot be sent again later.
        clock: The clock for the timestamps of `sign`, and for the tolerance of `verify`.
    """

    def __init__(self, *secrets: str | bytes, tolerance: float | str = "5m", clock: TimeSource = SYSTEM) -> None:
        if not secrets:
            raise ConfigurationError("Signing needs a secret: Signing('whsec_...'); new_secret() makes one")
        self._keys = tuple(map(read_key, secrets))
        self._tolerance = duration(tolerance)
        self._clock = clock

    def __repr__(self) -> str:
        return f"Signing(<{len(self._keys)} secrets>, tolerance={self._tolerance:g})"

    def sign(self, body: bytes, *, id: str | None = None, timestamp: int | None = None) -> dict[str, str]:
        """Return the headers to send with *body*.  Give the same *id* on each attempt to deliver; the timestamp changes."""
        id = new_id() if id is None else id
        timestamp = int(self._clock.time()) if timestamp is None else timestamp
        check_id(id)
        if not GOOD_TIMESTAMP.fullmatch(str(timestamp)):
            raise ConfigurationError(f"{timestamp!r} is not a time in whole seconds since 1970")
        signing = [key for key in self._keys if key.signs]
        if not signing:
            raise ConfigurationError(
                "A whpk_ key is public, and can only verify; to sign, give the whsk_ key that belongs to it"
            )
        content = signed_content(id, str(timestamp), body)
        signatures = (f"{key.version},{key.sign(content)}" for key in signing)
        return {ID: id, TIMESTAMP: str(timestamp), SIGNATURE: " ".join(signatures)}

    def verify(self, headers: Headers, body: bytes) -> Message:
        """Return the message, or raise WebhookError if its signature does not match or its timestamp is out of tolerance.

        The headers may also have Svix's names: `svix-id`, `svix-timestamp`, `svix-signature`.
        """
        pairs = list(headers.items() if isinstance(headers, Mapping) else headers)
        names = header_names(pairs)
        id, timestamp, given = (one_header(pairs, name) for name in names)
        if not GOOD_ID.fullmatch(id):
            raise WebhookError(f"The {names[0]} header is malformed")
        if not GOOD_TIMESTAMP.fullmatch(timestamp):
            raise WebhookError(f"The {names[1]} header is not a time in seconds")
        if not self._any_matches(given, signed_content(id, timestamp, body)):
            raise WebhookError(
                "No signature matches this body: it was changed on the way, or signed with another secret"
            )
        # Checked after the signature, so that only a genuine sender learns how far the clocks are apart.
        check_time(int(timestamp), self._tolerance, self._clock)
        return Message(id, int(timestamp))

    def _any_matches(self, given: str, content: bytes) -> bool:
        """Return whether one of the *given* signatures was made with one of our keys."""
        offered = [word.partition(",") for word in given.split(" ")]
        versions = {key.version for key in self._keys}
        if sum(version in versions for version, _, _ in offered) > MOST_SIGNATURES:
            raise WebhookError(f"The {SIGNATURE} header has more than {MOST_SIGNATURES} signatures")
        matches = [
            key.matches(content, [text for version, comma, text in offered if comma and version == key.version])
            for key in self._keys
        ]
        return any(matches)


def signed_content(id: str, timestamp: str, body: bytes) -> bytes:
    """Return the bytes to sign."""
    check_bytes(body)
    return f"{id}.{timestamp}.".encode() + body


def check_id(id: object) -> None:
    """Raise ConfigurationError unless *id* can be the `webhook-id` of a message."""
    if not isinstance(id, str) or not GOOD_ID.fullmatch(id):
        raise ConfigurationError(
            f"id = {id!r} cannot be signed: use up to 256 visible ASCII characters without a full stop"
        )


def check_bytes(body: object) -> None:
    """Raise ConfigurationError unless *body* is bytes: it is not known how the sender encoded a text."""
    if not isinstance(body, bytes | bytearray | memoryview):
        raise ConfigurationError(f"The body is {type(body).__name__}: pass the raw bytes, before anything parses them")


def check_time(timestamp: int, tolerance: float, clock: TimeSource) -> None:
    """Raise WebhookError if *timestamp* is further from now than *tolerance*, in the past or the future."""
    age = clock.time() - timestamp
    if abs(age) > tolerance:
        side = "old" if age > 0 else "far in the future"
        raise WebhookError(
            f"The webhook is too {side}: {abs(age):.0f} s from now, and at most {tolerance:g} s are accepted"
        )


def header_names(pairs: Sequence[tuple[str | bytes, str | bytes]]) -> tuple[str, str, str]:
    """Return the names of the three headers: Svix's if only those came, otherwise the standard's.  They are never mixed."""
    found = {header_text(name).lower() for name, _ in pairs}
    return SVIX if SVIX[2] in found and SIGNATURE not in found else (ID, TIMESTAMP, SIGNATURE)


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


def read_key(secret: str | bytes) -> HmacSecret | Ed25519Key:
    """Return the key for a secret, or raise ConfigurationError, which never shows the secret."""
    if isinstance(secret, str) and secret.startswith((PRIVATE, PUBLIC)):
        return Ed25519Key(secret)
    return HmacSecret(read_secret(secret))


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


def decode_key(text: str) -> bytes:
    """Return the bytes of a key, or raise ConfigurationError, which never shows the key."""
    prefix, rest = text[:5], text[5:]
    try:
        data = base64.b64decode(rest + "=" * (-len(rest) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigurationError(f"A webhook key is not base64: write it as {prefix}...") from None
    lengths = (PUBLIC_LENGTH,) if prefix == PUBLIC else (SEED, SEED + PUBLIC_LENGTH)
    if len(data) not in lengths:
        raise ConfigurationError(
            f"A {prefix} key has {len(data)} bytes, but needs {' or '.join(map(str, lengths))}; new_key_pair() makes one"
        )
    return data


def new_secret() -> str:
    """Return a random secret, to be shared with one receiver."""
    return PREFIX + base64.b64encode(token_bytes(32)).decode()


def new_key_pair() -> tuple[str, str]:
    """Return a random Ed25519 key pair: `whsk_...` for the sender, and `whpk_...` for the receivers."""
    with naming_extras("A webhook key of version v1a"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    key = Ed25519PrivateKey.generate()
    private = PRIVATE + base64.b64encode(key.private_bytes_raw() + key.public_key().public_bytes_raw()).decode()
    return private, public_key(private)


def public_key(private: str) -> str:
    """Return the public key (`whpk_...`) that belongs to a private one (`whsk_...`)."""
    return Ed25519Key(private).public


def new_id() -> str:
    """Return a random id for a message."""
    return f"msg_{token_hex(16)}"
