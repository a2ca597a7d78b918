"""The ASGI middleware message by message: which messages pass untouched, and which are held back until when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oncemore import Guard, Operation, Outcome
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.events import Event
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import arun
from oncemore.errors import ConfigurationError, CorruptRecord, StoreUnavailable
from oncemore.web.asgi import IdempotencyMiddleware

from .wire import Counted, SlowSettling, Wire, state


@pytest.fixture
def guard() -> Guard:
    return Guard("memory://")


# What passes untouched


async def test_lifespan_is_passed_on_message_by_message(guard: Guard) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "lifespan.startup.complete", "said": await receive()})

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await IdempotencyMiddleware(app, guard=guard)({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "lifespan.startup.complete", "said": {"type": "lifespan.startup"}}]


async def test_websocket_is_passed_on_as_it_is(guard: Guard) -> None:
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    scope, receive, send = {"type": "websocket", "headers": [(b"idempotency-key", b"k")]}, object(), object()
    await IdempotencyMiddleware(app, guard=guard)(scope, receive, send)  # type: ignore[arg-type]
    assert [given is passed for given, passed in zip(seen, (scope, receive, send), strict=True)] == [True] * 3


async def test_an_unguarded_request_is_passed_on_as_it_is(guard: Guard) -> None:
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.append(given)

    door = IdempotencyMiddleware(app, guard=guard)
    for wire in (Wire(method="GET"), Wire(key=None), Wire(method="PUT")):
        scope, receive, send = wire.scope, wire.receive, wire.send
        await door(scope, receive, send)
        assert seen.pop() == (scope, receive, send)


# Background tasks


async def test_background_task_runs_once_after_the_settle(guard: Guard) -> None:
    seen: list[str] = []

    async def later() -> None:
        seen.append(await state(guard))

    async def view(request: Request) -> Response:
        return JSONResponse({"done": True}, background=BackgroundTask(later))

    app = Starlette(
        routes=[Route("/things", view, methods=["POST"])], middleware=[Middleware(IdempotencyMiddleware, guard=guard)]
    )
    first, second = await Wire().through(app), await Wire().through(app)
    assert (first.said, second.said, seen) == ("stored", "replayed", ["settled"])


async def test_a_background_task_that_fails_does_not_undo_the_outcome(guard: Guard) -> None:
    """The client has its answer, and its retry gets the same."""

    async def later() -> None:
        raise RuntimeError("too late")

    async def view(request: Request) -> Response:
        return JSONResponse({}, background=BackgroundTask(later))

    door = IdempotencyMiddleware(Starlette(routes=[Route("/things", view, methods=["POST"])]), guard=guard)
    wire = Wire()
    with pytest.raises(RuntimeError, match="too late"):
        await wire.through(door)
    assert (wire.said, (await Wire().through(door)).said) == ("stored", "replayed")


async def test_nothing_is_sent_before_the_outcome_is_durable() -> None:
    """The outcome is settled inside the app's own last `send`."""
    guard = Guard(SlowSettling())
    door = IdempotencyMiddleware(Counted(b"one ", b"two"), guard=guard)
    wire = Wire()
    task = asyncio.create_task(wire.through(door))
    while not task.done():
        assert not wire.sent or await state(guard) == "settled"
        await asyncio.sleep(0.005)
    assert (wire.status, wire.body) == (201, b"one two")


# Apps that break their word


async def broken_before(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("before")


async def broken_after_start(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"half", "more_body": True})
    raise RuntimeError("half way")


async def ends_in_the_middle(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})


async def says_nothing(scope: Any, receive: Any, send: Any) -> None:
    return None


@pytest.mark.parametrize("app", [broken_before, broken_after_start, ends_in_the_middle, says_nothing])
async def test_app_failing_before_whole_response_may_run_again(guard: Guard, app: Any) -> None:
    """The client gets no part of the failed response."""
    wire = Wire()
    with pytest.raises(RuntimeError):
        await wire.through(IdempotencyMiddleware(app, guard=guard))
    assert (wire.sent, await state(guard)) == ([], "released")


