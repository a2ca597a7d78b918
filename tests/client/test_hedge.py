"""Hedged requests: the second copy of a slow request, on real sockets and under the same key."""

from __future__ import annotations

import asyncio
import io
import threading
import time
from collections.abc import Iterator
from typing import Any

import anyio
import httpx
import pytest

from oncemore._runtime.plan import arun, run
from oncemore.client.attempts import attempts
from oncemore.client.errors import RetriesExhausted
from oncemore.client.hosts import HOSTS, Budget
from oncemore.client.httpx import AsyncRetryTransport
from oncemore.client.retry import Retry
from oncemore.client.verdict import Fault
from oncemore.errors import ConfigurationError

from .clients import Aiohttp, AsyncHttpx, Httpx, Requests, Urllib3
from .server import Server, Visit, answer, effect, performed, problem, reset, then
from .virtual import Broken, Scripted

HEDGED = [Httpx, AsyncHttpx, Requests, Urllib3]
BODY = b'{"amount": 100}'
PIECE = 64 * 1024
in_progress = problem(409, error_code="CONFLICT.idempotency.in_progress", retryable=True)


def slowly(visit: Visit) -> None:
    time.sleep(1.5)


@pytest.fixture(params=HEDGED, ids=lambda kind: kind.__name__)
def client(request: pytest.FixtureRequest) -> Any:
    return request.param(Retry(hedge=0.1, deadline=5, budget=None))


def test_the_second_copy_wins_if_the_first_is_slow(client: Any) -> None:
    """CASES 34."""
    begun = time.monotonic()
    with Server(then(effect, slowly, performed()), default=performed()) as server:
        assert client.request("POST", server.url, BODY).status == 201
    assert time.monotonic() - begun < 1.4
    assert len(server.visits) == 2
    assert len({(visit.key, visit.body) for visit in server.visits}) == 1
    assert list(server.effects.values()) == [1]


def test_a_quick_answer_is_not_hedged(client: Any) -> None:
    """CASES 34."""
    with Server() as server:
        type(client)(Retry(hedge=2, deadline=5, budget=None)).request("POST", server.url, BODY)
    assert len(server.visits) == 1


def test_a_copy_that_is_told_its_twin_is_running_waits_for_the_twin(client: Any) -> None:
    """CASES 17."""
    first_is_done = threading.Event()

    def late(visit: Visit) -> None:
        first_is_done.wait(0.5)
        performed()(visit)

    with Server(late, in_progress) as server:
        assert client.request("POST", server.url, BODY).status == 201
    assert len(server.visits) == 2


def test_an_early_failure_is_left_to_the_retry(client: Any) -> None:
    """CASES 33."""
    with Server(answer(503), reset) as server:
        reply = type(client)(Retry(hedge=2, deadline=8, budget=None)).request("POST", server.url, BODY)
    assert reply.status == 201
    assert len(reply.story.attempts) == 3


def test_two_copies_that_both_fail_are_one_failed_attempt(client: Any) -> None:
    """CASES 33."""

    def late_reset(visit: Visit) -> None:
        time.sleep(0.3)
        visit.reset()

    with Server(late_reset, late_reset) as server:
        reply = client.request("POST", server.url, BODY)
    assert reply.status == 201
    assert len(reply.story.attempts) == 2


def test_what_must_not_be_repeated_is_not_hedged() -> None:
    """CASES 38."""

    def late(visit: Visit) -> None:
        time.sleep(0.3)
        performed()(visit)

    with Server(default=late) as server:
        Httpx(Retry(hedge=0.05), make_key=None).request("POST", server.url, BODY)
    assert len(server.visits) == 1


@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_what_can_be_read_only_by_one_is_not_hedged(client: Any, kind: str) -> None:
    """CASES 34.  Two copies would share the body between them, and the server get two halves."""
    whole = bytes(range(256)) * 8192

    class Slowly(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > len(whole) // 2:
                time.sleep(0.02)
            return super().read(PIECE)

    def parts(file: io.BytesIO) -> Iterator[bytes]:
        while part := file.read():
            yield part

    slow = Slowly(whole)
    body: Any = parts(slow) if kind == "pipe" or isinstance(client, AsyncHttpx) else slow
    with Server() as server:
        assert client.request("POST", server.url, body).status == 201
    assert [visit.body for visit in server.visits] == [whole]


def test_a_spent_budget_allows_no_hedge() -> None:
    """CASES 39."""

    def late(visit: Visit) -> None:
        time.sleep(0.3)
        performed()(visit)

    budget = Budget(tokens=4, ratio=0)
    with Server(default=late) as server:
        host = HOSTS.get(f"127.0.0.1:{server.port}", budget, None)
        assert host is not None
        for _ in range(3):
            host.failed(0)
        Httpx(Retry(hedge=0.05, budget=budget)).request("POST", server.url, BODY)
    assert len(server.visits) == 1


def test_the_deadline_holds_for_both_copies(client: Any) -> None:
    """CASES 37."""
    begun = time.monotonic()
    with Server(default=lambda visit: time.sleep(20)) as server, pytest.raises(RetriesExhausted):
        type(client)(Retry(hedge=0.1, deadline=0.6, budget=None)).request("POST", server.url, BODY)
    assert time.monotonic() - begun < 3


def test_aiohttp_says_that_it_cannot_hedge() -> None:
    """CASES 34."""
    with pytest.raises(ConfigurationError, match="httpx"):
        Aiohttp(Retry(hedge=0.1))


@pytest.mark.parametrize("awaited", [False, True])
def test_a_copy_that_was_never_sent_does_not_hide_that_its_twin_may_have_been(awaited: bool) -> None:
    """CASES 34."""

    class Copy:
        def __init__(self, takes: float, fault: Fault) -> None:
            self.takes = takes
            self.fault = fault

        def run(self) -> None:
            time.sleep(self.takes)
            raise Broken(self.fault)

        async def arun(self) -> None:
            await asyncio.sleep(self.takes)
            raise Broken(self.fault)

    class Twins(Scripted):
        hedgeable = True

        def attempt(self, number: int, limit: float) -> Any:
            return copies.pop(0)

    copies = [Copy(0.3, Fault("timeout")), Copy(0.3, Fault("connection", sent=False))]
    work = Twins()
    plan = attempts(work, Retry(attempts=1, hedge=0.05, budget=None))
    with pytest.raises(RetriesExhausted):
        asyncio.run(arun(plan)) if awaited else run(plan)
    assert work.story is not None
    assert work.story.attempts[0].verdict.name == "connection"
    assert work.story.known == "unknown"


async def test_cancelled_again_and_again_both_copies_give_their_connections_back() -> None:
    """CASES 37, 53.  As scopes of anyio cancel: at every await, also while a connection is being closed."""
    slow = threading.Event()

    def act(visit: Visit) -> None:
        slow.wait(3)
        performed()(visit)

    limits = httpx.Limits(max_connections=2)
    transport = AsyncRetryTransport(Retry(hedge=0.005, budget=None), transport=httpx.AsyncHTTPTransport(limits=limits))
    with Server(default=act) as server:
        async with httpx.AsyncClient(transport=transport, timeout=2) as client:
            for _ in range(6):
                with anyio.move_on_after(0.03):
                    await client.post(server.url, content=b"x")
            slow.set()
            assert (await client.post(server.url, content=b"x")).status_code == 201
