"""The ASGI middleware with clients that leave, timeouts outside and inside it, and late owners."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from oncemore import Guard, Operation, Outcome, Policy, Record
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.model import Lease
from oncemore._ledger.store import Filter
from oncemore._runtime.plan import arun
from oncemore.web.asgi import IdempotencyMiddleware

from .wire import Counted, SlowSettling, Wire, state


@pytest.fixture
def guard() -> Guard:
    return Guard("memory://")


# Clients that leave


async def test_disconnect_before_the_body_ends_runs_nothing(guard: Guard) -> None:
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard)
    wire = Wire(messages=[{"type": "http.request", "body": b'{"amo', "more_body": True}, {"type": "http.disconnect"}])
    await wire.through(door)
    assert (wire.sent, app.runs) == ([], 0)
    assert (await Wire().through(door)).said == "stored"


async def test_app_receives_disconnect_after_the_outcome_is_kept(guard: Guard) -> None:
    """An app that stops for a lost client would lose its outcome as well."""
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        listener = asyncio.create_task(receive())
        await asyncio.sleep(0.05)
        assert not listener.done()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        heard.append((await listener)["type"])
        heard.append((await receive())["type"])

    door = IdempotencyMiddleware(app, guard=guard)
    wire = Wire()
    wire.leave()
    await wire.through(door)
    assert heard == ["http.disconnect", "http.disconnect"]
    assert (await Wire().through(door)).said == "replayed"


async def test_app_that_waits_for_disconnect_after_its_error_page_ends(guard: Guard) -> None:
    """The page is sent when the app has ended, and the app would end when its client has left."""
    runs: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(1)
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body"})
        while (await receive())["type"] != "http.disconnect":
            pass

    door = IdempotencyMiddleware(app, guard=guard)
    for _ in range(2):
        wire = Wire()
        wire.leave()
        await asyncio.wait_for(wire.through(door), 5)
    assert len(runs) == 2


@pytest.mark.parametrize("length", [True, False])
async def test_starlette_stream_is_not_cut_by_early_disconnect(guard: Guard, length: bool) -> None:
    """Starlette listens for the client to leave, and would stop before the first chunk."""
    runs: list[int] = []

    async def chunks() -> Any:
        runs.append(1)
        await asyncio.sleep(0.01)
        yield b"done"

    async def view(request: Request) -> Response:
        return StreamingResponse(chunks(), headers={"content-length": "4"} if length else {})

    app = Starlette(routes=[Route("/things", view, methods=["POST"])])
    door = IdempotencyMiddleware(app, guard=guard)
    wire = Wire()
    wire.leave()
    await wire.through(door)
    again = await Wire().through(door)
    assert (again.status, len(runs)) == (200 if length else 409, 1)
    assert again.body == b"done" or not length


async def test_response_is_replayed_after_disconnect_while_sending(guard: Guard) -> None:
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard)

    class Lost(Wire):
        async def send(self, message: Any) -> None:
            raise OSError("The client is gone")

    with pytest.raises(OSError, match="gone"):
        await Lost().through(door)
    assert ((await Wire().through(door)).said, app.runs) == ("replayed", 1)


# Those who give up: a timeout outside, a timeout inside


class Slow(Counted):
    """An app that takes a while."""

    async def work(self, receive: Any) -> None:
        await asyncio.sleep(0.1)


async def asyncio_timeout(app: Any, wire: Wire) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await wire.through(app)


async def anyio_timeout(app: Any, wire: Wire) -> None:
    with anyio.move_on_after(0.02):
        await wire.through(app)
        raise AssertionError("it was in time")


async def cancelled(app: Any, wire: Wire) -> None:
    task = asyncio.create_task(wire.through(app))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("gives_up", [asyncio_timeout, anyio_timeout, cancelled])
async def test_outer_timeout_does_not_lose_the_outcome(guard: Guard, gives_up: Any) -> None:
    app = Slow()
    door = IdempotencyMiddleware(app, guard=guard)
    wire = Wire()
    await gives_up(door, wire)
    again = await Wire().through(door)
    assert (again.status, again.said, app.runs) == (201, "replayed", 1)


async def test_failure_of_an_abandoned_task_is_logged(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Slow):
        async def work(self, receive: Any) -> None:
            await super().work(receive)
            raise RuntimeError("The provider is out")

    await cancelled(IdempotencyMiddleware(Failing(), guard=guard), Wire())
    with caplog.at_level(logging.ERROR, "oncemore.web"):
        await asyncio.sleep(0.2)
    assert "failed after its client had left" in caplog.text
    assert "The provider is out" in caplog.text


def within(app: Any) -> Any:
    """A middleware inside ours that gives its app 50 ms, and answers 504 itself after that."""

    async def timed(scope: Any, receive: Any, send: Any) -> None:
        try:
            with anyio.fail_after(0.05):
                await app(scope, receive, send)
        except TimeoutError:
            await send({"type": "http.response.start", "status": 504, "headers": [(b"content-length", b"4")]})
            await send({"type": "http.response.body", "body": b"late"})

    return timed


async def test_inner_timeout_while_settling_does_not_lose_the_outcome() -> None:
    """The app has answered, so its own timeout does not undo the effect."""
    app = Counted()
    guard = Guard(SlowSettling())
    door = IdempotencyMiddleware(within(app), guard=guard)
    first = await Wire().through(door)
    assert (first.status, first.said, first.body) == (504, "unstored", b"late")
    again = await Wire().through(door)
    assert (again.status, again.said, again.body, app.runs) == (201, "replayed", b"done", 1)


async def test_inner_timeout_in_mid_response_replaces_the_response(guard: Guard) -> None:
    """The part of the first response that was held back is not in the second response."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.sleep(5)

    wire = await Wire().through(IdempotencyMiddleware(within(app), guard=guard))
    assert (wire.status, wire.body, await state(guard)) == (504, b"late", "released")


