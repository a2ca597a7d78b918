"""The ASGI door message by message: what passes untouched, what is held back, and who is told of what, when."""

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

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore.errors import ConfigurationError, StoreUnavailable
from oncemore.web.asgi import IdempotencyMiddleware

from .wire import Counted, SlowSettling, Wire, state


@pytest.fixture
def guard() -> Guard:
    return Guard("memory://")


# What passes untouched


@pytest.mark.parametrize("kind", ["websocket", "lifespan"])
async def test_what_is_not_http_is_passed_on_as_it_is(guard: Guard, kind: str) -> None:
    """CASES 5."""
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.extend(given)

    scope, receive, send = {"type": kind, "headers": [(b"idempotency-key", b"k")]}, object(), object()
    await IdempotencyMiddleware(app, guard=guard)(scope, receive, send)  # type: ignore[arg-type]
    assert [given is passed for given, passed in zip(seen, (scope, receive, send), strict=True)] == [True] * 3


async def test_an_unguarded_request_is_passed_on_as_it_is(guard: Guard) -> None:
    """CASES 4, 5."""
    seen: list[Any] = []

    async def app(*given: Any) -> None:
        seen.append(given)

    door = IdempotencyMiddleware(app, guard=guard)
    for wire in (Wire(method="GET"), Wire(key=None), Wire(method="PUT")):
        scope, receive, send = wire.scope, wire.receive, wire.send
        await door(scope, receive, send)
        assert seen.pop() == (scope, receive, send)


# Background tasks


async def test_a_background_task_runs_once_and_after_the_outcome_is_stored(guard: Guard) -> None:
    """CASES 16."""
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
    """CASES 16: the client has its answer, and so will the next."""

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
    """CASES 16: DESIGN, rule 3."""
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
async def test_an_app_that_fails_before_its_response_is_whole_may_be_tried_again(guard: Guard, app: Any) -> None:
    """CASES 20: and the client gets none of it."""
    wire = Wire()
    with pytest.raises(RuntimeError):
        await wire.through(IdempotencyMiddleware(app, guard=guard))
    assert (wire.sent, await state(guard)) == ([], "released")


async def test_a_stream_that_breaks_off_is_not_run_again(guard: Guard) -> None:
    """CASES 21: part of it was heard."""

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


async def test_a_repeated_stream_is_a_plain_200_where_the_rule_says_so(guard: Guard) -> None:
    """CASES 21: of what was not kept there was nothing to make a response of, not even a status."""
    app = Counted(b"one", b"two", length=False)
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("POST /things", on_duplicate="ok")))
    first, second = await Wire().through(door), await Wire().through(door)
    assert (first.status, second.status, second.body, app.runs) == (201, 200, b"", 1)


async def test_a_stream_is_not_shown_as_nothing_to_whoever_asks_under_another_key(guard: Guard) -> None:
    """CASES 21: an empty 200 would pass for the response."""
    app = Counted(b"one", b"two", length=False)
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("POST /things", unique_by="{body.order}")))
    wires = [await Wire(key=key, body=b'{"order": 7}').through(door) for key in ("a", "b", "b")]
    assert ([wire.status for wire in wires], app.runs) == ([201, 409, 409], 1)


