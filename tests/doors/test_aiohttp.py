"""The aiohttp.web middleware keeps the door contract, and what only aiohttp does works as well."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
from aiohttp import web

from oncemore import Contract, Guard, Rule
from oncemore.errors import ConfigurationError
from oncemore.web.aiohttp import IdempotencyMiddleware, idempotent
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


def test_aiohttp_middleware_refuses_what_is_no_application() -> None:
    with pytest.raises(ConfigurationError, match=r"give an aiohttp\.web\.Application"):
        IdempotencyMiddleware(object(), guard=Guard("memory://"))
