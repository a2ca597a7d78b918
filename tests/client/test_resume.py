"""Resuming that is itself interrupted: whatever was not asked for again is still there for the next."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx
import pytest
import requests
from msgspec.structs import replace

from oncemore import Guard
from oncemore._ledger.connect import connect
from oncemore._runtime.plan import arun, run
from oncemore.client.aiohttp import RetryMiddleware
from oncemore.client.errors import CredentialsMissing, KeyringError, OutcomeUnknown, RetriesExhausted
from oncemore.client.httpx import AsyncRetryTransport, RetryTransport
from oncemore.client.keyring import open_keyring
from oncemore.client.keyring.entry import Keyring, Resumed, scope_of
from oncemore.client.keyring.ledger import LedgerKeyring
from oncemore.client.requests import RetryAdapter
from oncemore.client.retry import Retry
from oncemore.encryption import Seal

from .clients import Httpx
from .server import Server, Visit, answer, reset
from .test_keyring import adopt_all, claim, entry
from .test_ledger_keyring import Failing

RETRY = Retry(base=0.005, cap=0.01, budget=None)
LEASE = 0.5
KEYS = ["k0", "k1", "k2"]


@pytest.fixture(params=["file", "ledger"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Keyring]]:
    """Opens the keyring as a process would that has just started."""
    rings: list[Keyring] = []

    def ring() -> Keyring:
        if request.param == "file":
            rings.append(open_keyring(f"sqlite:///{tmp_path}/keys.db"))
        else:
            store = connect(f"sqlite:///{tmp_path}/ledger.db")
            rings.append(LedgerKeyring(store, lease=LEASE, own_store=True))
        return rings[-1]

    yield ring
    for one in rings:
        one.close()


def leave_behind(ring: Callable[[], Keyring], url: str, *credentials: str, **changes: Any) -> None:
    """Operations under the three keys, of a process that died while it was at them."""
    child = os.fork()
    if child == 0:
        try:
            for number, key in enumerate(KEYS):
                headers = (("Idempotency-Key", key), *((name, "") for name in credentials))
                one = replace(entry(key, token=number + 1), url=url, scope=scope_of("POST", url), headers=headers)
                run(ring().claim(replace(one, fingerprint="", **changes), oldest=0))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    time.sleep(LEASE + 0.1)


def interrupted(ring: Keyring) -> list[str]:
    time.sleep(LEASE + 0.1)
    return [one.key for one in run(ring.pending()) if one.state == "sending"]


class Refusing(httpx.Auth):
    """Cannot get a token just now."""

    def auth_flow(self, request: httpx.Request) -> Any:
        raise httpx.ConnectError("no token")
        yield request


def test_entry_that_failed_before_sending_is_resumed_later(opened: Callable[[], Keyring]) -> None:
    """The client had no token yet; the process lives on, and asks again when it has one."""
    with Server() as server:
        leave_behind(opened, server.url)
        transport = RetryTransport(RETRY, opened())
        with httpx.Client(transport=transport, auth=Refusing()) as client:
            assert [type(done.error) for done in transport.resume(client)] == [httpx.ConnectError] * 3
            assert interrupted(opened()) == KEYS
            assert [done.error for done in transport.resume()] == [None] * 3
            assert transport.pending() == []
    assert server.effects == dict.fromkeys(KEYS, 1)


def test_what_lacked_its_credentials_is_resumed_once_they_are_there(opened: Callable[[], Keyring]) -> None:
    """Nobody was told anything yet, so it takes no `opened=True`."""
    with Server() as server:
        leave_behind(opened, server.url, "Authorization")
        transport = RetryTransport(RETRY, opened())
        assert [type(done.error) for done in transport.resume()] == [CredentialsMissing] * 3
        assert interrupted(opened()) == KEYS
        with httpx.Client(transport=transport, headers={"Authorization": "Bearer x"}) as client:
            assert [done.error for done in transport.resume(client)] == [None] * 3
    assert server.effects == dict.fromkeys(KEYS, 1)


def test_refused_resume_leaves_entries_open(opened: Callable[[], Keyring]) -> None:
    """The dead process may have had them performed; a token that has expired since says nothing about that."""
    with Server(*[answer(401)] * 3) as server:
        leave_behind(opened, server.url)
        transport = RetryTransport(RETRY, opened())
        assert [done.response.status_code for done in transport.resume()] == [401] * 3
        assert [(one.key, one.state) for one in transport.pending()] == [(key, "open") for key in KEYS]
        assert [done.response.status_code for done in transport.resume(opened=True)] == [201] * 3
        assert transport.pending() == []


@pytest.mark.parametrize("often", [False, True])
async def test_cancelled_resume_leaves_unreached_entries_pending(opened: Callable[[], Keyring], often: bool) -> None:
    """The first was sent and is open, because its caller knows that it was cancelled; the others are as they were."""
    reached = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(visit: Visit) -> None:
        loop.call_soon_threadsafe(reached.set)
        time.sleep(3)

    with Server(hang) as server:
        leave_behind(opened, server.url)
        transport = AsyncRetryTransport(RETRY, opened())
        if often:
            async with anyio.create_task_group() as group:
                group.start_soon(transport.resume)
                await reached.wait()
                group.cancel_scope.cancel()
        else:
            task = asyncio.create_task(transport.resume())
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asyncio.sleep(LEASE + 0.1)
        assert [(one.key, one.state) for one in await transport.pending()] == [
            ("k0", "open"),
            ("k1", "sending"),
            ("k2", "sending"),
        ]
        assert [done.entry.key for done in await transport.resume()] == KEYS[1:]
        assert [done.entry.key for done in await transport.resume(opened=True)] == KEYS[:1]
        await transport.aclose()
    assert server.effects == dict.fromkeys(KEYS, 1)


@pytest.mark.parametrize("steps", range(0, 24, 4))
async def test_adopting_that_is_cancelled_adopts_nothing(opened: Callable[[], Keyring], steps: int) -> None:
    leave_behind(opened, "http://h/p")
    ring = opened()
    [first, *_] = await arun(ring.pending())
    task = asyncio.create_task(arun(ring.adopt(first)))
    for _ in range(steps):
        await asyncio.sleep(0.0005)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled():
        return
    await asyncio.sleep(LEASE + 0.1)
    left = await arun(ring.pending())
    assert [(one.key, one.state) for one in left] == [(key, "sending") for key in KEYS]
    assert await arun(ring.adopt(left[0])) is not None
    await ring.aclose()


async def test_repeated_cancellation_leaves_entries_open(
    opened: Callable[[], Keyring],
) -> None:
    """anyio cancels at every await until the task has ended.  Each caller knows of it, so all entries are open."""
    rest = asyncio.Event()
    with Server(default=lambda visit: rest.is_set() or time.sleep(3)) as server:
        transport = AsyncRetryTransport(RETRY, opened())
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            for step in range(25):
                with anyio.move_on_after(0.004 * step):
                    await client.post(server.url, content=b"%d" % step)
            rest.set()
            await asyncio.sleep(LEASE + 0.2)
            left = await transport.pending()
            assert left
            assert {one.state for one in left} == {"open"}
            assert await transport.resume() == []


@pytest.mark.parametrize("changes", [{"body": None}, {"created_at": 1e9}], ids=["not kept", "too old"])
def test_what_cannot_be_sent_again_is_told_once(opened: Callable[[], Keyring], changes: Any) -> None:
    """Its body was too large to be kept, or the server has forgotten its key."""
    leave_behind(opened, "http://h/p", **changes)
    transport = RetryTransport(RETRY, opened())
    assert [isinstance(done.error, OutcomeUnknown) for done in transport.resume()] == [True] * 3
    assert [one.state for one in transport.pending()] == ["open"] * 3
    assert transport.resume() == []


def test_open_entry_that_failed_to_resume_stays_open(opened: Callable[[], Keyring]) -> None:
    ring = opened()
    run(ring.leave(claim(ring, entry())))
    transport = RetryTransport(RETRY, ring)
    with httpx.Client(transport=transport, auth=Refusing()) as client:
        assert len(transport.resume(client, opened=True)) == 1
        assert [one.state for one in transport.pending()] == ["open"]
        assert transport.resume(client) == []


def test_resume_names_entries_the_ledger_failed_to_adopt() -> None:
    inner: Any = connect("memory://")
    ring = LedgerKeyring(inner)
    for number, key in enumerate(KEYS):
        one = replace(entry(key, token=number + 1), fingerprint="", headers=(("Idempotency-Key", key),))
        run(ring.leave(claim(ring, one)))
    failing: Any = Failing(inner, "claim", after=2)
    answering = httpx.MockTransport(lambda request: httpx.Response(201))
    transport = RetryTransport(RETRY, LedgerKeyring(failing), transport=answering)
    results = transport.resume(opened=True)
    assert [type(done.error) for done in results] == [type(None), type(None), KeyringError]
    failing.verbs = ()
    assert [one.key for one in transport.pending()] == KEYS[2:]
    assert [done.error for done in transport.resume(opened=True)] == [None]
    assert transport.pending() == []


def test_adopt_skips_request_sealed_with_a_lost_key(caplog: Any) -> None:
    guard = Guard("memory://")
    old, new = (Guard(guard.store, seal=Seal([bytes([n]) * 32])) for n in (1, 2))
    for number, (sealed, key) in enumerate([(old, "lost"), (new, "kept")]):
        ring = open_keyring(sealed)
        run(ring.leave(claim(ring, entry(key, token=number + 1))))
    ring = open_keyring(new)
    assert [one.key for one in run(ring.pending())] == ["kept"]
    assert [one.key for one in adopt_all(ring, opened=True)] == ["kept"]
    assert "lost" in caplog.text
    assert [one.key for one in adopt_all(open_keyring(old), opened=True)] == ["lost"]  # with the old key it can


# Clients of several hosts that share a keyring

SECRET = {"Authorization": "Bearer secret"}


async def resume_by_httpx(place: str, base: str) -> list[Resumed]:
    transport = RetryTransport(RETRY, place)
    with httpx.Client(base_url=base, transport=transport, headers=SECRET) as client:
        return transport.resume(client, opened=True)


async def resume_by_async_httpx(place: str, base: str) -> list[Resumed]:
    transport = AsyncRetryTransport(RETRY, place)
    async with httpx.AsyncClient(base_url=base, transport=transport, headers=SECRET) as client:
        return await transport.resume(client, opened=True)


async def resume_by_requests(place: str, base: str) -> list[Resumed]:
    adapter, session = RetryAdapter(RETRY, place), requests.Session()
    session.adapters.clear()
    session.mount(base.rstrip("/"), adapter)
    session.headers.update(SECRET)
    return adapter.resume(session, opened=True)


async def resume_by_aiohttp(place: str, base: str) -> list[Resumed]:
    middleware = RetryMiddleware(RETRY, place)
    async with aiohttp.ClientSession(base, middlewares=[middleware], headers=SECRET) as session:
        return await middleware.resume(session, opened=True)


@pytest.mark.parametrize("resume", [resume_by_httpx, resume_by_async_httpx, resume_by_requests, resume_by_aiohttp])
async def test_resume_sends_no_credentials_to_another_host(resume: Any, tmp_path: Path) -> None:
    """The operation is of another client, which has the same keyring and credentials of its own."""
    place = f"sqlite:///{tmp_path}/keys.db"
    with Server(reset) as other, Server() as ours:
        with suppress(RetriesExhausted):
            Httpx(Retry(attempts=1, budget=None), place).request(
                "POST", other.url, b"x", {"Content-Type": "text/plain"}
            )
        [refused] = await resume(place, f"{ours.url}/")
        assert isinstance(refused.error, CredentialsMissing)
        assert len(other.visits) == 1
        [done] = await resume(place, f"{other.url}/")
        assert done.error is None
        assert other.visits[-1].headers["authorization"] == "Bearer secret"
