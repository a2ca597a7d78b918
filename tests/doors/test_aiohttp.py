"""The aiohttp.web middleware: the door contract, and the features of aiohttp alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import httpx
import pytest
from aiohttp import BodyPartReader, web

from oncemore import Contract, Guard, Rule
from oncemore._contract.settings import Settings
from oncemore._ledger.model import Lease, Outcome
from oncemore._runtime.plan import arun
from oncemore.errors import ConfigurationError
from oncemore.web.aiohttp import IdempotencyMiddleware, current_operation, idempotent
from tests.doors.app import ContractApp
from tests.doors.contract import DoorContract

from .apps_aiohttp import contract_app, serving
from .live import keyed


class TestAiohttp(DoorContract):
    """Every case."""

    @pytest.fixture(scope="class")
    @classmethod
    def url(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        app = ContractApp(f"sqlite:///{tmp_path_factory.mktemp('once')}/once.db")
        with serving(contract_app(app)) as url:
            yield url
        app.guard.close()


# ── What only aiohttp does ────────────────────────────────────────────────────────────────────────────────────────────


class Shop:
    """Handlers that count their runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.begun, self.gate = threading.Event(), threading.Event()

    @idempotent(key="required")
    async def stream(self, request: web.Request) -> web.StreamResponse:
        self.runs += 1
        response = web.StreamResponse(status=200)
        await response.prepare(request)
        for part in (b"one ", b"two"):
            await response.write(part)
        return response

    async def refuse(self, request: web.Request) -> web.StreamResponse:
        self.runs += 1
        raise web.HTTPUnprocessableEntity(text=f"run {self.runs}")

    async def slow(self, request: web.Request) -> web.StreamResponse:
        self.runs += 1
        self.begun.set()
        await asyncio.to_thread(self.gate.wait, 20)
        return web.Response(text="done")


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def client(shop: Shop) -> Iterator[httpx.Client]:
    async def who(request: web.Request) -> str:
        return request.headers["Authorization"]

    app = web.Application()
    IdempotencyMiddleware(app, guard=Guard("memory://"), contract=Contract(Rule("POST /refused")), principal=who)
    app.router.add_post("/stream/{id:\\d+}", shop.stream)
    app.router.add_post("/refuse", shop.refuse)
    app.router.add_post("/slow/{rest:.*}", shop.slow)
    with serving(app, handler_cancellation=True) as url:
        with httpx.Client(base_url=url, headers={"Authorization": "alice"}, timeout=20) as client:
            yield client


def test_aiohttp_prepared_stream_is_recorded_and_not_repeated(client: httpx.Client, shop: Shop) -> None:
    first, again = (client.post("/stream/7", headers=keyed("k")) for _ in range(2))
    assert (first.text, first.headers["idempotency-reason"]) == ("one two", "streaming")
    assert (again.status_code, shop.runs) == (409, 1)
    assert client.post("/stream/7").status_code == 400  # the rule on the handler


def test_aiohttp_raised_response_is_stored_and_replayed(client: httpx.Client, shop: Shop) -> None:
    first, again = (client.post("/refuse", headers=keyed("k")) for _ in range(2))
    assert [(each.status_code, each.text) for each in (first, again)] == [(422, "run 1")] * 2
    assert [each.headers["idempotency-status"] for each in (first, again)] == ["stored", "replayed"]


def test_aiohttp_client_that_leaves_does_not_cancel_the_effect(client: httpx.Client, shop: Shop) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/slow/a/b", headers=keyed("k"), timeout=0.5)
    assert shop.begun.wait(20)
    shop.gate.set()
    again = client.post("/slow/a/b", headers=keyed("k"))
    assert (again.text, again.headers["idempotency-status"], shop.runs) == ("done", "replayed", 1)


