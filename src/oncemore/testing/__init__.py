"""Tools for your tests: conformance suites for stores and brokers, crash points, a clock that can be moved, a store that fails.

The suites need pytest, and the state machine needs hypothesis: `pip install "oncemore[testing]"`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .brokers import BrokerContract
    from .clock import Clock
    from .crashes import POINTS, Crashing, FaultyStore
    from .machine import store_machine
    from .stores import StoreContract

__all__ = ["POINTS", "BrokerContract", "Clock", "Crashing", "FaultyStore", "StoreContract", "store_machine"]

MODULES = {
    "BrokerContract": "brokers",
    "Clock": "clock",
    "Crashing": "crashes",
    "FaultyStore": "crashes",
    "POINTS": "crashes",
    "StoreContract": "stores",
    "store_machine": "machine",
}


def __getattr__(name: str) -> Any:
    """Import each name when it is first used, because a clock does not need pytest or hypothesis."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{MODULES[name]}", __name__), name)
