"""FastAPI: rules on endpoints wherever they are included or mounted, the operation as a dependency, and the document."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.routing import Mount

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore.web import asgi
from oncemore.web.fastapi import IdempotencyMiddleware, Op, current_operation, document, idempotent
from oncemore.web.openapi import resolved

from .live import keyed, live

Current = Annotated[Op, Depends(current_operation)]


class Refund(BaseModel):
    charge: str
    amount: int


@pytest.fixture
def guard() -> Iterator[Guard]:
    with closing(Guard("memory://")) as guard:
        yield guard


@pytest.fixture
def made() -> list[str]:
    return []


@pytest.fixture
def router(made: list[str]) -> APIRouter:
    """Two guarded endpoints, one async and one sync, and a third without a rule."""
    router = APIRouter(prefix="/refunds")

    @router.post("", status_code=201)
    @idempotent(key="required", ttl="30d", name="refunds.create", retry="user_facing")
    async def create(refund: Refund, op: Current) -> dict[str, Any]:
        made.append(op.key)
        return {"id": len(made), "key": op.key, "attempt": op.attempt, "provider": op.derive("charge")}

    @router.delete("/{id}")
    @idempotent(key="required")
    def void(id: int, op: Current) -> dict[str, Any]:
        made.append(op.key)
        return {"voided": id, "key": op.key}

    @router.post("/search")
    async def search() -> list[int]:
        made.append("search")
        return made.count("search") * [0]

    return router


@pytest.fixture
def app(guard: Guard, router: APIRouter) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, guard=guard)
    app.include_router(router)
    return app


REFUND = {"charge": "ch_9", "amount": 1000}


def titled(plain: Callable[[], dict[str, Any]], title: str) -> dict[str, Any]:
    return {**plain(), "info": {"title": title, "version": "1"}}


def document_at(client: httpx.Client, path: str = "/openapi.json") -> dict[str, Any]:
    found: dict[str, Any] = client.get(path).json()
    OpenAPIV31SpecValidator(found).validate()
    return found


class TestEndpoints:
    def test_a_rule_on_an_endpoint_is_enforced(self, app: FastAPI, made: list[str]) -> None:
        with live(app) as client:
            missing = client.post("/refunds", json=REFUND)
            first, second = (client.post("/refunds", json=REFUND, headers=keyed("k1")) for _ in range(2))
        assert (missing.status_code, missing.json()["error_code"]) == (400, "VALIDATION.idempotency.key_missing")
        assert (first.status_code, second.status_code, made) == (201, 201, ["k1"])
        assert first.content == second.content
        assert [each.headers["idempotency-status"] for each in (first, second)] == ["stored", "replayed"]

    def test_the_operation_is_a_dependency(self, app: FastAPI) -> None:
        with live(app) as client:
            found = client.post("/refunds", json=REFUND, headers=keyed("k1")).json()
            sync = client.delete("/refunds/7", headers=keyed("k1"))
        assert (found["key"], found["attempt"]) == ("k1", 1)
        assert found["provider"].startswith("om_")
        assert sync.json() == {"voided": 7, "key": "k1"}

    def test_a_validation_error_is_an_outcome_like_any_other(self, app: FastAPI, made: list[str]) -> None:
        """A deterministic 4xx is final."""
        with live(app) as client:
            found = [client.post("/refunds", json={"charge": 1}, headers=keyed("k1")) for _ in range(2)]
        assert [each.status_code for each in found] == [422, 422]
        assert found[1].headers["idempotency-status"] == "replayed"
        assert made == []

    def test_dependency_without_an_operation_raises(self, guard: Guard) -> None:
        app = FastAPI()
        app.add_middleware(IdempotencyMiddleware, guard=guard)

        @app.post("/open")
        async def open_(op: Current) -> str:
            return op.key

        with live(app) as client:
            assert client.post("/open", headers=keyed("k1")).json() == "k1"
            assert client.post("/open").status_code == 500

    def test_same_key_on_another_path_is_another_operation(self, app: FastAPI, made: list[str]) -> None:
        with live(app) as client:
            found = [client.delete(f"/refunds/{id}", headers=keyed("k1")).json()["voided"] for id in (1, 2, 1)]
        assert (found, made) == ([1, 2, 1], ["k1", "k1"])

    def test_a_middleware_between_changes_nothing(self, guard: Guard, router: APIRouter, made: list[str]) -> None:
        app = FastAPI()
        app.include_router(router)

        @app.middleware("http")
        async def pass_on(request: Any, call_next: Any) -> Any:
            return await call_next(request)

        app.add_middleware(IdempotencyMiddleware, guard=guard)
        with live(app) as client:
            found = [client.post("/refunds", json=REFUND, headers=keyed("k1")) for _ in range(2)]
        assert ([each.json()["key"] for each in found], made) == (["k1", "k1"], ["k1"])


def mounted_inside(guard: Guard, router: APIRouter) -> Any:
    """The middleware is on the outer app, the endpoints in a mounted one."""
    inner, outer = FastAPI(), FastAPI()
    inner.include_router(router)
    outer.mount("/v1", inner)
    outer.add_middleware(IdempotencyMiddleware, guard=guard)
    return outer


def mounted_outside(guard: Guard, router: APIRouter) -> Any:
    """The middleware is on the mounted app."""
    inner, outer = FastAPI(), FastAPI()
    inner.include_router(router)
    inner.add_middleware(IdempotencyMiddleware, guard=guard)
    outer.mount("/v1", inner)
    return outer


def included_twice(guard: Guard, router: APIRouter) -> Any:
    """A router in a router, each with a prefix."""
    app, outer = FastAPI(), APIRouter()
    outer.include_router(router, prefix="")
    app.include_router(outer, prefix="/v1")
    app.add_middleware(IdempotencyMiddleware, guard=guard)
    return app


def wrapped(guard: Guard, router: APIRouter) -> Any:
    """The middleware is around the app, instead of in it."""
    app = FastAPI()
    app.include_router(router, prefix="/v1")
    return IdempotencyMiddleware(app, guard=guard)


def below_starlette(guard: Guard, router: APIRouter) -> Any:
    """FastAPI in a Starlette app; the middleware is around that."""
    inner = FastAPI()
    inner.include_router(router)
    return asgi.IdempotencyMiddleware(Starlette(routes=[Mount("/v1", inner)]), guard=guard)


EVERYWHERE = [mounted_inside, mounted_outside, included_twice, wrapped, below_starlette]


class TestWhereverItIs:
    @pytest.mark.parametrize("build", EVERYWHERE)
    def test_the_rule_holds(self, build: Any, guard: Guard, router: APIRouter, made: list[str]) -> None:
        with live(build(guard, router)) as client:
            missing = client.post("/v1/refunds", json=REFUND)
            found = [client.post("/v1/refunds", json=REFUND, headers=keyed("k1")) for _ in range(2)]
            voided = [client.delete(f"/v1/refunds/{id}", headers=keyed("k1")).json()["voided"] for id in (1, 2, 1)]
        assert missing.status_code == 400
        assert [each.headers["idempotency-status"] for each in found] == ["stored", "replayed"]
        assert (voided, made) == ([1, 2, 1], ["k1"] * 3)

    @pytest.mark.parametrize("build", EVERYWHERE)
    def test_document_shows_the_rule(self, build: Any, guard: Guard, router: APIRouter) -> None:
        inner = build in (mounted_inside, mounted_outside, below_starlette)
        with live(build(guard, router)) as client:
            found = document_at(client, "/v1/openapi.json" if inner else "/openapi.json")
        operation = found["paths"]["/refunds" if inner else "/v1/refunds"]["post"]
        assert operation["x-idempotency"]["name"] == "refunds.create"
        (key,) = operation["parameters"]
        assert (key["name"], key["required"]) == ("Idempotency-Key", True)

    def test_behind_a_proxy_that_takes_a_prefix_away(self, app: FastAPI, made: list[str]) -> None:
        """The server knows the prefix (root_path), so rules need not name it."""
        with live(app, root_path="/api") as client:
            missing = client.post("/refunds", json=REFUND)
            found = [client.post("/refunds", json=REFUND, headers=keyed("k1")) for _ in range(2)]
            lookup = client.get("/idempotency", params={"operation": "refunds.create", "key": "k1"})
        assert (missing.status_code, made) == (400, ["k1"])
        assert found[1].headers["idempotency-status"] == "replayed"
        assert lookup.json()["state"] == "settled"

    def test_the_status_url_has_the_prefix(self, guard: Guard) -> None:
        begun, let_go = threading.Event(), threading.Event()
        app = FastAPI()
        app.add_middleware(IdempotencyMiddleware, guard=guard)

        @app.post("/refunds")
        @idempotent(key="required", in_flight="accepted")
        def create() -> str:
            begun.set()
            let_go.wait(20)
            return "created"

        with live(app, root_path="/api") as client, ThreadPoolExecutor(1) as threads:
            first = threads.submit(client.post, "/refunds", json=REFUND, headers=keyed("k1"))
            assert begun.wait(20)
            accepted = client.post("/refunds", json=REFUND, headers=keyed("k1"))
            let_go.set()
            assert first.result().status_code == 200
            location = accepted.headers["location"]
            assert (accepted.status_code, location.partition("?")[0]) == (202, "/api/idempotency")
            # as the proxy passes it on
            assert client.get(location.removeprefix("/api")).json()["state"] == "settled"


class TestDocument:
    def test_middleware_enriches_the_document(self, app: FastAPI) -> None:
        with live(app) as client:
            found = document_at(client)
        operation = found["paths"]["/refunds"]["post"]
        assert operation["x-idempotency"]["ttl"] == 2592000
        assert operation["x-retry"] == {"preset": "user_facing"}
        assert "Idempotency-Status" in operation["responses"]["201"]["headers"]
        assert "/idempotency" in found["paths"]
        assert found["paths"]["/refunds/search"]["post"]["parameters"][0]["required"] is False

    def test_plain_asgi_middleware_enriches_the_document(self, guard: Guard, router: APIRouter) -> None:
        app = FastAPI()
        app.add_middleware(asgi.IdempotencyMiddleware, guard=guard, status_path="/status", problem_base="https://x/")
        app.include_router(router)
        with live(app) as client:
            found = document_at(client)
        assert "/status" in found["paths"]
        assert "https://x/VALIDATION.payload" in repr(found["components"]["responses"]["Idempotency400"])

    def test_document_function_works_without_a_server(self, router: APIRouter) -> None:
        app = FastAPI()
        app.include_router(router)
        document(app, Contract())
        OpenAPIV31SpecValidator(app.openapi()).validate()
        assert app.openapi()["paths"]["/refunds"]["post"]["x-idempotency"]["name"] == "refunds.create"

    def test_document_shows_what_was_added_since(self, router: APIRouter) -> None:
        app, contract = FastAPI(), Contract(undeclared="pass")
        document(app, contract)
        document(app, contract)
        assert "refunds.create" not in repr(app.openapi())
        app.include_router(router)
        app.openapi_schema = None  # newer FastAPIs notice the new routes by themselves
        with_routes = app.openapi()
        assert "refunds.create" in repr(with_routes)
        assert app.openapi() == with_routes
        contract.add(Rule("POST /refunds/search", name="searched"))
        assert "searched" in repr(app.openapi())
        assert "searched" not in repr(with_routes)

    def test_document_is_made_once_for_many_requests(self, app: FastAPI) -> None:
        document(app, Contract())
        assert app.openapi() is app.openapi()

    def test_apps_own_function_for_its_document_is_called(self, router: APIRouter) -> None:
        app = FastAPI()
        app.include_router(router)
        plain = app.openapi
        app.openapi = partial(titled, plain, "Shop")  # type: ignore[method-assign]
        document(app, Contract())
        document(app, Contract())
        assert app.openapi()["info"]["title"] == "Shop"
        assert "refunds.create" in repr(app.openapi())

    def test_responses_match_the_document(self, app: FastAPI) -> None:
        """Each answer has a documented status, and is valid by its schema."""
        other = {"charge": "ch_9", "amount": 1}
        with live(app) as client:
            found = document_at(client)
            answers = [
                client.post("/refunds", json=REFUND),
                client.post("/refunds", json=REFUND, headers=keyed("k" * 256)),
                client.post("/refunds", json=REFUND, headers=keyed("k1")),
                client.post("/refunds", json=REFUND, headers=keyed("k1")),
                client.post("/refunds", json=other, headers=keyed("k1")),
                client.post("/refunds", json={}, headers=keyed("k2")),
                client.post("/refunds", content=b" " * (10 * 1024 * 1024 + 1), headers=keyed("k3")),
            ]
        assert [each.status_code for each in answers] == [400, 400, 201, 201, 409, 422, 413]
        for answer in answers:
            told = resolved(found, found["paths"]["/refunds"]["post"]["responses"][str(answer.status_code)])
            assert told is not None
            schema = told["content"][answer.headers["content-type"]]["schema"]
            Draft202012Validator({**schema, "components": found["components"]}).validate(answer.json())
            ours = {name for name in answer.headers if name.startswith("idempotency-")}
            assert ours <= {name.lower() for name in told.get("headers", {})}


def test_function_scoped_dependency_commits_before_the_settle() -> None:
    """If its commit fails, the effect has not happened, and the operation may be tried again."""
    seen: list[str] = []
    guard = Guard("memory://", observers=[lambda event: seen.append(event.kind)])
    app = FastAPI()
    app.add_middleware(IdempotencyMiddleware, guard=guard)

    def session() -> Iterator[None]:
        yield
        seen.append("commit")
        if seen.count("commit") == 1:
            raise RuntimeError("The database has gone")

    @app.post("/refunds", dependencies=[Depends(session, scope="function")])
    def refund() -> str:
        return "done"

    with live(app) as client:
        asked = {**keyed("k"), "Connection": "close"}
        assert [client.post("/refunds", headers=asked).status_code for _ in range(2)] == [500, 200]
    assert seen == ["claimed", "commit", "released", "claimed", "commit", "settled"]