async def test_a_stream_that_breaks_off_is_not_run_again(guard: Guard) -> None:
    """The client has received a part of it."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise RuntimeError("half way")

    door = IdempotencyMiddleware(app, guard=guard)
    wire = Wire()
    with pytest.raises(RuntimeError, match="half way"):
        await wire.through(door)
    assert (wire.said, wire.body, await state(guard)) == ("unstored", b"half", "settled")
    assert (await Wire().through(door)).status == 409


async def test_repeated_stream_gets_plain_200_with_on_duplicate_ok(guard: Guard) -> None:
    """A tombstone has no response to replay."""
    app = Counted(b"one", b"two", length=False)
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("POST /things", on_duplicate="ok")))
    first, second = await Wire().through(door), await Wire().through(door)
    assert (first.status, second.status, second.body, app.runs) == (201, 200, b"", 1)


async def test_unkept_stream_is_refused_under_another_key(guard: Guard) -> None:
    """An empty 200 would look like the response."""
    app = Counted(b"one", b"two", length=False)
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("POST /things", unique_by="{body.order}")))
    wires = [await Wire(key=key, body=b'{"order": 7}').through(door) for key in ("a", "b", "b")]
    assert ([wire.status for wire in wires], app.runs) == ([201, 409, 409], 1)


async def test_a_stream_of_a_failure_is_released_at_its_end(guard: Guard) -> None:

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"sorry", "more_body": True})
        assert await state(guard) == "running"
        await send({"type": "http.response.body"})

    wire = await Wire().through(IdempotencyMiddleware(app, guard=guard))
    assert (wire.status, wire.said, await state(guard)) == (503, "unstored", "released")


async def test_response_without_headers_is_accepted(guard: Guard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    door = IdempotencyMiddleware(app, guard=guard)
    first, second = await Wire().through(door), await Wire().through(door)
    assert (first.status, second.status, second.said) == (204, 204, "replayed")
    assert "content-length" not in second.headers


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_kept_body_is_a_copy_of_the_apps_buffer(guard: Guard, kind: Any) -> None:
    """Starlette passes a memoryview on, and its buffer may be overwritten for the next response."""
    buffer = bytearray(b"first")

    async def view(request: Request) -> Response:
        return Response(kind(buffer) if kind is memoryview else bytes(buffer))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": buffer})

    starlette = Starlette(routes=[Route("/things", view, methods=["POST"])])
    door = IdempotencyMiddleware(starlette if kind is memoryview else app, guard=guard)
    await Wire().through(door)
    buffer[:] = b"other"
    assert (await Wire().through(door)).body == b"first"
    found = await Wire("/idempotency?operation=POST+/things&key=k", method="GET").through(door)
    assert b'"body":"first"' in found.body


async def test_extensions_that_bypass_send_are_removed(guard: Guard) -> None:
    """The middleware would never see a file that the server sends itself."""
    seen: list[set[str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(set(scope["extensions"]))
        await Counted()(scope, receive, send)

    offered = {"http.response.pathsend": {}, "http.response.trailers": {}, "tls": {}}
    await Wire(extensions=offered).through(IdempotencyMiddleware(app, guard=guard))
    assert seen == [{"tls"}]
    assert len(offered) == 3  # a server offers the same ones to everyone


@pytest.mark.parametrize("extensions", [None, {}, {"http.response.pathsend": {}}])
async def test_outer_middleware_sees_the_route_in_the_scope(guard: Guard, extensions: Any) -> None:
    """Metrics and tracing read it afterwards; under some servers, it was missing."""
    app = Starlette(routes=[Route("/things", lambda request: Response(), methods=["POST"])])
    wire = await Wire(extensions=extensions).through(IdempotencyMiddleware(app, guard=guard))
    assert wire.scope["path_params"] == {}
    assert "endpoint" in wire.scope


# Conditional updates


@pytest.mark.parametrize("streamed", [False, True])
async def test_etag_comes_from_the_apps_own_get(guard: Guard, streamed: bool) -> None:
    """The GET has the same URL, query and credentials; none of its response reaches the client."""
    seen: list[tuple[str, str]] = []

    async def chunks() -> Any:
        yield b"{}"

    async def view(request: Request) -> Response:
        seen.append((request.method, request.query_params["id"]))
        assert request.headers["authorization"] == "Bearer alice"
        etag = {"etag": f'"{request.query_params["id"]}"'}
        return StreamingResponse(chunks(), headers=etag) if streamed else JSONResponse({}, headers=etag)

    app = Starlette(routes=[Route("/things", view, methods=["GET", "PUT"])])
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("PUT /things", if_match=True)))

    async def status(tag: str) -> int:
        wire = Wire("/things?id=7", method="PUT", key=tag, headers=[("if-match", f'"{tag}"')])
        return (await asyncio.wait_for(wire.through(door), 5)).status

    assert (await status("8"), seen) == (412, [("GET", "7")])
    assert (await status("7"), seen[1:]) == (200, [("GET", "7"), ("PUT", "7")])


@pytest.mark.parametrize("header", ["if-none-match", "if-modified-since", "if-unmodified-since", "range", "if-range"])
async def test_other_conditional_headers_are_not_sent_with_the_get(guard: Guard, header: str) -> None:
    """A cache on the way adds them: the GET would get 304 or a part, and the ETag would not be found."""

    async def view(request: Request) -> Response:
        asked_in_part = request.method == "GET" and header in request.headers
        return Response(status_code=304 if asked_in_part else 200, headers={"etag": '"7"'})

    app = Starlette(routes=[Route("/things", view, methods=["GET", "PUT"])])
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("PUT /things", if_match=True)))
    wire = Wire("/things", method="PUT", headers=[("if-match", '"7"'), (header, '"7"')])
    assert (await wire.through(door)).status == 200


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
async def test_endless_resource_is_not_read_for_its_etag(guard: Guard, spec: str) -> None:
    """A large resource is not read either, because the update would wait for it."""

    async def endless() -> Any:
        while True:
            yield b"x" * 1000
            await asyncio.sleep(0)

    async def view(request: Request) -> Response:
        etag = {"etag": '"7"'}
        return StreamingResponse(endless(), headers=etag) if request.method == "GET" else Response(b"put", headers=etag)

    app = Starlette(routes=[Route("/things", view, methods=["GET", "PUT"])])
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("PUT /things", if_match=True)))
    wire = Wire("/things", method="PUT", headers=[("if-match", '"7"')], asgi={"version": "3.0", "spec_version": spec})
    assert (await asyncio.wait_for(wire.through(door), 5)).body == b"put"


async def test_rejected_repeat_does_not_ask_for_a_new_etag(guard: Guard) -> None:
    """The update was performed: a client that sends it again with the new ETag would perform it twice."""

    async def view(request: Request) -> Response:
        return Response(headers={"etag": '"7"'})

    app = Starlette(routes=[Route("/things", view, methods=["GET", "PUT"])])
    contract = Contract(Rule("PUT /things", if_match=True, on_duplicate="reject"))
    door = IdempotencyMiddleware(app, guard=guard, contract=contract)
    wires = [await Wire(method="PUT", headers=[("if-match", '"7"')]).through(door) for _ in range(2)]
    assert [wire.status for wire in wires] == [200, 409]
    assert b"CONFLICT.idempotency.duplicate" in wires[1].body


# When the set-up is wrong


async def test_invalid_contract_fails_every_request(guard: Guard) -> None:
    """A server may ignore the error at its start, and later requests must not pass unguarded."""
    contract = Contract()
    contract.add(Rule("POST /refunds", reverses="payments.create"))
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard, contract=contract)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"payments\.create"):
            await Wire().through(door)
    assert app.runs == 0


async def test_oncemore_error_of_the_app_is_its_own_failure(guard: Guard) -> None:
    """The middleware does not answer it, but the operation may be tried again."""

    class Failing(Counted):
        async def work(self, receive: Any) -> None:
            raise StoreUnavailable("another ledger, for something else")

    with pytest.raises(StoreUnavailable):
        await Wire().through(IdempotencyMiddleware(Failing(), guard=guard))
    assert await state(guard) == "released"


async def test_second_final_message_of_an_app_is_ignored(guard: Guard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})
        await send({"type": "http.response.body", "body": b""})

    middleware = IdempotencyMiddleware(app, guard=guard)
    answers = [await Wire().through(middleware) for _ in range(2)]
    assert [[message["body"] for message in answer.sent if "body" in message] for answer in answers] == [[b"paid"]] * 2


# In doubt

DOUBTFUL = Contract(
    Rule("POST /things", doubt=(TimeoutError, 502)), Rule("POST /streams", doubt=(TimeoutError,), streams="release")
)


@pytest.mark.parametrize(
    ("error", "keep", "after"),
    [(TimeoutError(), "final", "held"), (ValueError(), "final", "released"), (TimeoutError(), "all", "settled")],
)
async def test_error_behind_a_page_is_in_doubt(guard: Guard, error: Exception, keep: Any, after: str) -> None:
    """Starlette makes the page first and raises afterwards, so an outer middleware sees both."""

    async def view(request: Request) -> Response:
        raise error

    contract = Contract(Rule("POST /things", doubt=(TimeoutError,), keep=keep))
    app = Starlette(routes=[Route("/things", view, methods=["POST"])])
    wire = Wire()
    with pytest.raises(type(error)):
        await wire.through(IdempotencyMiddleware(app, guard=guard, contract=contract))
    assert (wire.status, wire.body) == (500, b"Internal Server Error")
    assert await state(guard) == after


async def test_page_in_doubt_stays_so_if_its_app_fails_later(guard: Guard) -> None:
    async def later() -> None:
        raise RuntimeError("too late")

    async def view(request: Request) -> Response:
        return Response(b"upstream", 502, background=BackgroundTask(later))

    door = IdempotencyMiddleware(
        Starlette(routes=[Route("/things", view, methods=["POST"])]), guard=guard, contract=DOUBTFUL
    )
    wire = Wire()
    with pytest.raises(RuntimeError, match="too late"):
        await wire.through(door)
    assert (wire.status, wire.said, await state(guard)) == (502, "unstored", "held")


async def test_replaced_error_page_is_not_recorded(guard: Guard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for status in (500, 201):
            await send({"type": "http.response.start", "status": status, "headers": []})
            await send({"type": "http.response.body", "body": b"%d" % status})

    wire = await Wire().through(IdempotencyMiddleware(app, guard=guard))
    assert (wire.status, wire.body, await state(guard)) == (201, b"201", "settled")


@pytest.mark.parametrize(("error", "after"), [(TimeoutError(), "held"), (ValueError(), "released")])
async def test_stream_that_breaks_off_in_doubt_is_held(guard: Guard, error: Exception, after: str) -> None:
    class Breaking(Counted):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            raise error

    with pytest.raises(type(error)):
        await Wire("/streams").through(IdempotencyMiddleware(Breaking(), guard=guard, contract=DOUBTFUL))
    assert await state(guard) == after


async def test_corrupt_record_of_a_request_is_an_event() -> None:
    events: list[Event] = []
    guard = Guard("memory://", observers=[events.append])
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard)
    assert (await Wire().through(door)).status == 201
    record = guard.list(Filter()).records[0]
    guard.delete(record.scope, record.key)
    operation = Operation(record.scope, record.key, record.fingerprint, record.name)
    lease = await arun(guard.store.claim(operation, lease=30))
    await arun(guard.store.settle(lease, Outcome("value", body=b"\xc1"), retention=60))  # type: ignore[arg-type]
    events.clear()
    assert (await Wire().through(IdempotencyMiddleware(app, guard=guard))).status == 503
    assert ("failed", CorruptRecord.code) in [(event.kind, event.code) for event in events]


async def test_known_length_over_the_limit_is_no_stream_to_release(guard: Guard) -> None:
    app = Counted(b"12345", b"67890")
    door = IdempotencyMiddleware(
        app, guard=guard, contract=Contract(Rule("POST /things", streams="release", max_response=8))
    )
    first = await Wire().through(door)
    assert (first.status, first.body, first.headers["idempotency-reason"]) == (201, b"1234567890", "size")
    second = await Wire().through(door)
    assert (second.status, app.runs) == (409, 1)
    assert b"outcome_not_kept" in second.body
