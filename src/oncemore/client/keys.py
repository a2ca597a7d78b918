"""Keys for operations: new keys of time and random bits, and keys derived from business data."""

from __future__ import annotations

import hashlib
import os
import time
import uuid

from .._contract.keys import join
from ..errors import ConfigurationError

# The upper two bits of this digit say which kind of UUID it is; the lower two are kept.
VARIANT = {f"{digit:x}": f"{8 | digit & 3:x}" for digit in range(16)}


def new_key() -> str:
    """Return a new key: a UUID of version 7, so that keys sort by the time they were made."""
    # Built from digits, because uuid.UUID takes several times as long.
    at, chance = f"{time.time_ns() // 1_000_000:012x}", os.urandom(10).hex()
    return f"{at[:8]}-{at[8:]}-7{chance[:3]}-{VARIANT[chance[3]]}{chance[4:7]}-{chance[7:19]}"


def random_key() -> str:
    """Return a new key for servers that accept only UUIDs of version 4."""
    return str(uuid.uuid4())


def derived_key(*parts: str | int) -> str:
    """Return the key of a business operation: the same parts always give the same key, in any process.

    Name the operation too (`derived_key("refund", order_id)`), and use it only if the operation may happen once.
    """
    if not parts or any(isinstance(part, bool) or not isinstance(part, str | int) or part == "" for part in parts):
        raise ConfigurationError(f"derived_key{parts!r}: give texts or whole numbers, none of them empty")
    digest = hashlib.sha256(join(*map(str, parts)).encode()).digest()
    text = digest[:16].hex()
    return f"{text[:8]}-{text[8:12]}-8{text[13:16]}-{VARIANT[text[16]]}{text[17:20]}-{text[20:]}"
