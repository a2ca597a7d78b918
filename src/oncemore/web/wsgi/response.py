"""Makes one guarded WSGI response: holds it back until its outcome is recorded, then gives it to the server.

A response is held back if it will soon be complete: its length is known, or it is a list, a file or without a body.  Any
other response is a stream, unless the rule stores streams.  It is passed on live, after a tombstone was settled for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

from ..._ledger.context import running
from ..._runtime.plan import run
from ...errors import Fenced
from ..door import Exchange
from ..problem import Response, status_line
from ..request import GUARDED, Headers, value_of
from .environ import FLASK_ERROR

Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]  # (status, headers, exc_info=None, /)
App = Callable[[Environ, StartResponse], Iterable[bytes]]

BODILESS = (204, 205, 304)


class GuardedResponse:
    """Calls the app for one guarded request, and holds the response back until its outcome is durable.

    `run` calls the app and returns the body for the server.
    """

    def __init__(self, exchange: Exchange, environ: Environ, start_response: StartResponse) -> None:
        self.exchange = exchange
        self.rule = exchange.rule
        self.attempt = exchange.attempt
        self.environ = environ
        self.start_response = start_response
        self.instead: Response | None = None  # sent in place of the app's response: a successor's, or a refusal
        self.line = ""  # the app's status line; empty until it has called start_response
        self.headers: list[tuple[str, str]] = []
        self.lowered: Headers = ()
        self.chunks: list[bytes] = []
        self.size = 0
        self.result: Iterable[bytes] = ()
        self.iterator: Iterator[bytes] = iter(())
        self.write: Write | None = None  # the server's own `write`, once the response has started
        self.closed = False

    def run(self) -> Iterable[bytes]:
        """Call the app, record the outcome, and return the body for the server."""
        try:
            self.environ[GUARDED] = self.attempt.op
            with running(self.attempt.op):
                is_complete = self._call_app()
        except BaseException as error:
            self.instead = self._fail(error) or self.instead
            if self.instead is None:
                raise
        if self.instead is not None:  # set even if the app has caught the error and answered
            self._close_result()
            return respond(self.start_response, self.instead)
        return self._answer(is_complete)

    # The app's side

    def _call_app(self) -> bool:
        """Call the app.  Return whether its response is complete, rather than the beginning of a stream."""
        self.result = self.exchange.door.app(self.environ, self._start)
        self.iterator = iter(self.result)
        for chunk in self.iterator:
            if not chunk:
                continue
            if not self.line:
                raise AssertionError("The application sent a body before it called start_response")
            self.chunks.append(chunk)
            self.size += len(chunk)
            if self.write is not None or not self._can_wait():
                return False
        if not self.line:
            raise AssertionError("The application ended without calling start_response")
        return self.write is None

    def _start(self, line: str, headers: list[tuple[str, str]], exc_info: ExcInfo | None = None, /) -> Write:
        if exc_info is None and self.line:
            raise AssertionError("The application called start_response a second time without exc_info")
        if exc_info is not None and self.write is not None:  # the client has a part of it already, so the server raises
            return self.start_response(line, headers, exc_info)
        self.line, self.headers, self.lowered = line, headers, lower_names(headers)
        self.chunks, self.size = [], 0  # a second start replaces the response that was held back
        return self._write

    def _write(self, data: bytes) -> None:
        """Send by WSGI's old `write`: the first piece is held back like a chunk; a second one shows a stream."""
        if self.instead is not None:
            return
        if data and self.write is None and self.chunks and not self._can_wait(more=True):
            self._begin_writing()
            held, self.chunks = self.chunks, []
            self._write(b"".join(held))
        if self.write is not None:
            self.write(data)
        elif data:
            self.chunks.append(data)
            self.size += len(data)

    def _begin_writing(self) -> None:
        """Settle a tombstone, and start the response.  Raise Fenced if the client gets another response."""
        found = self._record(None, has_length=bool(self.length))
        if isinstance(found, Response):
            self.instead = found
            raise Fenced("This response is not sent: its lease was lost, or its transaction was refused")
        self._begin(found)

    @property
    def status(self) -> int:
        return int(self.line[:3])

    @property
    def length(self) -> str:
        """The app's Content-Length, or an empty text."""
        return value_of(self.lowered, "content-length")

    def _is_finite(self) -> bool:
        """Whether the app's response is not a stream: it is a list, a file, without a body, or has `streaming = False`."""
        wrapper = self.environ.get("wsgi.file_wrapper")
        is_file = isinstance(wrapper, type) and isinstance(self.result, wrapper)
        is_whole = hasattr(self.result, "__len__") or getattr(self.result, "streaming", True) is False
        return is_whole or is_file or self.status in BODILESS

    def _can_wait(self, *, more: bool = False) -> bool:
        """Whether the response may be held back until it is complete; *more* means that another `write` follows."""
        most = self.rule.max_response
        if self.length.isdecimal():
            return int(self.length) <= most and self.size <= most
        return self.size <= most and (self.rule.streams == "store" or (self._is_finite() and not more))

    # The server's side

    def _answer(self, is_complete: bool) -> Iterable[bytes]:
        """Record the outcome, then send the response.  If this attempt was too slow, send its successor's instead."""
        if self.write is not None:
            return Body(self._rest(), self.close)
        body = b"".join(self.chunks) if is_complete else None
        try:
            found = self._record(body, has_length=bool(self.length) or self._is_finite())
        except BaseException as error:  # for instance an interrupt: the effect has happened, and is not recorded
            self._fail(error)
            raise
        if isinstance(found, Response):
            self.close()
            return respond(self.start_response, found)
        try:
            self._begin(found, body)
        except BaseException as error:  # the server refuses the app's status or headers
            self._fail(error)
            raise
        return Body(self._rest() if body is None else iter((body,) if body else ()), self.close)

    def _record(self, body: bytes | None, *, has_length: bool) -> Response | list[tuple[str, str]]:
        """Record the response; if *body* is None, record it as a stream."""
        if body is None:
            return run(self.exchange.record_stream(self.status, has_length=has_length))
        cause = self.environ.get(FLASK_ERROR) if self.status >= 500 else None
        return run(self.exchange.record(self.status, self.lowered, body, cause))

    def _begin(self, added: list[tuple[str, str]], body: bytes | None = None) -> None:
        """Start the app's response, with the headers *added*."""
        if body is not None and self.status >= 200 and self.status not in BODILESS:
            added += [] if self.length else [("Content-Length", str(len(body)))]
        self.write = self.start_response(self.line, [*self.headers, *added])

    def _rest(self) -> Iterator[bytes]:
        """Yield the chunks of a stream: first the chunks that were held back, then each new one immediately."""
        yield from self.chunks
        while True:
            try:
                with running(self.attempt.op):
                    chunk = next(self.iterator, None)
            except BaseException as error:
                run(self.attempt.fail(error))
                raise
            if chunk is None:
                break
            yield chunk
        run(self.attempt.release())  # does nothing if a tombstone was settled

    def _fail(self, error: BaseException) -> Response | None:
        """Record that the app failed, and close its iterable.  Return a Response to send instead of the error, or None."""
        try:
            return run(self.exchange.fail(error))
        finally:
            self._close_result()

    def close(self) -> None:
        """Close the app's iterable and release the attempt: the server has sent the response, or has stopped."""
        try:
            self._close_result()
        finally:
            run(self.attempt.release())

    def _close_result(self) -> None:
        if not self.closed:
            self.closed = True
            close(self.result)


class Body:
    """A body that the server iterates over and closes."""

    __slots__ = ("_chunks", "close")

    def __init__(self, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
        self._chunks = chunks
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks


def respond(start_response: StartResponse, response: Response, *, head: bool = False) -> list[bytes]:
    """Send a complete response, or its *head* alone."""
    headers = list(response.headers)
    if response.status not in (204, 304):
        headers.append(("content-length", str(len(response.body))))
    start_response(status_line(response.status), headers)
    return [] if head or not response.body else [response.body]


def lower_names(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    # A subclass of str, with which template engines mark safe texts, cannot be stored.
    return [(name.lower(), str.__str__(value) if isinstance(value, str) else value) for name, value in headers]


def close(result: object) -> None:
    end = getattr(result, "close", None)
    if end is not None:
        end()
