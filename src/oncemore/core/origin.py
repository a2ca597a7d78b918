"""The module that code is from, by a name that is the same in every process: who imports a program knows no `__main__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

# What a module is called while it is the program, and in the processes that multiprocessing has spawned from it.
PROGRAM = ("__main__", "__mp_main__")


def module_of(thing: Any) -> str:
    """The name of the module that a function or class is from, as others import it."""
    name: str = thing.__module__
    if name not in PROGRAM:
        return name
    return imported_as(name, getattr(thing, "__globals__", None) or vars(sys.modules[name]))


def imported_as(name: str, said: Mapping[str, Any]) -> str:
    """What the program is called where it is imported, by what it *said* of itself: its own *name* if it is no file."""
    spec, file = said.get("__spec__"), said.get("__file__")
    if spec is not None:
        return str(spec.name)
    return os.path.splitext(os.path.basename(file))[0] if file else name


def loaded(name: str) -> Any:
    """The module of that name, if it is loaded, be it as the program."""
    program = sys.modules["__main__"]
    return program if imported_as("__main__", vars(program)) == name else sys.modules.get(name)
