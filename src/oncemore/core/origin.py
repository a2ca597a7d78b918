"""The module that code is from, by a name that is the same in every process: who imports a program knows no `__main__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# What a module is called while it is the program, and in the processes that multiprocessing has spawned from it.
PROGRAM = ("__main__", "__mp_main__")


def module_of(thing: Any) -> str:
    """The name of the module that a function or class is from, as others import it."""
    name: str = thing.__module__
    if name not in PROGRAM:
        return name
    said = getattr(thing, "__globals__", {})
    if said.get("__name__") != name:  # a class has none, and what a decorator has wrapped has the decorator's
        said = getattr(sys.modules.get(name), "__dict__", {})
    return imported_as(name, said)


def imported_as(name: str, said: Mapping[str, Any]) -> str:
    """What the program is called where it is imported, by what it *said* of itself: its own *name* if it is no file."""
    spec, file = said.get("__spec__"), said.get("__file__")
    if spec is not None and spec.name not in PROGRAM:  # profilers run a script under a spec that says no more than that
        return str(spec.name)
    return os.path.splitext(os.path.basename(file))[0] if file else name


def loaded(name: str) -> Iterator[Any]:
    """The modules of that name that are loaded, and then the program, if it is imported by that name.

    One that is imported as well is there twice, as with `uvicorn.run("main:app")`; and a program that is called like a
    module is not always that module: `bin/shop` only begins the package `shop`.
    """
    if name in sys.modules:
        yield sys.modules[name]
    program = sys.modules.get("__main__")
    if imported_as("__main__", getattr(program, "__dict__", {})) == name:
        yield program
