"""The options of the ASGI middleware: principals, kept headers, redaction, rules on endpoints, the current operation."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import fastapi
import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from oncemore import Guard, Outcome
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.events import Event
from oncemore.errors import ConfigurationError
from oncemore.web import wsgi
from oncemore.web.asgi import IdempotencyMiddleware, current_operation, idempotent

from .wire import Counted, Wire


@pytest.fixture
def guard() -> Guard:
    return Guard("memory://")


# Who is calling


class ByName(AuthenticationBackend):
    """Believes any name in a header."""

    async def authenticate(self, conn: Any) -> Any:
        name = conn.headers.get("x-user")
        return (AuthCredentials(["authenticated"]), SimpleUser(name)) if name else None


async def test_the_authenticated_user_is_the_principal(guard: Guard) -> None:
    """The credentials do not count, so a retry with a renewed token has the same principal."""
    app = Counted()
    door = AuthenticationMiddleware(IdempotencyMiddleware(app, guard=guard), backend=ByName())

    async def said(user: str, token: str) -> str | None:
        return (await Wire(headers=[("x-user", user), ("authorization", token)]).through(door)).said

    assert [await said("alice", "a"), await said("alice", "b"), await said("bob", "a")] == [
        "stored",
        "replayed",
        "stored",
    ]


async def test_without_a_user_the_credentials_are_the_principal(guard: Guard) -> None:
    door = IdempotencyMiddleware(Counted(), guard=guard)

    async def said(**headers: str) -> str | None:
        wire = Wire(headers=[(name.replace("_", "-"), value) for name, value in headers.items()])
        wire.scope["headers"] = [(name, value) for name, value in wire.scope["headers"] if value != b"Bearer alice"]
        return (await wire.through(door)).said

    assert await said(authorization="Bearer a") == "stored"
    assert await said(authorization="Bearer a", cookie="session=1") == "replayed"
    assert await said(authorization="Bearer b") == "stored"
    assert await said(x_api_key="Bearer a") == "stored"
    assert await said() == "stored"
    assert await said(cookie="session=2") == "replayed"


async def test_the_principal_function_is_asked_with_the_scope(guard: Guard) -> None:
    door = IdempotencyMiddleware(Counted(), guard=guard, principal=lambda scope: scope["who"])
    assert (await Wire(who="alice").through(door)).said == "stored"
    assert (await Wire(who="alice", headers=[("authorization", "else")]).through(door)).said == "replayed"
    assert (await Wire(who="bob").through(door)).said == "stored"


async def test_async_principal_is_awaited_for_requests_and_lookups(guard: Guard) -> None:
    async def who(scope: Any) -> str:
        await asyncio.sleep(0)
        return str(scope["who"])

    door = IdempotencyMiddleware(Counted(), guard=guard, principal=who, tenant=who)
    assert [(await Wire(who=name).through(door)).said for name in ("alice", "bob", "alice")] == [
        "stored",
        "stored",
        "replayed",
    ]
    lookup = "/idempotency?operation=POST /things&key=k"
    found = [await Wire(lookup, method="GET", who=name).through(door) for name in ("alice", "carol")]
    assert [wire.status for wire in found] == [200, 404]


def test_async_principal_is_refused_by_wsgi_at_start(guard: Guard) -> None:
    with pytest.raises(ConfigurationError, match="principal is async, and this middleware cannot await it"):
        wsgi.IdempotencyMiddleware(lambda environ, start: [], guard=guard, principal=failing_coroutine_function)


async def test_credentials_as_principal_are_warned_of_once(guard: Guard, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):  # each middleware warns of its own callers
        caplog.clear()
        door = IdempotencyMiddleware(Counted(), guard=guard)
        for key in ("a", "b"):
            await Wire(key=key).through(door)
        assert [record.levelname for record in caplog.records if "No principal function" in record.message] == [
            "WARNING"
        ]


async def failing_coroutine_function(scope: Any) -> str:
    raise LookupError


@pytest.mark.parametrize(
    ("principal", "status"),
    [
        (lambda scope: scope["nobody"], 500),
        (failing_coroutine_function, 500),
        (lambda scope: object(), 500),
        (lambda scope: None, 401),
        (lambda scope: "", 401),
    ],
)
async def test_nothing_runs_if_the_principal_is_not_known(guard: Guard, principal: Any, status: int) -> None:
    """Nothing runs either if the text of the principal changes between requests."""
    app = Counted()
    wire = await Wire().through(IdempotencyMiddleware(app, guard=guard, principal=principal))
    assert (wire.status, app.runs) == (status, 0)


async def test_two_tenants_may_use_the_same_key_and_user(guard: Guard) -> None:
    door = IdempotencyMiddleware(
        Counted(), guard=guard, principal=lambda scope: "alice", tenant=lambda scope: scope["tenant"]
    )
    said = [(await Wire(tenant=tenant).through(door)).said for tenant in ("one", "two", "one")]
    assert said == ["stored", "stored", "replayed"]


def test_contract_without_principals_warns(guard: Guard) -> None:
    with pytest.warns(UserWarning, match="no principal"):
        IdempotencyMiddleware(Counted(), guard=guard, contract=Contract(Rule("POST /things", scope="global")))


# What is kept


async def headers_app(scope: Any, receive: Any, send: Any) -> None:
    headers = [(b"content-length", b"13"), (b"x-trace", b"1"), (b"Content-Type", b"application/json")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b'{"iban":"CZ"}'})


async def test_headers_to_be_kept_can_be_listed(guard: Guard) -> None:
    door = IdempotencyMiddleware(headers_app, guard=guard, keep_headers=["Content-Type"])
    first, second = await Wire().through(door), await Wire().through(door)
    assert ("x-trace" in first.headers, "x-trace" in second.headers) == (True, False)
    assert second.headers["content-type"] == "application/json"


async def test_redacted_outcome_is_stored(guard: Guard) -> None:
    def redact(outcome: Outcome) -> Outcome:
        return msgspec.structs.replace(outcome, body=outcome.body.replace(b"CZ", b"**"))

    door = IdempotencyMiddleware(headers_app, guard=guard, redact=redact)
    first, second = await Wire().through(door), await Wire().through(door)
    assert (first.body, second.body) == (b'{"iban":"CZ"}', b'{"iban":"**"}')


async def test_failing_redaction_keeps_only_the_tombstone(guard: Guard) -> None:
    def redact(outcome: Outcome) -> Outcome:
        raise ValueError("not JSON")

    door = IdempotencyMiddleware(headers_app, guard=guard, redact=redact)
    first, second = await Wire().through(door), await Wire().through(door)
    assert (first.status, first.said, second.status) == (200, "unstored", 409)


@pytest.mark.parametrize("store", ["memory://", "sqlite:///{}/once.db"])
async def test_redaction_that_returns_a_text_body_is_reported(
    tmp_path: Path, store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`json.dumps` returns such a text, which cannot be stored as a body."""

    def redact(outcome: Outcome) -> Outcome:
        return msgspec.structs.replace(outcome, body="{}")

    with closing(Guard(store.format(tmp_path))) as guard:
        door = IdempotencyMiddleware(headers_app, guard=guard, redact=redact)
        first, second = await Wire().through(door), await Wire().through(door)
    assert (first.status, first.said, second.status) == (200, "unstored", 409)
    assert "Expected `bytes`, got `str`" in caplog.text


