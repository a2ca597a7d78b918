"""Request bodies that can be sent again, and the part of a response body that is read within the attempt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import GeneratorType
from typing import Any, Literal

from .verdict import Headers

# A response of up to this size is read within the attempt.  A longer one streams, and is not retried if it breaks off.
READ_AHEAD = 1024 * 1024

# A request body that is not bytes is read into memory up to this size.  Others are sent once, unless they can be rewound.
MAX_BODY = 1024 * 1024

ReadMode = Literal["whole", "streamed", "endless"]

LENGTH = re.compile(r"[0-9]{1,15}")


def content_length(headers: Headers) -> int | None:
    """Return the Content-Length, or None if it is missing or not a number of a sensible size."""
    length = headers.get("Content-Length") or ""
    return int(length) if LENGTH.fullmatch(length) else None


def read_mode(status: int, headers: Headers) -> ReadMode:
    """Return how to read a response, by its status, Content-Type and Content-Length.

    Reading a *whole* body is part of the attempt, because a part is of no use.  A *streamed* body is read by the caller,
    until the deadline.  An *endless* one, such as an event stream, has no deadline.
    """
    content_type = headers.get("Content-Type") or ""
    if status == 101 or content_type.startswith("text/event-stream"):
        return "endless"
    if status >= 400:
        return "whole"
    if headers.get("Content-Length"):
        length = content_length(headers)
        return "whole" if length is not None and length <= READ_AHEAD else "streamed"
    content_type = content_type.partition(";")[0].strip().lower()
    return "whole" if content_type == "application/json" or content_type.endswith("+json") else "streamed"


class SentBody:
    """A request body as requests and urllib3 take it (bytes, text, a file or an iterable), rewound before each attempt."""

    def __init__(self, value: Any) -> None:
        self.value = _to_bytes(value)
        self._begun = isinstance(value, GeneratorType) and value.gi_frame is None  # a redirect sends it again
        self._start = position(self.value)
        if self._start is None and not self._in_memory():
            self.value = self._note_begin(self.value)

    def data(self) -> bytes | None:
        """Return the bytes if they are in memory or in a small file; otherwise None."""
        if isinstance(self.value, str):
            return self.value.encode()
        if self._start is not None:
            self._read_small(self._start)
        return self.value or b"" if isinstance(self.value, bytes | None) else None

    def resendable(self) -> bool:
        """Whether the body can be sent from its beginning."""
        return self._in_memory() or self._start is not None or not self._begun

    def rewind(self) -> None:
        """Go back to the position at which the first attempt began to read."""
        if self._start is not None and not isinstance(self.value, bytes):
            self.value.seek(self._start)

    def _in_memory(self) -> bool:
        return isinstance(self.value, bytes | str | None)

    def _read_small(self, start: int) -> None:
        content = self.value.read(MAX_BODY + 1)
        while isinstance(content, bytes) and len(content) <= MAX_BODY and (more := self.value.read(MAX_BODY + 1)):
            content += more  # some files return less than was requested
        if isinstance(content, bytes) and len(content) <= MAX_BODY:
            self.value = content
        else:
            self.value.seek(start)

    def _note_begin(self, value: Any) -> Iterator[Any]:
        self._begun = True
        yield from value


def _to_bytes(value: Any) -> Any:
    """Return the bytes of a bytes-like object, or any other value unchanged."""
    try:
        return value if isinstance(value, bytes) else bytes(memoryview(value))
    except TypeError:
        return value


def position(value: Any) -> int | None:
    """Return the position of a file, or None if *value* is no file, or cannot go back."""
    try:
        return int(value.tell()) if value.seekable() else None
    except (AttributeError, OSError):
        return None
