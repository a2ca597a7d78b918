"""Webhooks: signed messages over HTTP, delivered at least once.  The names below are imported when they are first used.

Receiving needs no package beside oncemore itself; SafeConnector and Sender need aiohttp.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .._ledger.connect import naming_extras

if TYPE_CHECKING:
    from .connector import SafeConnector
    from .receiver import Receiver
    from .sender import Sender
    from .signature import Signing
    from .webhooks import Webhooks

# The module of each name, in this package.
EXPORTS = {
    "Receiver": "receiver",
    "SafeConnector": "connector",
    "Sender": "sender",
    "Signing": "signature",
    "Webhooks": "webhooks",
}

__all__ = ["Receiver", "SafeConnector", "Sender", "Signing", "Webhooks"]


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extras(f"oncemore.webhooks.{name}", "webhooks"):
        value = getattr(importlib.import_module(f".{EXPORTS[name]}", __name__), name)
    globals()[name] = value
    return value
