"""JSON pointers (RFC 6901): the place of a value in a decoded document."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigurationError

BAD_ESCAPE = re.compile(r"~(?![01])")
INDEX = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def parse_pointer(text: str) -> tuple[str, ...]:
    """Return the steps of a pointer such as `/items/0/id`.  Refuse the empty pointer, which means the whole document."""
    if not text.startswith("/"):
        raise ConfigurationError(f"{text!r} is not a JSON pointer: begin it with '/', as in '/clientMessageId'")
    if BAD_ESCAPE.search(text):
        raise ConfigurationError(f"{text!r} is not a JSON pointer: write '~' as '~0' and a '/' inside a name as '~1'")
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in text[1:].split("/"))


def value_at(document: object, steps: Sequence[str], missing: object = None) -> Any:
    """Return the value at *steps* in *document*, or *missing* if there is none."""
    for step in steps:
        if isinstance(document, Mapping) and step in document:
            document = document[step]
        elif isinstance(document, list) and INDEX.fullmatch(step) and int(step) < len(document):
            document = document[int(step)]
        else:
            return missing
    return document
