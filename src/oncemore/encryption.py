"""Encryption at rest: what the ledger keeps of a response or result can be read only with a key that is not in it.

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

# The only header of a sealed outcome; its value is the version of what follows: key id, nonce, AES-GCM of headers and body.
MARK = ("oncemore-sealed", "1")
KEY_ID, NONCE = 8, 12
KEY_LENGTHS = (16, 24, 32)

Content = tuple[tuple[tuple[str, str], ...], bytes]
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Content).decode


class Seal:
    """AES-GCM under the first of *keys*; all of them open what they have sealed, so that keys can be rotated.

    Kind and status stay readable, for operators and metrics, but cannot be changed unnoticed.  *plain* lets outcomes
    pass that were stored before there was a seal; without it, whoever can write to the store could pass one off as such.
    """

    def __init__(self, keys: Iterable[bytes], *, plain: bool = False) -> None:
        checked = check_keys(keys)
        self._plain = plain
        self._ciphers = {key_id(key): AESGCM(key) for key in checked}
        self._first = key_id(checked[0])

    def seal(self, id: Id, outcome: Outcome) -> Outcome:
        """The outcome as it may lie in a store."""
        nonce = secrets.token_bytes(NONCE)
        content = encode((outcome.headers, outcome.body))
        text = self._ciphers[self._first].encrypt(nonce, content, bound_to(id, outcome))
        return Outcome(outcome.kind, outcome.status, (MARK,), self._first + nonce + text)

    def open(self, id: Id, outcome: Outcome) -> Outcome:
        """The outcome as it was; a CorruptRecord where it was changed, moved, or sealed with a key that is not here."""
        if outcome.headers != (MARK,):
            return self._unsealed(outcome)
        blob = outcome.body
        found, nonce, text = blob[:KEY_ID], blob[KEY_ID : KEY_ID + NONCE], blob[KEY_ID + NONCE :]
        cipher = self._ciphers.get(found)
        if cipher is None:
            raise CorruptRecord(
                f"The outcome was sealed with a key that is not here (id {found.hex()}); add it to keys"
            )
        try:
            headers, body = decode(cipher.decrypt(nonce, text, bound_to(id, outcome)))
        except (InvalidTag, ValueError, msgspec.MsgspecError) as error:  # ValueError: a nonce cut short
            raise CorruptRecord(
                "The outcome does not open: it was changed, cut short, or is of another record"
            ) from error
        return Outcome(outcome.kind, outcome.status, headers, body)

    def _unsealed(self, outcome: Outcome) -> Outcome:
        if not self._plain:
            raise CorruptRecord(
                "The outcome is not sealed: its record cannot be read, or it was stored before there was a seal; "
                "only then say plain=True"
            )
        return outcome


def check_keys(keys: Iterable[bytes]) -> list[bytes]:
    listed = [] if isinstance(keys, bytes | str) or not isinstance(keys, Iterable) else list(keys)
    if not all(isinstance(key, bytes) for key in listed):
        raise ConfigurationError("keys is not a list of bytes: write [key], or [newest, older] while they rotate")
    if not listed or any(len(key) not in KEY_LENGTHS for key in listed):
        raise ConfigurationError("Give one or more keys of 32 random bytes each, in a list: [secrets.token_bytes(32)]")
    return listed


def key_id(key: bytes) -> bytes:
    """A name for the key that tells nothing of it."""
    return hashlib.sha256(b"oncemore seal key id\n" + key).digest()[:KEY_ID]


def bound_to(id: Id, outcome: Outcome) -> bytes:
    """All that an outcome is sealed together with, each part after its length, so that none can pass for another."""
    parts = (*MARK, *id, outcome.kind, str(outcome.status))
    encoded = (part.encode("utf-8", "surrogatepass") for part in parts)
    return b"".join(b"%d:%b" % (len(part), part) for part in encoded)