async def test_a_rotated_secret_still_knows_its_requests(guard: Guard) -> None:
    old, new = b"o" * 16, b"n" * 16
    app = Counted()
    for secrets, expected in (([old], "stored"), ([new, old], "replayed"), ([old, new], "replayed")):
        door = IdempotencyMiddleware(app, guard=guard, secrets=secrets)
        assert (await Wire().through(door)).said == expected
    refused = await Wire().through(IdempotencyMiddleware(app, guard=guard, secrets=[new]))
    assert (refused.status, app.runs) == (409, 1)


async def test_unreadable_record_is_answered_with_an_error(tmp_path: Path) -> None:
    """The effect has happened, and its outcome is lost; a new process does not perform again."""
    path = tmp_path / "once.db"
    app = Counted()
    guard = Guard(f"sqlite:///{path}")
    await Wire().through(IdempotencyMiddleware(app, guard=guard))
    await guard.aclose()
    with sqlite3.connect(path) as connection:
        assert connection.execute("UPDATE oncemore_records SET outcome = x'c1c1'").rowcount == 1
    events = list[Event]()
    guard = Guard(f"sqlite:///{path}", observers=[events.append])
    wire = await Wire().through(IdempotencyMiddleware(app, guard=guard))
    assert (wire.status, json.loads(wire.body)["error_code"]) == (409, "CONFLICT.idempotency.outcome_not_kept")
    assert [event.code for event in events if event.kind == "failed"] == ["TRANSIENT.idempotency.record_corrupt"]
    assert app.runs == 1
    await guard.aclose()


async def test_status_path_and_problem_base_can_be_set(guard: Guard) -> None:
    door = IdempotencyMiddleware(
        Counted(), guard=guard, status_path="/api/status", problem_base="https://docs.example/errors/"
    )
    wire = await Wire("/api/status", method="GET").through(door)
    assert wire.status == 400
    assert json.loads(wire.body)["type"] == "https://docs.example/errors/VALIDATION.idempotency.key_invalid"
    assert (await Wire("/idempotency", method="GET").through(door)).body == b"done"


