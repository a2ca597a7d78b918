"""A statement with its values written into it, for what takes text alone: a script that ends with its own COMMIT.

Texts and bytes go as hexadecimal digits, so nothing between two quotes ever needs an escape: no setting of the server's
(`standard_conforming_strings`), no encoding and no value can change where a literal ends.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .statements import Statement

# A parameter; or what only looks as if it had one: a comment, a text, a quoted name.
PARAMETER = re.compile(r"""--[^\n]*|'(?:[^']|'')*'|"(?:[^"]|"")*"|\$([0-9]+)""")


class Written(str):
    """A value of the user's, as SQL that its driver has written."""


def inline(statement: Statement, values: Sequence[Any]) -> str:
    """The statement's text, each parameter replaced by its value, wherever and however often it occurs."""
    literals = [literal(value) for value in values]
    return "".join(part if isinstance(part, str) else literals[part] for part in parts(statement.text))


@lru_cache(maxsize=256)
def parts(text: str) -> tuple[str | int, ...]:
    """The text, cut at its parameters: pieces of it, and between them the places of values."""
    found: list[str | int] = []
    start = 0
    for match in PARAMETER.finditer(text):
        if match[1] is not None:
            found += (text[start : match.start()], int(match[1]) - 1)
            start = match.end()
    return (*found, text[start:])


def literal(value: Any) -> str:
    """The value as SQL."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"({value:d})"
    if isinstance(value, float):
        return f"'{value!r}'::float8"
    if isinstance(value, bytes):
        return f"decode('{value.hex()}', 'hex')"
    if isinstance(value, Written):
        return value
    if isinstance(value, str):
        return f"convert_from(decode('{value.encode().hex()}', 'hex'), 'UTF8')"
    raise TypeError(f"{type(value).__name__} has no literal here")