async def test_a_stream_of_a_failure_is_released_at_its_end(guard: Guard) -> None:
    """CASES 20, 21."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"sorry", "more_body": True})
        assert await state(guard) == "running"
        await send({"type": "http.response.body"})

    wire = await Wire().through(IdempotencyMiddleware(app, guard=guard))
    assert (wire.status, wire.said, await state(guard)) == (503, "unstored", "released")


async def test_an_app_that_sends_less_headers_than_it_may_is_understood(guard: Guard) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    door = IdempotencyMiddleware(app, guard=guard)
    first, second = await Wire().through(door), await Wire().through(door)
    assert (first.status, second.status, second.said) == (204, 204, "replayed")
    assert "content-length" not in second.headers


@pytest.mark.parametrize("kind", [bytearray, memoryview])
async def test_what_is_kept_does_not_change_with_the_apps_own_buffer(guard: Guard, kind: Any) -> None:
    """CASES 19: Starlette sends a memoryview as it is; what it shows may be written over for the next response."""
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


async def test_ways_around_the_door_are_not_offered_to_the_app(guard: Guard) -> None:
    """CASES 19: a file that the server sends by itself would never be seen, nor kept."""
    seen: list[set[str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(set(scope["extensions"]))
        await Counted()(scope, receive, send)

    offered = {"http.response.pathsend": {}, "http.response.trailers": {}, "tls": {}}
    await Wire(extensions=offered).through(IdempotencyMiddleware(app, guard=guard))
    assert seen == [{"tls"}]
    assert len(offered) == 3  # a server offers the same ones to everyone


@pytest.mark.parametrize("extensions", [None, {}, {"http.response.pathsend": {}}])
async def test_an_outer_middleware_sees_which_route_it_was(guard: Guard, extensions: Any) -> None:
    """Those that measure or trace ask the scope for it afterwards, and would have had none under some servers."""
    app = Starlette(routes=[Route("/things", lambda request: Response(), methods=["POST"])])
    wire = await Wire(extensions=extensions).through(IdempotencyMiddleware(app, guard=guard))
    assert wire.scope["path_params"] == {}
    assert "endpoint" in wire.scope


# Conditional updates


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_etag_is_that_of_the_apps_own_answer_to_a_get(guard: Guard, streamed: bool) -> None:
    """A conditional update asks for the same URL, query included, with the caller's credentials, and sends nothing of it."""
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
async def test_what_else_the_update_is_conditional_on_is_not_asked_of_its_resource(guard: Guard, header: str) -> None:
    """A cache on the way adds them: the resource would be unchanged (304), or in parts, and its ETag not found."""

    async def view(request: Request) -> Response:
        asked_in_part = request.method == "GET" and header in request.headers
        return Response(status_code=304 if asked_in_part else 200, headers={"etag": '"7"'})

    app = Starlette(routes=[Route("/things", view, methods=["GET", "PUT"])])
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("PUT /things", if_match=True)))
    wire = Wire("/things", method="PUT", headers=[("if-match", '"7"'), (header, '"7"')])
    assert (await wire.through(door)).status == 200


@pytest.mark.parametrize("spec", ["2.3", "2.4"])
async def test_a_resource_that_never_ends_is_not_read_for_its_etag(guard: Guard, spec: str) -> None:
    """Nor is one that is merely large: the update would wait for all of it, and its key with it."""

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


async def test_a_repeat_that_is_rejected_is_not_told_to_try_with_a_new_etag(guard: Guard) -> None:
    """It was performed: whoever reads the new ETag and sends it again does it twice."""

    async def view(request: Request) -> Response:
        return Response(headers={"etag": '"7"'})

    app = Starlette(routes=[Route("/things", view, methods=["GET", "PUT"])])
    contract = Contract(Rule("PUT /things", if_match=True, on_duplicate="reject"))
    door = IdempotencyMiddleware(app, guard=guard, contract=contract)
    wires = [await Wire(method="PUT", headers=[("if-match", '"7"')]).through(door) for _ in range(2)]
    assert [wire.status for wire in wires] == [200, 409]
    assert b"CONFLICT.idempotency.duplicate" in wires[1].body


# When the set-up is wrong


async def test_a_contract_that_does_not_hold_together_is_an_error_every_time(guard: Guard) -> None:
    """A server may swallow the error at its start: the requests after it must not pass unguarded."""
    contract = Contract()
    contract.add(Rule("POST /refunds", reverses="payments.create"))
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard, contract=contract)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"payments\.create"):
            await Wire().through(door)
    assert app.runs == 0


async def test_an_error_of_ours_that_the_app_itself_raises_is_the_apps(guard: Guard) -> None:
    """The door does not answer for it, but the operation may be tried again."""

    class Failing(Counted):
        async def work(self, receive: Any) -> None:
            raise StoreUnavailable("another ledger, for something else")

    with pytest.raises(StoreUnavailable):
        await Wire().through(IdempotencyMiddleware(Failing(), guard=guard))
    assert await state(guard) == "released"
