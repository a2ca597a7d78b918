"""One guarded WSGI request: what the app answers is kept back until its outcome is durable, then goes to the server.

A response is held while it may be whole in a moment: its length is known, or it is a list, a file or without a body.  One
without a length that comes piece by piece is a stream, and goes out live once that it happened is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from types import TracebackType
from typing import Any

from ..._contract.contract import Match
from ..._ledger.decisions import Answer
from ..._ledger.model import Operation
from ..._runtime.plan import Plan, run
from ...errors import Fenced, OncemoreError, StoreError
from ..door import Door, wait_of
from ..etag import wsgi_etag
from ..problem import Response
from ..request import Headers, Request, value_of
from ..turn import NotKept, Turn
from .environ import FLASK_ERROR

Environ = dict[str, Any]
ExcInfo = tuple[type[BaseException], BaseException, TracebackType] | tuple[None, None, None]
Write = Callable[[bytes], object]
StartResponse = Callable[..., Write]  # (status, headers, exc_info=None, /)
App = Callable[[Environ, StartResponse], Iterable[bytes]]

BODILESS = (204, 205, 304)


class GuardedResponse:
    """The response to one guarded request: held back until its outcome is durable.

    `run` calls the app and returns the body for the server.
    """

    def __init__(
        self,
        door: Door[App],
        app: App,
        match: Match,
        operation: Operation,
        request: Request,
        start_response: StartResponse,
    ) -> None:
        self.door = door
        self.app = app
        self.match = match
        self.rule = match.rule
        self.operation = operation
        self.request = request
        self.environ: Environ = request.native
        self.start_response = start_response
        self.turn = Turn(door, match, operation)
        self.performed = False
        self.refusal: OncemoreError | None = None  # why what the app sends by `write` cannot be its answer
        self.line = ""  # the app's status line; empty until it has called start_response
        self.headers: list[tuple[str, str]] = []
        self.lowered: Headers = ()
        self.chunks: list[bytes] = []
        self.size = 0
        self.result: Iterable[bytes] = ()
        self.iterator: Iterator[bytes] = iter(())
        self.write: Write | None = None  # the server's own, once the app's writes go straight there
        self.closed = False

    def run(self) -> Iterable[bytes]:
        """Claim, let the app perform, settle, answer; or answer from the ledger."""
        known = run(self.turn.begin(wait_of(self.request.headers)))
        if known is not None:
            return respond(self.start_response, self.door.replay(known, self.rule))
        try:
            run(self.turn.check(self.request, wsgi_etag(self.app, self.environ)))
            self.performed = True
            with self.turn.current(self.environ):
                is_whole = self._perform()
            self._check_error_page()
        except BaseException as error:
            try:
                self._fail(error)
            except StoreError as refused:
                self.refusal = refused
            if self.refusal is None:
                raise
        if self.refusal is not None:  # also if the app has caught it and answered: its effect was rolled back
            self._close_result()
            return respond(self.start_response, self.door.refusal(self.refusal, self.match, self.operation))
        return self._answer(is_whole)

    def _check_error_page(self) -> None:
        """If a framework made an error page of the database's refusal, raise the refusal."""
        error = self.environ.get(FLASK_ERROR)
        if error is not None and self.status >= 500 and self.turn.refuses(error):
            raise error

    # What the app sends

    def _perform(self) -> bool:
        """Have the app answer: whether all of it is held, rather than the beginning of a stream."""
        self.result = self.app(self.environ, self._start)
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
            raise AssertionError("start_response was called before, and without exc_info")
        if exc_info is not None and self.write is not None:  # some of it is with the client: the server raises
            return self.start_response(line, headers, exc_info)
        self.line, self.headers, self.lowered = line, headers, lowered(headers)
        self.chunks, self.size = [], 0  # what was held is of the response that this one replaces
        return self._write

    def _write(self, data: bytes) -> None:
        """The old way to send: held like a chunk; a second one says that there is more to come."""
        if self.refusal is not None:
            return
        if data and self.write is None and self.chunks and not self._can_wait(more=True):
            try:
                self._begin(run(self.turn.live(self.status, stream=not self.length)))
            except OncemoreError as error:
                self.refusal = error
                raise
            held, self.chunks = self.chunks, []
            self._write(b"".join(held))
        if self.write is not None:
            self.write(data)
        elif data:
            self.chunks.append(data)
            self.size += len(data)

    @property
    def status(self) -> int:
        return int(self.line[:3])

    @property
    def length(self) -> str:
        """What the app says that its body's length is."""
        return value_of(self.lowered, "content-length")

    def _is_finite(self) -> bool:
        """Whether what the app returned is there in full: a list, a file, without a body, or said to be no stream."""
        wrapper = self.environ.get("wsgi.file_wrapper")
        is_file = isinstance(wrapper, type) and isinstance(self.result, wrapper)
        is_whole = hasattr(self.result, "__len__") or getattr(self.result, "streaming", True) is False
        return is_whole or is_file or self.status in BODILESS

    def _can_wait(self, *, more: bool = False) -> bool:
        """Whether the response may be held until it is whole; that there is *more* to come says that it is a stream."""
        most = self.rule.max_response
        if self.length.isdecimal():
            return int(self.length) <= most and self.size <= most
        return self.size <= most and (self.rule.streams == "store" or (self._is_finite() and not more))

    # What the server gets

    def _answer(self, is_whole: bool) -> Iterable[bytes]:
        """Settle, and only then answer; a late owner answers with what the one who took over has settled."""
        if self.write is not None:
            return Body(self._rest(), self.close)
        body = b"".join(self.chunks)
        try:
            answer = run(self._settled(body if is_whole else None))
        except OncemoreError as error:
            self.close()
            return respond(self.start_response, self.door.refusal(error, self.match, self.operation))
        except BaseException:
            self.close()
            raise
        if answer.how == "replayed":
            self.close()
            return respond(self.start_response, self.door.replay(answer, self.rule))
        return self._send(answer, body if is_whole else None)

    def _settled(self, body: bytes | None) -> Plan[Answer]:
        if body is None:
            return self.turn.live(self.status, stream=not self.length and not self._is_finite())
        return self.turn.whole(self.status, self.lowered, body)

    def _send(self, answer: Answer, body: bytes | None) -> Iterable[bytes]:
        try:
            self._begin(answer, body)
        except BaseException as error:  # the server refuses the app's status or headers
            self._fail(error)
            raise
        return Body(self._rest() if body is None else iter((body,) if body else ()), self.close)

    def _begin(self, answer: Answer, body: bytes | None = None) -> None:
        """Give the server the app's own start of the response, with ours added."""
        if answer.how == "replayed":
            raise Fenced("Another has performed this operation meanwhile, and its outcome is the one that counts")
        added = self.door.headers(self.rule, answer)
        if body is not None and self.status >= 200 and self.status not in BODILESS:
            added += [] if self.length else [("Content-Length", str(len(body)))]
        self.write = self.start_response(self.line, [*self.headers, *added])

    def _rest(self) -> Iterator[bytes]:
        """What is held of a stream, and then each chunk as it comes."""
        yield from self.chunks
        while True:
            try:
                with self.turn.current():
                    chunk = next(self.iterator, None)
            except BaseException as error:
                run(self.turn.fail(error))
                raise
            if chunk is None:
                break
            yield chunk
        run(self.turn.fail(NotKept()))

    def _fail(self, error: BaseException) -> None:
        """The app failed: its iterable is closed, and the ledger told."""
        try:
            run(self.turn.fail(error))
        finally:
            self._close_result()

    def close(self) -> None:
        """The server has sent the response, or given up on it."""
        try:
            self._close_result()
        finally:
            run(self.turn.fail(NotKept()))

    def _close_result(self) -> None:
        if not self.closed:
            self.closed = True
            close(self.result)


class Body:
    """What the server iterates over, and closes."""

    __slots__ = ("_chunks", "close")

    def __init__(self, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
        self._chunks = chunks
        self.close = close

    def __iter__(self) -> Iterator[bytes]:
        return self._chunks


def respond(start_response: StartResponse, response: Response, *, head: bool = False) -> list[bytes]:
    """Answer with a whole response, or with its *head* alone."""
    headers = list(response.headers)
    if response.status not in (204, 304):
        headers.append(("content-length", str(len(response.body))))
    start_response(status_line(response.status), headers)
    return [] if head or not response.body else [response.body]


def status_line(status: int) -> str:
    try:
        return f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        return f"{status} Unknown"


def lowered(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    # A text that is more than one, as a template engine marks them, could not be stored; no other kind is the door's affair.
    return [(name.lower(), str.__str__(value) if isinstance(value, str) else value) for name, value in headers]


def close(result: object) -> None:
    end = getattr(result, "close", None)
    if end is not None:
        end()