async def test_inner_timeout_in_mid_stream_cuts_the_stream(guard: Guard) -> None:
    """The server refuses a second start, so the client sees that the stream was cut."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        await asyncio.sleep(5)

    class Strict(Wire):
        async def send(self, message: Any) -> None:
            if message["type"] == "http.response.start" and self.sent:
                raise RuntimeError("The response has begun")
            await super().send(message)

    for number, streams in enumerate(("refuse", "release")):
        contract = Contract(Rule("POST /things", streams=streams))  # type: ignore[arg-type]
        wire = Strict(key=str(number))
        with pytest.raises(RuntimeError, match="has begun"):
            await wire.through(IdempotencyMiddleware(within(app), guard=guard, contract=contract))
        assert wire.body == b"half"


async def test_inner_timeout_before_the_response_is_a_failure(guard: Guard) -> None:
    app = Slow()
    door = IdempotencyMiddleware(within(app), guard=guard)
    first = await Wire().through(door)
    assert (first.status, first.said, app.runs) == (504, "unstored", 1)
    assert await state(guard) == "released"


# Owners that come too late


async def test_late_owner_answers_with_its_successors_outcome(guard: Guard) -> None:
    """It does so with a complete response, and with one that it begins to stream."""
    other = Guard(guard.store, policy=Policy(on_unknown="retry"))

    class Overtaken(Counted):
        async def work(self, receive: Any) -> None:
            guard.store.shift += 60
            [record] = (await arun(guard.store.list(Filter()))).records
            operation = same_operation(record)
            await other.arun(operation, lambda op: Outcome("response", 202, (), b"the other's"))

    for app in (Overtaken(), Overtaken(b"one", b"two", length=False)):
        wire = await Wire(key=str(id(app))).through(IdempotencyMiddleware(app, guard=guard))
        assert (wire.status, wire.body, wire.said) == (202, b"the other's", "replayed")
        assert len(wire.sent) == 2
        guard.store._records.clear()  # type: ignore[attr-defined]


async def test_late_owner_is_refused_while_its_successor_runs(guard: Guard) -> None:
    """Neither its response nor any later message reaches the client."""

    class Overtaken(Counted):
        async def work(self, receive: Any) -> None:
            guard.store.shift += 60
            [record] = (await arun(guard.store.list(Filter()))).records
            assert isinstance(await arun(guard.store.claim(same_operation(record), lease=30)), Lease)

    for app in (Overtaken(), Overtaken(b"one", b"two", length=False)):
        wire = await Wire(key=str(id(app))).through(IdempotencyMiddleware(app, guard=Guard(guard.store)))
        assert (wire.status, wire.headers["content-type"]) == (409, "application/problem+json")
        assert b"TRANSIENT.idempotency.fenced" in wire.body
        assert len(wire.sent) == 2
        guard.store._records.clear()  # type: ignore[attr-defined]


def same_operation(record: Record) -> Operation:
    return Operation(record.scope, record.key, record.fingerprint, record.name)


# What is left when the outcome is kept


async def gives_up_and_answers(app: Any, wire: Wire) -> None:
    """A middleware outside ours that gives it 20 ms, and answers 504 itself after that."""
    try:
        async with asyncio.timeout(0.02):
            await wire.through(app)
    except TimeoutError:
        await wire.send({"type": "http.response.start", "status": 504, "headers": []})
        await asyncio.sleep(0.15)  # the app ends meanwhile
        await wire.send({"type": "http.response.body", "body": b"late"})


@pytest.mark.parametrize("app", [Slow(), Slow(b"one", b"two", length=False)], ids=["whole", "stream"])
async def test_nothing_is_sent_after_an_outer_middleware_has_answered(guard: Guard, app: Slow) -> None:
    """Two responses to one request would be mixed up."""
    door = IdempotencyMiddleware(app, guard=guard)
    wire = Wire()
    await gives_up_and_answers(door, wire)
    assert ([message["type"] for message in wire.sent], wire.status, wire.body) == (
        ["http.response.start", "http.response.body"],
        504,
        b"late",
    )
    again = await Wire().through(door)
    assert (again.status, app.runs) == (201 if app.length else 409, 1)


@pytest.mark.parametrize(("streams", "left"), [("refuse", "settled"), ("release", "released")])
async def test_abandoned_stream_ends(guard: Guard, streams: Any, left: str) -> None:
    """Its outcome is recorded, so the app need not go on."""
    ended = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"tick", "more_body": True})
                await asyncio.sleep(0.005)
        finally:
            ended.set()

    contract = Contract(Rule("POST /things", streams=streams))
    wire = Wire()
    await cancelled(IdempotencyMiddleware(app, guard=guard, contract=contract), wire)
    await asyncio.wait_for(ended.wait(), 1)
    sent = len(wire.sent)
    await asyncio.sleep(0.05)
    assert (len(wire.sent), await state(guard)) == (sent, left)


async def test_long_stream_does_not_lose_its_lease() -> None:
    """The lease is not renewed after the outcome was settled."""
    events: list[str] = []
    guard = Guard("memory://", observers=[lambda event: events.append(event.kind)])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"tick", "more_body": True})
        await asyncio.sleep(0.2)
        await send({"type": "http.response.body"})
        await asyncio.sleep(0.1)

    contract = Contract(Rule("POST /things", lease="90ms"))
    await Wire().through(IdempotencyMiddleware(app, guard=guard, contract=contract))
    assert events == ["claimed", "settled"]


async def test_loop_shutdown_before_the_app_leaves_the_key_free(guard: Guard) -> None:
    """Nothing has happened under the lease, so the outcome is not unknown."""
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard)
    task = asyncio.create_task(Wire().through(door))
    await asyncio.sleep(0)
    assert await state(guard) == "running"
    for each in asyncio.all_tasks() - {asyncio.current_task()}:  # as asyncio.run does
        each.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert app.runs == 0
    assert ((await Wire().through(door)).said, app.runs) == ("stored", 1)