def test_aiohttp_unserved_rule_is_warned_of(client: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    assert [record.message for record in caplog.get_records("setup") if "No route" in record.message] == [
        "No route of the app serves the rule 'POST /refused', so it guards nothing (did you mean 'POST /refuse'?): "
        "correct its path"
    ]


def test_aiohttp_middleware_refuses_another_object_as_app() -> None:
    with pytest.raises(ConfigurationError, match=r"give an aiohttp\.web\.Application"):
        IdempotencyMiddleware(object(), guard=Guard("memory://"))


# ── Each with an app of its own ───────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def shop_of(*handlers: Any, middlewares: Sequence[Any] = (), **rule: Unpack[Settings]) -> Iterator[httpx.Client]:
    """Return a client of an app that serves each handler at its name."""
    app = web.Application(middlewares=middlewares)
    IdempotencyMiddleware(app, guard=Guard("memory://"), contract=Contract(Rule("POST /{name}", **rule)))
    for handler in handlers:
        app.router.add_post(f"/{handler.__name__}", handler)
    with serving(app) as url, httpx.Client(base_url=url, headers={"Authorization": "a"}, timeout=20) as client:
        yield client


def test_aiohttp_guarded_body_can_be_read_in_every_way() -> None:
    """aiohttp reads multipart forms from the connection, even after the body was read whole."""

    async def content(request: web.Request) -> web.Response:
        return web.Response(body=b"".join([chunk async for chunk in request.content.iter_any()]))

    async def multipart(request: web.Request) -> web.Response:
        parts = [await part.read() async for part in await request.multipart() if isinstance(part, BodyPartReader)]
        return web.Response(body=b"".join(map(bytes, parts)))

    async def post(request: web.Request) -> web.Response:
        file = (await request.post())["file"]
        assert isinstance(file, web.FileField)
        return web.Response(body=file.file.read())

    large = b"x" * 200_000
    with shop_of(content, multipart, post) as client:
        assert client.post("/content", content=large, headers=keyed("k")).content == large
        for path in ("/multipart", "/post"):
            assert client.post(path, files={"file": large}, headers=keyed("k")).content == large


def test_aiohttp_slow_owner_answers_with_successors_empty_response() -> None:
    async def pay(request: web.Request) -> web.Response:
        lease = current_operation().lease
        await arun(guard.store.release(lease, retention=60.0))
        successor = await arun(guard.store.claim(lease.operation, lease=60.0))
        assert isinstance(successor, Lease)
        await arun(guard.store.settle(successor, Outcome("response", 204), retention=60.0, audit=False, note=""))
        return web.Response(status=202)

    app, guard = web.Application(), Guard("memory://")
    IdempotencyMiddleware(app, guard=guard)
    app.router.add_post("/pay", pay)
    with serving(app) as url:
        answer = httpx.post(f"{url}/pay", headers={"Authorization": "a", **keyed("k")})
    assert (answer.status_code, answer.headers["idempotency-status"]) == (204, "replayed")


def test_aiohttp_stream_that_is_not_kept_holds_its_lease() -> None:
    gate = threading.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"one ")
        await asyncio.to_thread(gate.wait, 20)
        await response.write(b"two")
        return response

    with shop_of(stream, streams="release", in_flight="conflict") as client:
        with client.stream("POST", "/stream", headers=keyed("k")) as first:
            chunks = first.iter_raw()
            assert next(chunks) == b"one "
            assert client.post("/stream", headers=keyed("k")).status_code == 409
            gate.set()
            assert b"".join(chunks) == b"two"
        assert client.post("/stream", headers=keyed("k")).text == "one two"


def test_aiohttp_file_is_recorded_if_an_outer_middleware_gives_up(tmp_path: Path) -> None:
    runs: list[int] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    async def report(request: web.Request) -> web.FileResponse:
        runs.append(1)
        begun.set()
        await gate.wait()
        return web.FileResponse(tmp_path / "report")

    @web.middleware
    async def impatient(request: web.Request, handler: Any) -> Any:
        task = asyncio.ensure_future(handler(request))
        if not gate.is_set():
            await begun.wait()
            task.cancel()
            gate.set()
        try:
            return await task
        except asyncio.CancelledError:
            return web.Response(status=504)

    (tmp_path / "report").write_text("paid")
    with shop_of(report, middlewares=[impatient]) as client:
        assert [client.post("/report", headers=keyed("k")).status_code for _ in range(2)] == [504, 409]
    assert len(runs) == 1


@pytest.mark.parametrize("inner", [Contract(), Contract(Rule("POST /shop/pay", name="inner"))])
def test_aiohttp_guarded_app_in_a_guarded_app_performs_once(inner: Contract) -> None:
    runs: list[int] = []

    async def pay(request: web.Request) -> web.Response:
        runs.append(1)
        return web.Response(text="paid")

    outer, shop, guard = web.Application(), web.Application(), Guard("memory://")
    IdempotencyMiddleware(outer, guard=guard, contract=Contract(wait="1s"))
    IdempotencyMiddleware(shop, guard=guard, contract=inner)
    shop.router.add_post("/pay", pay)
    outer.add_subapp("/shop", shop)
    with serving(outer) as url:
        for said in ("stored", "replayed"):
            answer = httpx.post(f"{url}/shop/pay", headers={"Authorization": "a", **keyed("k")})
            assert (answer.status_code, answer.headers["idempotency-status"]) == (200, said)
    assert len(runs) == 1


def test_aiohttp_error_page_of_an_outer_middleware_is_not_recorded() -> None:
    runs: list[int] = []

    async def pay(request: web.Request) -> web.Response:
        runs.append(1)
        raise ValueError

    @web.middleware
    async def explain(request: web.Request, handler: Any) -> Any:
        try:
            return await handler(request)
        except ValueError:
            return web.Response(status=422)

    with shop_of(pay, middlewares=[explain]) as client:
        assert [client.post("/pay", headers=keyed("k")).status_code for _ in range(2)] == [422, 422]
    assert len(runs) == 2