async def test_status_url_without_a_rule_names_method_and_path(guard: Guard) -> None:
    door = IdempotencyMiddleware(Counted(), guard=guard, contract=Contract(Rule("POST /known", name="known")))
    for path, operation in [("/things/7", "POST /things/7"), ("/known", "known")]:
        await Wire(path, key="k1").through(door)
        query = urlencode({"operation": f"POST {path}", "key": "k1"})
        wire = await Wire(f"/idempotency?{query}", method="GET").through(door)
        assert json.loads(wire.body)["operation"] == operation


async def test_status_lookup_by_a_name_of_many_paths_is_refused(guard: Guard) -> None:
    """The message "No operation with this key is known" would make its caller perform again under a new key."""
    contract = Contract(
        Rule("POST /accounts/{id}", name="accounts.close"),
        Rule("POST /shared/{id}", name="shared", across_routes="conflict"),
        Rule("POST /named/{id}", name="named", key="template:{principal}:{path.id}"),
    )
    door = IdempotencyMiddleware(Counted(), guard=guard, contract=contract, principal=lambda scope: "alice")

    async def found(operation: str, key: str = "k") -> int:
        query = urlencode({"operation": operation, "key": key})
        return (await Wire(f"/idempotency?{query}", method="GET").through(door)).status

    for path in ("/accounts/7", "/shared/7", "/named/7"):
        assert (await Wire(path).through(door)).said == "stored"
    assert [await found("accounts.close"), await found("POST /accounts/7")] == [400, 200]
    assert [await found("acounts.close"), await found("POST /accounts/8")] == [400, 404]
    assert [await found("shared"), await found("POST /shared/8")] == [200, 200]
    assert await found("named", "user%3Aalice:7") == 200


# Where rules come from


async def test_contract_together_with_a_profile_is_refused(guard: Guard) -> None:
    with pytest.raises(ConfigurationError, match="profile"):
        IdempotencyMiddleware(Counted(), guard=guard, contract=Contract(), profile="ietf")


@pytest.mark.parametrize(("undeclared", "status"), [("refuse", 404), ("warn", 201), ("pass", 201)])
async def test_undeclared_request_follows_the_contracts_setting(
    guard: Guard, undeclared: Any, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    app = Counted()
    door = IdempotencyMiddleware(app, guard=guard, contract=Contract(Rule("POST /known"), undeclared=undeclared))
    with caplog.at_level(logging.WARNING, "oncemore.web"):
        wire = await Wire("/unknown").through(door)
    assert (wire.status, app.runs) == (status, 0 if status == 404 else 1)
    assert ("matches POST /unknown" in caplog.text) == (undeclared == "warn")
    assert wire.said == ("stored" if undeclared == "warn" else None)


async def test_rules_are_found_on_starlettes_endpoints(guard: Guard) -> None:
    @idempotent(key="required", ttl="1h")
    async def pay(request: Request) -> JSONResponse:
        return JSONResponse({"id": request.path_params["id"]})

    routes = [Mount("/v1", routes=[Route("/payments/{id:int}", pay, methods=["POST", "GET"])])]
    app = Starlette(routes=routes, middleware=[Middleware(IdempotencyMiddleware, guard=guard)])
    assert (await Wire("/v1/payments/1", key=None).through(app)).status == 400
    first, second = [await Wire("/v1/payments/1").through(app) for _ in range(2)]
    assert (first.said, second.said, second.body) == ("stored", "replayed", b'{"id":1}')
    assert (await Wire("/v1/payments/2").through(app)).said == "stored"
    assert (await Wire("/v1/payments/1", method="GET", key=None).through(app)).said is None


async def test_rules_are_found_on_included_and_mounted_fastapi_endpoints(guard: Guard) -> None:
    app, router = fastapi.FastAPI(), fastapi.APIRouter()
    app.add_middleware(IdempotencyMiddleware, guard=guard)

    @router.post("/refunds", status_code=201)
    @idempotent(key="required")
    def refund() -> dict[str, Any]:
        op = current_operation()
        return {"key": op.key, "attempt": op.attempt, "provider_key": op.derive("refund")}

    app.include_router(router, prefix="/v1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        assert (await client.post("/v1/refunds")).status_code == 400
        named = {"Idempotency-Key": "k", "Authorization": "a"}
        first, second = [await client.post("/v1/refunds", headers=named) for _ in range(2)]
    assert (first.status_code, second.headers["idempotency-status"]) == (201, "replayed")
    assert first.json()["key"] == "k"
    assert first.json()["provider_key"].startswith("om_")


async def test_current_operation_raises_outside_an_operation(guard: Guard) -> None:
    class Asks(Counted):
        async def work(self, receive: Any) -> None:
            current_operation()

    door = IdempotencyMiddleware(Asks(), guard=guard)
    await Wire().through(door)
    with pytest.raises(ConfigurationError, match="not guarded"):
        await Wire(key=None).through(door)
