"""Encryption at rest: stored responses and results can be read only with a key that is not in the store.

guard = Guard("postgresql://...", seal=Seal([key]))
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ._ledger.model import Outcome
from ._runtime.wakeups import Id
from .errors import ConfigurationError, CorruptRecord

# The only header of an encrypted outcome.  Its value is the version of the body: key id, nonce, AES-GCM text of the
# original headers and body.
MARK = ("oncemore-sealed", "1")
KEY_ID, NONCE = 8, 12  # lengths in bytes
KEY_LENGTHS = (16, 24, 32)

Content = tuple[tuple[tuple[str, str], ...], bytes]
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Content).decode


class Seal:
    """Encrypts outcomes with AES-GCM under the first of *keys*, and decrypts them with any of them, so keys can rotate.

    Kind and status stay readable for operators and metrics, but a change of them is detected.  An outcome is bound to its
    scope and key, so it cannot be moved to another record.  *plain* accepts outcomes that were stored without a seal.
    Use it only while these expire, because it also accepts an outcome that an attacker wrote to the store.
    """

    def __init__(self, keys: Iterable[bytes], *, plain: bool = False) -> None:
        checked = check_keys(keys)
        self._plain = plain
        self._ciphers = {key_id(key): AESGCM(key) for key in checked}
        self._first = key_id(checked[0])

    def seal(self, id: Id, outcome: Outcome) -> Outcome:
        """Return the encrypted form of *outcome*, to be stored under *id*."""
        nonce = secrets.token_bytes(NONCE)
        content = encode((outcome.headers, outcome.body))
        text = self._ciphers[self._first].encrypt(nonce, content, authenticated_data(id, outcome))
        return Outcome(outcome.kind, outcome.status, (MARK,), self._first + nonce + text)

    def open(self, id: Id, outcome: Outcome) -> Outcome:
        """Return the outcome that was sealed under *id*.

        Raises:
            CorruptRecord: It was changed, moved from another record, or sealed with an unknown key.
        """
        if outcome.headers != (MARK,):
            if self._plain:
                return outcome
            raise CorruptRecord(
                "The stored outcome is not encrypted. If it was stored before encryption was turned on, allow that with "
                "Seal(keys, plain=True); if not, another program has written it"
            )
        blob = outcome.body
        found, nonce, text = blob[:KEY_ID], blob[KEY_ID : KEY_ID + NONCE], blob[KEY_ID + NONCE :]
        cipher = self._ciphers.get(found)
        if cipher is None:
            raise CorruptRecord(
                f"The stored outcome is encrypted with a key that Seal was not given (key id {found.hex()}): add it to keys"
            )
        try:
            headers, body = decode(cipher.decrypt(nonce, text, authenticated_data(id, outcome)))
        except (InvalidTag, ValueError, msgspec.MsgspecError) as error:  # ValueError: the nonce is too short
            raise CorruptRecord(
                "The stored outcome cannot be decrypted: it was changed, cut short, or moved from another record"
            ) from error
        return Outcome(outcome.kind, outcome.status, headers, body)


def check_keys(keys: Iterable[bytes]) -> list[bytes]:
    """Return *keys* as a list, or raise ConfigurationError unless they are AES keys."""
    listed = [] if isinstance(keys, bytes | str) or not isinstance(keys, Iterable) else list(keys)
    if not all(isinstance(key, bytes) for key in listed):
        raise ConfigurationError("keys must be a list of bytes: write [key], or [newest, older] while keys rotate")
    if not listed or any(len(key) not in KEY_LENGTHS for key in listed):
        raise ConfigurationError("Seal needs one or more keys of 32 random bytes each: write [secrets.token_bytes(32)]")
    return listed


def key_id(key: bytes) -> bytes:
    """Return a name for *key* that does not reveal it."""
    return hashlib.sha256(b"oncemore seal key id\n" + key).digest()[:KEY_ID]


def authenticated_data(id: Id, outcome: Outcome) -> bytes:
    """Return the readable facts that the encryption protects against change.

    Each part follows its length.  Joined without lengths, the parts of two records could be equal.
    """
    parts = (*MARK, *id, outcome.kind, str(outcome.status))
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    return b"".join(b"%d:%b" % (len(part), part) for part in encoded)
