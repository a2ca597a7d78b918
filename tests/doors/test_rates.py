"""The rate of new keys per principal: above it, keys are refused; retries and replays are never counted."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule, idempotent
from oncemore.errors import ConfigurationError, MissingDriver, RateLimited
from oncemore.web.asgi import IdempotencyMiddleware
from oncemore.web.door import Door
from oncemore.web.rates import Admission, NewKeys

from .live import keyed, live

# So long that no test is cut in two by the window's end.
THREE = Rule("POST /pay/{id}", rate="3/300d")
NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def guard() -> Iterator[Guard]:
    with closing(Guard("memory://", cache=0)) as guard:
        yield guard


@contextmanager
def served(guard: Guard, rule: Rule = THREE, **options: Any) -> Iterator[tuple[httpx.Client, list[str]]]:
    paid: list[str] = []

    async def pay(request: Request) -> Response:
        paid.append(request.headers["idempotency-key"])
        return JSONResponse({"paid": len(paid)}, 503 if "fail" in paid[-1] and paid.count(paid[-1]) < 3 else 201)

    app = Starlette(routes=[Route("/pay/{id}", pay, methods=["POST"])])
    app.add_middleware(IdempotencyMiddleware, guard=guard, contract=Contract(rule), **options)
    with live(app) as client:
        yield client, paid


class TestOverHttp:
    def test_one_key_too_many_is_refused_and_nothing_is_done(self, guard: Guard) -> None:
        with served(guard) as (client, paid):
            statuses = [client.post("/pay/1", headers=keyed(f"k{n}")).status_code for n in range(3)]
            refused = client.post("/pay/1", headers=keyed("k3"))
        assert (statuses, paid) == ([201] * 3, ["k0", "k1", "k2"])
        assert (refused.status_code, refused.headers["content-type"]) == (429, "application/problem+json")
        assert (refused.json()["error_code"], refused.json()["retryable"]) == ("RATE_LIMIT.exceeded", True)
        assert int(refused.headers["retry-after"]) >= 1

    def test_principal_is_asked_once_for_each_request(self, guard: Guard) -> None:
        asked: list[str] = []

        async def who(scope: Any) -> str:
            asked.append(scope["path"])
            return "alice"

        with served(guard, principal=who) as (client, _):
            for path in ("/pay/1", "/pay/2"):
                assert client.post(path, headers=keyed("k")).status_code == 201
        assert asked == ["/pay/1", "/pay/2"]

    def test_a_replay_is_not_counted(self, guard: Guard) -> None:
        with served(guard) as (client, paid):
            found = [client.post("/pay/1", headers=keyed("same")).headers["idempotency-status"] for _ in range(6)]
            after = [client.post("/pay/1", headers=keyed(f"k{n}")).status_code for n in range(3)]
        assert found == ["stored", *["replayed"] * 5]
        assert (after, len(paid)) == ([201, 201, 429], 3)

    def test_retry_of_a_failure_is_not_counted(self, guard: Guard) -> None:
        with served(guard) as (client, _):
            retried = [client.post("/pay/1", headers=keyed("fail")).status_code for _ in range(3)]
            after = [client.post("/pay/1", headers=keyed(f"k{n}")).status_code for n in range(3)]
        assert (retried, after) == ([503, 503, 201], [201, 201, 429])

    def test_refused_key_is_still_new(self, guard: Guard) -> None:
        with served(guard, Rule("POST /pay/{id}", rate="1/300d")) as (client, paid):
            client.post("/pay/1", headers=keyed("first"))
            again = [client.post("/pay/1", headers=keyed("second")).status_code for _ in range(3)]
        assert (again, paid) == ([429] * 3, ["first"])

    def test_other_paths_of_the_rule_count_together_however_long(self, guard: Guard) -> None:
        with served(guard) as (client, _):
            paths = [f"/pay/{'9' * length}" for length in (1, 200, 400, 2000)]
            statuses = [client.post(path, headers=keyed(f"k{path[:9]}")).status_code for path in paths]
        assert statuses == [201, 201, 201, 429]

    def test_each_principal_has_its_own_rate(self, guard: Guard) -> None:
        with served(guard, Rule("POST /pay/{id}", rate="1/300d")) as (client, _):
            asked = [("k1", "alice"), ("k2", "alice"), ("k1", "bob"), ("k2", "bob")]
            found = [client.post("/pay/1", headers=keyed(key, Authorization=who)) for key, who in asked]
        assert [each.status_code for each in found] == [201, 429, 201, 429]

    def test_a_rule_on_an_endpoint_is_counted_too(self, guard: Guard) -> None:
        @idempotent(rate="1/300d")
        async def pay(request: Request) -> Response:
            return Response()

        app = Starlette(routes=[Route("/pay", pay, methods=["POST"])])
        app.add_middleware(IdempotencyMiddleware, guard=guard)
        with live(app) as client:
            assert [client.post("/pay", headers=keyed(key)).status_code for key in "ab"] == [200, 429]

    @pytest.mark.parametrize(("store_down", "status"), [("refuse", 503), ("run", 201)])
    def test_failing_rate_count_follows_store_down(self, guard: Guard, store_down: Any, status: int) -> None:
        rule = Rule("POST /pay/{id}", rate="3/300d", store_down=store_down)
        with served(guard, rule, rates=NewKeys(NOWHERE, socket_connect_timeout=1)) as (client, paid):
            found = client.post("/pay/1", headers=keyed("k"))
            again = client.post("/pay/1", headers=keyed("k"))
        assert (found.status_code, again.status_code) == (status, status)
        assert ("retry-after" in found.headers, len(paid)) == ((True, 0) if status == 503 else (False, 1))


class TestNewKeys:
    def test_retry_after_is_within_the_window(self) -> None:
        keys, rule = NewKeys(), Rule("POST /pay", rate="1/1h")
        keys.admit(rule, "alice")
        with pytest.raises(RateLimited) as refused:
            keys.admit(rule, "alice")
        assert refused.value.retry_after is not None
        assert 1 <= refused.value.retry_after <= 3600

    def test_a_rule_without_a_rate_is_not_counted(self) -> None:
        keys = NewKeys()
        for _ in range(10):
            keys.admit(Rule("POST /pay"), "alice")

    @pytest.mark.server
    async def test_processes_count_together_in_redis(self, valkey_url: str, redis_prefix: str) -> None:
        here, there = NewKeys(valkey_url), NewKeys(valkey_url)
        Admission(here, THREE, redis_prefix).run()
        await Admission(there, THREE, redis_prefix).arun()
        here.admit(THREE, redis_prefix)
        with pytest.raises(RateLimited):
            await Admission(there, THREE, redis_prefix).arun()

    @pytest.mark.parametrize("storage", ["nowhere://", "", "sqlite:///file", "async+memory://"])
    def test_unknown_storage_is_refused_at_start(self, storage: str) -> None:
        with pytest.raises(ConfigurationError, match="cannot count"):
            NewKeys(storage)

    def test_password_is_not_in_the_error(self) -> None:
        with pytest.raises(ConfigurationError) as refused:
            NewKeys("nowhere://user:secret@host")
        assert (
            "secret"
            not in "".join(traceback.format_exception(refused.value)).partition("NewKeys(")[2].partition("\n")[2]
        )
        assert "unknown storage scheme" in refused.value.detail


class TestStartUp:
    def test_missing_package_is_named_with_its_command(self, guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "limits", None)
        monkeypatch.setitem(sys.modules, "limits.errors", None)
        with pytest.raises(MissingDriver, match=r"pip install 'oncemore\[limits\]'"):
            Door(None, guard=guard, contract=Contract(THREE))
        assert Door(None, guard=guard, contract=Contract(Rule("POST /pay"))).rates is None

    def test_rule_found_after_the_start_is_counted(self, guard: Guard) -> None:
        door = Door(None, guard=guard)
        assert door.rates is None
        door.contract.add(THREE)
        door.rules_declared()
        assert isinstance(door.rates, NewKeys)

    def test_own_counter_replaces_the_default(self, guard: Guard) -> None:
        own = NewKeys()
        assert Door(None, guard=guard, contract=Contract(THREE), rates=own).rates is own
