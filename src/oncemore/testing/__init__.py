"""For tests of your own: the suite that a store must pass, crash points, a clock to set, and a store that fails.

The suite needs pytest, and the state machine hypothesis: `pip install "oncemore[testing]"`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .clock import Clock
    from .crashes import POINTS, Crashing
    from .faulty_store import FaultyStore
    from .machine import store_machine
    from .stores import StoreContract

__all__ = ["POINTS", "Clock", "Crashing", "FaultyStore", "StoreContract", "store_machine"]

HOMES = {
    "Clock": "clock",
    "Crashing": "crashes",
    "FaultyStore": "faulty_store",
    "POINTS": "crashes",
    "StoreContract": "stores",
    "store_machine": "machine",
}


def __getattr__(name: str) -> Any:
    """Import each name when it is first used: a clock needs neither pytest nor hypothesis."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{HOMES[name]}", __name__), name)
