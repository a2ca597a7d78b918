"""For all shapes of an app's response, the WSGI middleware sends it unchanged, keeps it by one rule, and closes it once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Outcome
from oncemore._ledger.store import Filter
from oncemore._runtime.heartbeat import ThreadTimer
from oncemore.web.wsgi import IdempotencyMiddleware

WSGI = Callable[..., Iterable[bytes]]


class Broken(Exception):
    """The app's own error."""


@dataclass
class Shape:
    """One way to answer."""

    written: list[bytes]
    yielded: list[bytes]
    sized: bool
    lazy: bool  # a generator, rather than a list
    breaks_at: int | None  # before which of the yielded chunks; past the last one, after it
    runs: int = 0
    closed: int = 0

    @property
    def body(self) -> bytes:
        return b"".join(self.written + self.yielded)

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        self.runs += 1
        headers = [("Content-Type", "text/plain"), ("X-Own", "1"), ("X-Own", "2"), ("Set-Cookie", "a=b")]
        write = start_response("201 Created", headers + [("Content-Length", str(len(self.body)))] * self.sized)
        for data in self.written:
            write(data)
        return Closing(self, self._chunks()) if self.lazy or self.breaks_at is not None else list(self.yielded)

    def _chunks(self) -> Iterator[bytes]:
        for number, chunk in enumerate([*self.yielded, None]):
            if number == self.breaks_at:
                raise Broken
            if chunk is not None:
                yield chunk


@dataclass
class Closing:
    shape: Shape
    chunks: Iterator[bytes]

    def __iter__(self) -> Iterator[bytes]:
        return self.chunks

    def close(self) -> None:
        self.shape.closed += 1


@dataclass
class Served:
    """The response that a server would have sent."""

    status: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""
    broke: bool = False

    def header(self, name: str) -> str | None:
        return next((value for found, value in self.headers if found.lower() == name), None)


def serve(app: WSGI, on_start: Callable[[], None] = lambda: None) -> Served:
    """Call the app like a server, always with the same request."""
    environ: dict[str, Any] = {}
    setup_testing_defaults(environ)
    environ.update(
        REQUEST_METHOD="POST",
        PATH_INFO="/orders",
        QUERY_STRING="",
        HTTP_IDEMPOTENCY_KEY="k",
        HTTP_AUTHORIZATION="alice",
    )
    environ.update({"CONTENT_LENGTH": "2", "CONTENT_TYPE": "application/json", "wsgi.input": BytesIO(b"{}")})
    served = Served()

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        on_start()
        served.status, served.headers = status, headers
        return write

    def write(data: bytes) -> None:
        served.body += data

    result: Iterable[bytes] = ()
    try:
        result = app(environ, start_response)
        for chunk in result:
            write(chunk)
    except Broken:
        served.broke = True
    finally:
        if hasattr(result, "close"):
            result.close()
    return served


chunks = st.lists(st.binary(max_size=8), max_size=3)
shapes = st.builds(
    Shape, chunks, chunks, sized=st.booleans(), lazy=st.booleans(), breaks_at=st.none() | st.integers(0, 3)
)


def is_stream(shape: Shape) -> bool:
    """Whether the response has more chunks, and no length."""
    lazy = shape.lazy or shape.breaks_at is not None
    return not shape.sized and (len(list(filter(None, shape.written))) > 1 or (lazy and any(shape.yielded)))


