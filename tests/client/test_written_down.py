"""Operations through a transport with a keyring: written down first, then settled, left open, or never sent."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from oncemore.client.deadlines import no_sleeping
from oncemore.client.errors import CredentialsMissing, KeyReused, OutcomeUnknown, RetriesExhausted
from oncemore.client.httpx import AsyncRetryTransport, RetryTransport
from oncemore.client.keyring.entry import CREDENTIALS
from oncemore.client.keyring.sqlite import SqliteKeyring
from oncemore.client.retry import Retry
from oncemore.errors import ConfigurationError
from oncemore.stores.sqlite import SqliteStore
from oncemore.web.request import CREDENTIALS as KNOWN_BY

from .clients import Httpx, Requests
from .server import Server, answer, effect, hang, performed, problem, reset, then

RETRY = Retry(base=0.005, cap=0.01, budget=None)
BODY = b'{"amount": 100}'
JSON = {"Content-Type": "application/json"}


def test_key_and_body_are_on_disk_before_first_byte(tmp_path: Path) -> None:
    seen = []

    def look(visit: Any) -> None:
        with sqlite3.connect(tmp_path / "keys.db") as database:
            seen.extend(database.execute("SELECT key, body, state FROM oncemore_keys").fetchall())

    with Server(then(look, performed())) as server:
        Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db").request("POST", server.url, BODY)
    assert seen == [(server.visits[0].key, BODY, "sending")]


def test_unknown_outcome_stays_open_and_can_be_resumed(library: Any, place: str) -> None:
    client = library(RETRY, place)
    with no_sleeping(), Server(*[then(effect, reset)] * 5) as server:
        with pytest.raises(RetriesExhausted) as caught:
            client.request("POST", server.url, BODY, JSON)
        assert [(one.key, one.state, one.body) for one in client.pending()] == [(caught.value.key, "open", BODY)]
        assert client.resume() == []  # its caller was told, and may have made another key since
        results = client.resume(opened=True)
        assert [result.error for result in results] == [None]
        assert client.pending() == []
    assert list(server.effects.values()) == [1]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_what_had_no_body_is_continued_as_it_was(library: Any, method: str, tmp_path: Path) -> None:
    client = library(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with no_sleeping(), Server(*[reset] * 5) as server:
        with pytest.raises(RetriesExhausted):
            client.request(method, f"{server.url}/orders?dry=no")
        assert [result.error for result in client.resume(opened=True)] == [None]
    sent = {
        (visit.method, visit.path, visit.body, visit.key, visit.headers.get("content-type")) for visit in server.visits
    }
    assert len(sent) == 1


def test_httpx_resume_does_not_add_client_parameters(tmp_path: Path) -> None:
    """The URL that was written down has them, or what the request said instead."""
    transport = RetryTransport(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with no_sleeping(), Server(*[reset] * 5) as server, httpx.Client(transport=transport, params={"v": "1"}) as client:
        with pytest.raises(RetriesExhausted):
            client.post(server.url, content=BODY, params={"v": "2"})
        assert [result.error for result in transport.resume(client, opened=True)] == [None]
    assert {visit.path for visit in server.visits} == {"/?v=2"}


def test_requests_resume_does_not_add_session_parameters(tmp_path: Path) -> None:
    client = Requests(RETRY, f"sqlite:///{tmp_path}/keys.db")
    client.session.params = {"v": "1"}
    with no_sleeping(), Server(*[reset] * 5) as server:
        with pytest.raises(RetriesExhausted):
            client.request("POST", server.url, BODY)
        assert [result.error for result in client.resume(opened=True)] == [None]
    assert {visit.path for visit in server.visits} == {"/?v=1"}


def test_an_operation_that_was_never_sent_is_not_remembered(tmp_path: Path) -> None:
    client = Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with no_sleeping(), pytest.raises(RetriesExhausted):
        client.request("POST", "http://127.0.0.1:9", BODY)
    assert client.pending() == []


def test_sent_entry_stays_open_if_resume_cannot_connect(tmp_path: Path) -> None:
    client = Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with Server(*[reset] * 5) as server, no_sleeping(), pytest.raises(RetriesExhausted):
        client.request("POST", server.url, BODY)
    with no_sleeping():
        results = client.resume(opened=True)
    assert isinstance(results[0].error, RetriesExhausted)
    assert [one.state for one in client.pending()] == ["open"]


@pytest.mark.parametrize("status", [201, 400, 404, 422])
def test_a_final_answer_settles(library: Any, status: int, tmp_path: Path) -> None:
    client = library(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with Server(answer(status)) as server:
        client.request("POST", server.url, BODY)
    assert client.pending() == []


def test_a_refusal_after_a_doubtful_attempt_settles_nothing(tmp_path: Path) -> None:
    """The token expired between the attempts; the first may have been performed."""
    client = Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with Server(then(effect, reset), answer(401)) as server:
        reply = client.request("POST", server.url, BODY)
    assert reply.status == 401
    assert reply.story.known == "unknown"
    assert [one.state for one in client.pending()] == ["open"]


def test_answer_of_unknown_outcome_leaves_entry_open(library: Any, tmp_path: Path) -> None:
    """The server's own worker died; it answers so until somebody has decided."""
    client = library(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with Server(problem(409, error_code="CONFLICT.idempotency.outcome_unknown", retryable=False)) as server:
        reply = client.request("POST", server.url, BODY)
        assert (reply.status, reply.story.known) == (409, "unknown")
        assert [one.state for one in client.pending()] == ["open"]
        assert [done.error for done in client.resume(opened=True)] == [None]
        assert client.pending() == []


def test_refusal_of_a_continued_operation_settles_nothing(library: Any, place: str) -> None:
    """Its first call may have had it performed; the second one's token has expired."""
    own = {"Idempotency-Key": "order-17"}
    client = library(RETRY, place)
    with no_sleeping(), Server(*[then(effect, reset)] * 5, answer(401)) as server:
        with pytest.raises(RetriesExhausted):
            client.request("POST", server.url, BODY, own)
        reply = client.request("POST", server.url, BODY, own)
        assert (reply.status, reply.story.known) == (401, "unknown")
        assert [one.state for one in client.pending()] == ["open"]
        assert [done.response is not None for done in client.resume(opened=True)] == [True]
        assert client.pending() == []
    assert list(server.effects.values()) == [1]


def test_refusal_of_a_settled_key_settles_it_again(place: str) -> None:
    client = Httpx(RETRY, place)
    with Server(default=answer(422)) as server:
        for _ in range(2):
            reply = client.request("POST", server.url, BODY, {"Idempotency-Key": "order-17"})
            assert reply.story.known == "refused"
            assert client.pending() == []


def test_past_the_servers_memory_it_says_unknown_and_sends_nothing(library: Any, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/keys.db"
    short = Retry(base=0.001, attempts=2, deadline=0.5, key_lifetime=1.0, budget=None)
    with Server(*[then(effect, reset)] * 2) as server:
        with pytest.raises(RetriesExhausted):
            library(short, url).request("POST", server.url, BODY, {"Idempotency-Key": "order-17"})
        sent = len(server.visits)
        time.sleep(0.6)
        with pytest.raises(OutcomeUnknown) as caught:
            library(short, url).request("POST", server.url, BODY, {"Idempotency-Key": "order-17"})
        results = library(short, url).resume(opened=True)
        assert isinstance(results[0].error, OutcomeUnknown)
    assert caught.value.key == "order-17"
    assert caught.value.story.known == "unknown"
    assert len(server.visits) == sent


def test_long_call_stops_before_key_lifetime_ends(library: Any) -> None:
    pace = {"attempts": 10, "deadline": 3600, "attempt_timeout": 60, "base": 60, "cap": 60, "jitter": "none"}
    patient = Retry(**pace, key_lifetime=300, budget=None)
    with no_sleeping(), Server(default=answer(503)) as server, pytest.raises(OutcomeUnknown):
        library(patient).request("POST", server.url, BODY)
    assert len(server.visits) == 4  # a fifth could have arrived after 300 s
    assert len({visit.key for visit in server.visits}) == 1


def test_key_reused_for_another_request_is_not_sent(library: Any, place: str) -> None:
    client = library(RETRY, place)
    own = {"Idempotency-Key": "order-17", **JSON}
    with Server() as server:
        client.request("POST", server.url, BODY, own)
        client.request("POST", server.url, b'{ "amount": 100.0 }', own)  # the same request, spelt differently
        with pytest.raises(KeyReused, match="order-17"):
            client.request("POST", server.url, b'{"amount": 101}', own)
    assert len(server.visits) == 2


def test_body_too_large_to_store_is_not_resumed(tmp_path: Path) -> None:
    client = Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with Server(then(effect, reset)) as server:
        with pytest.raises(RetriesExhausted):
            client.request("POST", server.url, iter([b"x" * 100_000] * 20))
        assert [one.body for one in client.pending()] == [None]
        results = client.resume(opened=True)
    assert isinstance(results[0].error, OutcomeUnknown)
    assert [one.state for one in client.pending()] == ["open"]
    client.transport.forget(client.pending()[0])
    assert client.pending() == []


async def test_a_cancelled_request_ends_at_once_and_stays_open(place: str) -> None:
    transport = AsyncRetryTransport(RETRY, place)
    with Server(then(effect, hang)) as server:
        async with httpx.AsyncClient(transport=transport, timeout=30) as client:
            task = asyncio.create_task(client.post(server.url, content=BODY))
            while not server.effects:
                await asyncio.sleep(0.01)
            begun = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - begun < 2
            assert [one.state for one in await transport.pending()] == ["open"]


def test_without_a_keyring_there_is_nothing_to_ask() -> None:
    with pytest.raises(ConfigurationError, match="no keyring"):
        RetryTransport(RETRY).pending()


def test_the_deadline_counts_the_claim_too(tmp_path: Path) -> None:
    """The file was locked for longer than the caller would wait."""

    class Slow(SqliteKeyring):
        def _claim(self, *arguments: Any) -> Any:
            time.sleep(0.3)
            return super()._claim(*arguments)

    client = Httpx(Retry(deadline=0.2, budget=None), Slow(str(tmp_path / "keys.db")))
    with Server() as server, pytest.raises(RetriesExhausted) as caught:
        client.request("POST", server.url, BODY)
    assert caught.value.story is not None
    assert caught.value.story.known == "not_performed"
    assert not server.visits
    assert client.pending() == []


def test_a_password_in_the_url_is_not_written_down(tmp_path: Path) -> None:
    client = Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db")
    with Server(default=reset) as server, no_sleeping(), pytest.raises(RetriesExhausted):
        client.request("POST", server.url.replace("://", "://me:hidden@"), BODY)
    assert [one.url for one in client.pending()] == [server.url]
    assert all(b"hidden" not in file.read_bytes() for file in tmp_path.iterdir())


async def test_cancel_in_later_attempt_leaves_entry_open(tmp_path: Path) -> None:
    """The first attempt found no connection; the second may have been received."""
    hanging = asyncio.Event()

    class Inner(httpx.AsyncBaseTransport):
        calls = 0

        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            self.calls += 1
            if self.calls == 1:
                raise httpx.ConnectError("refused")
            hanging.set()
            await asyncio.sleep(30)
            raise AssertionError

    transport = AsyncRetryTransport(RETRY, f"sqlite:///{tmp_path}/keys.db", transport=Inner())
    async with httpx.AsyncClient(transport=transport) as client:
        task = asyncio.create_task(client.post("http://x/", content=BODY))
        await hanging.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [one.state for one in await transport.pending()] == ["open"]


@pytest.mark.parametrize("ring", ["sqlite:///{0}/keys.db", "ledger"])
def test_what_had_credentials_is_not_resumed_without(library: Any, tmp_path: Path, ring: str) -> None:
    """To a server that knows callers by their credentials, the key would be a stranger's, and new."""
    store = SqliteStore(f"sqlite:///{tmp_path}/ledger.db")
    client = library(RETRY, store if ring == "ledger" else ring.format(tmp_path))
    with no_sleeping(), Server(*[then(effect, reset)] * 5) as server:
        with pytest.raises(RetriesExhausted):
            client.request("POST", server.url, BODY, {**JSON, "authorization": "Bearer hidden"})
        [pending] = client.pending()
        asked = len(server.visits)
        [refused] = client.resume(opened=True)
        assert isinstance(refused.error, CredentialsMissing)
        assert "Authorization" in refused.error.detail
        assert len(server.visits) == asked
        assert [one.key for one in client.pending()] == [pending.key]
        client.headers = {"Authorization": "Bearer hidden"}
        [done] = client.resume(opened=True)
        assert done.error is None
        assert server.visits[-1].headers["authorization"] == "Bearer hidden"
        assert client.pending() == []
    assert list(server.effects.values()) == [1]
    store.close()
    assert all(b"hidden" not in file.read_bytes() for file in tmp_path.iterdir())


def test_all_that_a_door_knows_callers_by_are_credentials() -> None:
    assert {name.lower() for name in CREDENTIALS} == KNOWN_BY


def test_credentials_that_are_to_be_remembered_are(tmp_path: Path) -> None:
    client = Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db", remember=["authorization"])
    with no_sleeping(), Server(*[then(effect, reset)] * 5) as server:
        with pytest.raises(RetriesExhausted):
            client.request("POST", server.url, BODY, {**JSON, "Authorization": "Bearer known"})
        [done] = client.resume(opened=True)
    assert done.error is None
    assert server.visits[-1].headers["authorization"] == "Bearer known"
