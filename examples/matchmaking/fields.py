"""Types for the fields of requests."""

from __future__ import annotations

import json
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, Field, JsonValue


def check_text(text: str) -> str:
    """Return the text.  Refuse characters that PostgreSQL or UTF-8 cannot store."""
    if "\0" in text:
        raise ValueError("a text must not have a NUL character")
    text.encode()  # a UnicodeEncodeError is a ValueError, too
    return text


def check_json(value: Any) -> Any:
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def check_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f"{name!r} is not a time zone: send an IANA name such as 'Europe/Berlin'") from None
    return name


AnyText = Annotated[str, AfterValidator(check_text)]
Text = Annotated[AnyText, Field(min_length=1, max_length=10_000)]
Json = Annotated[JsonValue, AfterValidator(check_json)]
TimeZone = Annotated[str, AfterValidator(check_zone)]