@settings(max_examples=300)
@given(shapes, st.sampled_from(["refuse", "store", "release"]), st.sampled_from([4, 1000]))
def test_every_response_shape_is_settled_before_it_is_sent(shape: Shape, streams: Any, most: int) -> None:
    rule = Rule("POST /orders", streams=streams, max_response=most)
    guard = Guard("memory://")
    states: list[str] = []
    door = IdempotencyMiddleware(shape, guard=guard, contract=Contract(rule))

    def on_start() -> None:
        states.extend(record.state for record in guard.list(Filter()).records)

    first = serve(door, on_start)
    broke_early = first.broke and not first.status
    assert shape.closed == (1 if shape.lazy or shape.breaks_at is not None else 0)
    if not first.broke:
        assert (first.status, first.body) == ("201 Created", shape.body)
    if not broke_early:
        assert [pair for pair in first.headers if pair[0] in ("Content-Type", "X-Own", "Set-Cookie")] == [
            ("Content-Type", "text/plain"),
            ("X-Own", "1"),
            ("X-Own", "2"),
            ("Set-Cookie", "a=b"),
        ]
        live = is_stream(shape) and streams == "release"
        assert states == (["running"] if live else ["settled"])

    second = serve(door)
    kept = first.header("idempotency-status") == "stored"
    event(f"broke early: {broke_early}, kept: {kept}, runs: {shape.runs}")
    if broke_early:
        assert shape.runs == 2
    elif kept:
        assert (second.status, second.body, shape.runs) == ("201 Created", shape.body, 1)
        assert second.header("idempotency-status") == "replayed"
        assert second.header("set-cookie") is None
        assert len(shape.body) <= most
        assert streams == "store" or not is_stream(shape)
    elif shape.runs == 1:
        assert json.loads(second.body)["error_code"] == "CONFLICT.idempotency.outcome_not_kept"
        assert len(shape.body) > most or (streams == "refuse" and is_stream(shape))
    else:
        assert streams == "release"
        assert is_stream(shape)
    guard.close()


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("sized", [True, False])
def test_wsgi_protocol_is_kept_on_both_sides(lazy: bool, sized: bool) -> None:
    """The standard library's checker is put between server and middleware, and between middleware and app."""
    shape = Shape([], [b"one ", b"two"], sized=sized, lazy=lazy, breaks_at=None)
    guard = Guard("memory://")
    door = IdempotencyMiddleware(validator(shape), guard=guard, contract=Contract(Rule("POST /orders")))
    for _ in range(2):
        serve(validator(door))
    assert shape.runs == 1
    guard.close()


def test_interrupt_before_the_settle_leaves_the_outcome_unknown() -> None:
    """Gunicorn may end its worker while the response is prepared for the ledger: the app has performed."""
    shape = Shape([], [b"paid"], sized=True, lazy=False, breaks_at=None)

    def redact(outcome: Outcome) -> Outcome:
        raise SystemExit

    door = IdempotencyMiddleware(shape, guard=Guard("memory://"), redact=redact)
    with pytest.raises(SystemExit):
        serve(door)
    assert json.loads(serve(door).body)["error_code"] == "CONFLICT.idempotency.outcome_unknown"
    assert shape.runs == 1


class Marked(str):
    """A subclass of str, as template engines have them."""

    __slots__ = ()


def test_header_of_marked_string_is_kept_as_text(tmp_path: Path) -> None:
    runs: list[int] = []

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        runs.append(1)
        start_response("201 Created", [("Location", Marked("/refunds/1"))])
        return [b""]

    door = IdempotencyMiddleware(app, guard=Guard(f"sqlite:///{tmp_path}/once.db"))
    found = []
    for _ in range(2):
        environ: dict[str, Any] = {"REQUEST_METHOD": "POST", "HTTP_IDEMPOTENCY_KEY": "key-1"}
        setup_testing_defaults(environ)
        b"".join(door(environ, lambda line, headers, *_: found.append(dict(headers))))
    told = [(each.get("Location") or each["location"], each["idempotency-status"]) for each in found]
    assert told == [("/refunds/1", "stored"), ("/refunds/1", "replayed")]
    assert len(runs) == 1


@pytest.mark.parametrize("catches", [True, False])
def test_late_owner_that_writes_gets_its_successors_response(catches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lease has lapsed before its second `write`, so no part of its own response may reach the client."""
    monkeypatch.setattr(ThreadTimer, "add", lambda *_: None)
    others: list[Served] = []
    runs: list[int] = []

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        runs.append(1)
        number = len(runs)
        write = start_response("201 Created", [])
        if number == 2:
            return [b"the successor's"]
        write(b"too ")
        time.sleep(0.1)
        with ThreadPoolExecutor(1) as pool:
            others.append(pool.submit(serve, door).result())
        with suppress(Exception) if catches else nullcontext():
            write(b"late")
        return [b"!"]

    guard = Guard("memory://")
    rule = Rule("POST /orders", lease="50ms", on_unknown="retry")
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(rule))
    late = serve(door)
    assert (others[0].body, others[0].header("idempotency-status")) == (b"the successor's", "stored")
    assert (late.body, late.header("idempotency-status"), len(runs)) == (b"the successor's", "replayed", 2)
    guard.close()
