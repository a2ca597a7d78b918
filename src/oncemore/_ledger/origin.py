"""The module that code is from, by a name that is the same in every process: who imports a program knows no `__main__`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

# What a module is called while it is the program, and in the processes that multiprocessing has spawned from it.
PROGRAM = ("__main__", "__mp_main__")

FOR_PROGRAM: ContextVar[bool] = ContextVar("oncemore_for_program", default=False)


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
    return os.path.splitext(os.path.basename(file))[0] if file and not file.startswith("<") else name  # "<stdin>"


def loaded(name: str) -> Iterator[Any]:
    """The modules of that name that are loaded, the program among them if it is imported by that name; the likeliest first.

    A program that is imported as well is there twice, as with `uvicorn.run("main:app")`; and one that is called like a
    module is not always that module: `bin/shop` only begins the package `shop`.
    """
    imported, program_first = sys.modules.get(name), FOR_PROGRAM.get()
    if imported is not None and not program_first:
        yield imported
    # The same one, mostly: multiprocessing gives the program its second name.
    for program, each in {sys.modules[each]: each for each in reversed(PROGRAM) if each in sys.modules}.items():
        if imported_as(each, getattr(program, "__dict__", {})) == name:
            yield program
    if imported is not None and program_first:
        yield imported


@contextmanager
def meant_for(thing: Any) -> Iterator[None]:
    """While this lasts, what a program and its imported twin both have is that of the one which *thing* is from."""
    token = FOR_PROGRAM.set(thing.__module__ in PROGRAM)
    try:
        yield
    finally:
        FOR_PROGRAM.reset(token)
