"""Ed25519 keys of Standard Webhooks, version v1a: the sender signs with `whsk_...`, and receivers verify with `whpk_...`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from ..errors import ConfigurationError

PRIVATE, PUBLIC = "whsk_", "whpk_"
SIGNATURE_LENGTH = 64  # bytes
# A private key is its seed, or the seed and the public key behind it, as libsodium and Svix write it.
SEED, PUBLIC_LENGTH = 32, 32


class Ed25519Key:
    """A private or public key.  Both verify; only a private one signs."""

    version = "v1a"

    def __init__(self, text: str) -> None:
        self._private: Ed25519PrivateKey | None = None
        prefix, data = text[:5], decode_key(text)
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
        assert self._private is not None, "`Signing` signs only with keys that can"
        return base64.b64encode(self._private.sign(content)).decode()

    def matches(self, content: bytes, offered: Sequence[str]) -> bool:
        return any(self._verify(content, text) for text in offered)

    def _verify(self, content: bytes, text: str) -> bool:
        try:
            signature = base64.b64decode(text, validate=True)
            if len(signature) != SIGNATURE_LENGTH:
                return False
            self._public.verify(signature, content)
        except (binascii.Error, ValueError, InvalidSignature):
            return False
        return True


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


def new_private_key() -> str:
    """Return a random private key: the seed and the public key."""
    key = Ed25519PrivateKey.generate()
    return PRIVATE + base64.b64encode(key.private_bytes_raw() + key.public_key().public_bytes_raw()).decode()
