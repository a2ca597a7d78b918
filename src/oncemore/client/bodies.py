"""Bodies, coming and going: which can be sent twice, and which belong to the attempt rather than to the caller's reading."""

from __future__ import annotations

from collections.abc import Iterator
from types import GeneratorType
from typing import Any, Literal

from .hints import Headers

# So much of an answer is read before the attempt counts as good; what is longer streams on, unretried if it breaks.
READ_AHEAD = 1024 * 1024

# A body that is not plain bytes is read into memory up to this size; a longer one is sent once.
MAX_BODY = 1024 * 1024


Manner = Literal["document", "live", "endless"]


def manner_for(status: int, kind: str, length: str) -> Manner:
    """How an answer is to be read, by its Content-Type and Content-Length.

    A *document* is of use only when it has come whole, so reading it is part of the attempt.  A *live* body is the
    caller's to read, until the deadline.  An *endless* one is a conversation: no deadline can be set for its end.
    """
    if status == 101 or kind.startswith("text/event-stream"):
        return "endless"
    if status >= 400:
        return "document"
    if length:
        return "document" if length.isdigit() and int(length) <= READ_AHEAD else "live"
    kind = kind.partition(";")[0].strip().lower()
    return "document" if kind == "application/json" or kind.endswith("+json") else "live"


def manner_by(status: int, headers: Headers) -> Manner:
    """The same, from the fields themselves."""
    return manner_for(status, headers.get("Content-Type") or "", headers.get("Content-Length") or "")


class SentBody:
    """A request body as requests and urllib3 take it: bytes, text, a file or an iterable; rewound where that works."""

    def __init__(self, value: Any) -> None:
        self.value = _plain(value)
        self._begun = isinstance(value, GeneratorType) and value.gi_frame is None  # it was sent, to be redirected
        self._start = position(self.value)
        if self._start is None and not self.at_hand:
            self.value = self._watched(self.value)

    @property
    def at_hand(self) -> bool:
        """Whether it is all in memory; what is read while it is sent can be read by one only."""
        return isinstance(self.value, bytes | str | None)

    def data(self) -> bytes | None:
        """The bytes, if they are at hand or in a small file."""
        if isinstance(self.value, str):
            return self.value.encode()
        if self._start is not None:
            self._read_small(self._start)
        return self.value or b"" if isinstance(self.value, bytes | None) else None

    def resendable(self) -> bool:
        """Whether it can be sent from its beginning."""
        return self.at_hand or self._start is not None or not self._begun

    def rewind(self) -> None:
        """Go back to where the first attempt began to read."""
        if self._start is not None and not isinstance(self.value, bytes):
            self.value.seek(self._start)

    def _read_small(self, start: int) -> None:
        content = self.value.read(MAX_BODY + 1)
        while isinstance(content, bytes) and len(content) <= MAX_BODY and (more := self.value.read(MAX_BODY + 1)):
            content += more  # some give less than they are asked for
        if isinstance(content, bytes) and len(content) <= MAX_BODY:
            self.value = content
        else:
            self.value.seek(start)

    def _watched(self, value: Any) -> Iterator[Any]:
        self._begun = True
        yield from value


def _plain(value: Any) -> Any:
    """Bytes, of all that is like them; the rest as it is."""
    try:
        return value if isinstance(value, bytes) else bytes(memoryview(value))
    except TypeError:
        return value


def position(value: Any) -> int | None:
    """Where a file stands; None for what is no file, or cannot go back."""
    try:
        return int(value.tell()) if value.seekable() else None
    except (AttributeError, OSError):
        return None
