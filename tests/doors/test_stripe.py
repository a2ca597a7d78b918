"""The profile `stripe`, asked by stripe-python itself: its retries, its errors, its connected accounts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import stripe
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from oncemore import Contract, Guard, Rule
from oncemore.web.asgi import IdempotencyMiddleware

from .live import keyed, live


class Shop:
    """Makes a refund for each request that reaches it; waits for the gate if the reason is `slow`."""

    def __init__(self) -> None:
        self.made: list[bytes] = []
        self.begun, self.gate = threading.Event(), threading.Event()

    def refund(self, request: Request) -> JSONResponse:
        body = request.scope["body"]
        self.made.append(body)
        if b"slow" in body:
            self.begun.set()
            assert self.gate.wait(20)
        return JSONResponse({"id": f"re_{len(self.made)}", "object": "refund"})

    async def view(self, request: Request) -> JSONResponse:
        request.scope["body"] = await request.body()
        return await asyncio.to_thread(self.refund, request)


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def url(shop: Shop) -> Iterator[str]:
    app = Starlette(routes=[Route("/v1/refunds", shop.view, methods=["POST"])])
    contract = Contract(Rule("POST /v1/refunds"), profile="stripe")
    app.add_middleware(IdempotencyMiddleware, guard=Guard("memory://"), contract=contract)
    with live(app) as client:
        yield str(client.base_url).rstrip("/")


def sdk(url: str, retries: int = 0) -> stripe.StripeClient:
    return stripe.StripeClient("sk_test_1", base_addresses={"api": url}, max_network_retries=retries)


def refund(client: stripe.StripeClient, key: str, account: str = "", **params: Any) -> Any:
    options: Any = {"idempotency_key": key, **({"stripe_account": account} if account else {})}
    return client.v1.refunds.create({"charge": "ch_1", **params}, options)


def test_stripe_sdk_repeated_refund_is_replayed(url: str, shop: Shop) -> None:
    client = sdk(url)
    first, again = refund(client, "k"), refund(client, "k")
    assert (first.id, again.id, len(shop.made)) == ("re_1", "re_1", 1)
    headers = again.last_response.headers
    assert (headers["idempotent-replayed"], "idempotency-expires" in headers) == ("true", False)
    assert "idempotency-expires" not in first.last_response.headers


def test_stripe_sdk_other_parameters_raise_idempotency_error(url: str, shop: Shop) -> None:
    client = sdk(url)
    refund(client, "k", amount=100)
    with pytest.raises(stripe.IdempotencyError) as caught:
        refund(client, "k", amount=200)
    assert (caught.value.http_status, len(shop.made)) == (400, 1)
    assert "different request" in str(caught.value.user_message)


def test_stripe_sdk_malformed_key_raises_invalid_request_error(url: str, shop: Shop) -> None:
    with pytest.raises(stripe.InvalidRequestError) as caught:
        refund(sdk(url), "k" * 256)
    assert (caught.value.code, shop.made) == ("VALIDATION.idempotency.key_invalid", [])


def test_stripe_sdk_retries_the_409_of_a_running_request(url: str, shop: Shop) -> None:
    results: list[Any] = []
    first = threading.Thread(target=lambda: results.append(refund(sdk(url), "k", reason="slow")))
    first.start()
    assert shop.begun.wait(20)
    with pytest.raises(stripe.StripeError) as caught:
        refund(sdk(url), "k", reason="slow")
    assert (caught.value.http_status, caught.value.json_body["error"]["type"]) == (409, "idempotency_error")
    threading.Timer(0.2, shop.gate.set).start()
    assert refund(sdk(url, retries=10), "k", reason="slow").id == "re_1"
    first.join()
    assert ([each.id for each in results], len(shop.made)) == (["re_1"], 1)


def test_stripe_form_members_in_another_order_are_replayed(url: str, shop: Shop) -> None:
    headers = keyed("k", Authorization="Bearer sk_test_1") | {"Content-Type": "application/x-www-form-urlencoded"}
    bodies = ["charge=ch_1&expand[]=a&expand[]=b&amount=5", "amount=5&expand[]=a&expand%5B%5D=b&charge=ch_1"]
    answers = [httpx.post(f"{url}/v1/refunds", content=body, headers=headers) for body in bodies]
    assert [answer.json()["id"] for answer in answers] == ["re_1", "re_1"]
    swapped = httpx.post(f"{url}/v1/refunds", content="charge=ch_1&expand[]=b&expand[]=a&amount=5", headers=headers)
    assert (swapped.status_code, len(shop.made)) == (400, 1)


def test_stripe_account_is_part_of_the_scope(url: str, shop: Shop) -> None:
    client = sdk(url)
    made = [refund(client, "k", account).id for account in ("", "acct_1", "acct_2", "acct_1", "")]
    assert made == ["re_1", "re_2", "re_3", "re_2", "re_1"]


def test_problem_function_replaces_error_bodies() -> None:
    """It works on any middleware, for any error; if the function fails, the problem document is sent."""
    guard, contract = Guard("memory://"), Contract(Rule("POST /x", key="required"))
    app = Starlette(routes=[Route("/x", lambda request: JSONResponse({}), methods=["POST"])])

    def body(problem: dict[str, Any]) -> dict[str, Any]:
        return {"error": problem["title"], "code": problem["status"]}

    for function, expected in ((body, "application/json"), (lambda problem: 1 / 0, "application/problem+json")):
        door = IdempotencyMiddleware(app, guard=guard, contract=contract, problem=function)
        with live(door) as client:
            refused = client.post("/x")
        assert (refused.status_code, refused.headers["content-type"]) == (400, expected)
    with live(IdempotencyMiddleware(app, guard=guard, contract=contract, problem=body)) as client:
        assert client.post("/x").json() == {"error": "An idempotency key is required", "code": 400}
