"""Keys for operations: made once per intention, by time and chance or from the business entity itself."""

from __future__ import annotations

import hashlib
import os
import time
import uuid

from ..core.key import join
from ..errors import ConfigurationError


def new_key() -> str:
    """A fresh key: a UUID of version 7, so that keys sort by the time they were made."""
    milliseconds = time.time_ns() // 1_000_000
    number = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10))
    return _uuid(number, version=7)


def random_key() -> str:
    """A fresh key for servers that insist on UUIDs of version 4."""
    return str(uuid.uuid4())


def derived_key(*parts: str | int) -> str:
    """The key of a business operation: the same parts always give the same key, in any process, without any memory.

    Name the operation too (`derived_key("refund", order_id)`), and use it only where the operation may happen once.
    """
    if not parts or any(isinstance(part, bool) or not isinstance(part, str | int) or part == "" for part in parts):
        raise ConfigurationError(f"derived_key{parts!r}: give texts or whole numbers, none of them empty")
    digest = hashlib.sha256(join(*map(str, parts)).encode()).digest()
    return _uuid(int.from_bytes(digest[:16], "big"), version=8)


def _uuid(number: int, version: int) -> str:
    number = number & ~(0xF << 76) | version << 76
    number = number & ~(0x3 << 62) | 0x2 << 62
    text = f"{number:032x}"  # uuid.UUID would take twice as long for the same
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
