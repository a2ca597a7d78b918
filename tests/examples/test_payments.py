"""The payments service beyond refunds: create and reverse, states, customers, webhooks, OpenAPI."""

from __future__ import annotations

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from openapi_spec_validator import validate

from examples.payments.app import CONTRACT
from examples.payments.processes import http
from oncemore import Contract
from oncemore.webhooks.signature import Signing, new_secret

from .conftest import Shop


def pay(shop: Shop, name: str, key: str | None = None, **changed: Any) -> httpx.Response:
    body = {"order_id": name, "customer_id": f"cus_{name}", "amount": 5000, **changed}
    return shop.post("/payments", key or name, body)


def code(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["status"] == answer.status_code
    assert {"type", "title", "detail", "retryable"} <= set(problem)
    found: str = problem["error_code"]
    return found


# Create and reverse


@pytest.mark.parametrize("action", ["capture", "void"])
def test_create_and_capture_repeat_without_effect(shop: Shop, name: str, action: str) -> None:
    made = [pay(shop, name) for _ in range(2)]
    assert [answer.status_code for answer in made] == [201, 201]
    assert made[0].content == made[1].content
    path = f"/payments/{made[0].json()['id']}/{action}"
    done = [shop.post(path, f"{name}-{action}") for _ in range(2)]
    assert [answer.status_code for answer in done] == [200, 200]
    assert done[0].content == done[1].content
    assert done[1].headers["idempotency-status"] == "replayed"
    status = {"capture": "captured", "void": "voided"}[action]
    assert shop.rows("SELECT status FROM payments WHERE order_id = ?", name) == [(status,)]
    assert shop.get(f"/payments/{made[0].json()['id']}").json()["status"] == status


def test_concurrent_captures_charge_and_book_once(shop: Shop, name: str) -> None:
    payment = pay(shop, name).json()["id"]
    together = threading.Barrier(5)

    def capture(number: int) -> httpx.Response:
        together.wait()
        return shop.post(f"/payments/{payment}/capture", f"{name}-{number}")  # different keys: the state decides

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(capture, range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409, 409]
    charges = shop.provider.get("/admin/charges?kind=charge")["movements"]
    assert len([charge for charge in charges if charge["reference"] == payment]) == 1
    assert shop.rows("SELECT kind, amount FROM entries WHERE reference = ?", payment) == [("capture", 5000)]


@pytest.mark.parametrize(("first", "second"), [("capture", "capture"), ("capture", "void"), ("void", "capture")])
def test_capture_or_void_in_the_wrong_state_is_refused(shop: Shop, name: str, first: str, second: str) -> None:
    payment = pay(shop, name).json()["id"]
    assert shop.post(f"/payments/{payment}/{first}", f"{name}-1").status_code == 200
    refused = shop.post(f"/payments/{payment}/{second}", f"{name}-2")
    assert refused.status_code == 409
    assert code(refused) == "CONFLICT.state"


def test_void_twice_has_the_same_result(shop: Shop, name: str) -> None:
    payment = pay(shop, name).json()["id"]
    answers = [shop.post(f"/payments/{payment}/void", f"{name}-{number}") for number in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json() == answers[1].json()


def test_declined_capture_leaves_the_payment_authorized(shop: Shop, name: str) -> None:
    payment = pay(shop, name).json()["id"]
    shop.provider.order({"decline": 0})
    assert code(shop.post(f"/payments/{payment}/capture", f"{name}-1")) == "PROVIDER.declined"
    assert shop.get(f"/payments/{payment}").json()["status"] == "authorized"
    assert shop.post(f"/payments/{payment}/capture", f"{name}-2").status_code == 200


def test_order_is_paid_once_under_different_keys(shop: Shop, name: str) -> None:
    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(lambda number: pay(shop, name, f"{name}-{number}"), range(5)))
    assert sorted(answer.status_code for answer in answers) == [201, 409, 409, 409, 409]
    assert {code(answer) for answer in answers if answer.status_code == 409} == {"CONFLICT.order_paid"}
    made = next(answer.json()["id"] for answer in answers if answer.status_code == 201)
    assert pay(shop, name, f"{name}-other", customer_id=f"new_{name}").status_code == 409
    assert (
        shop.get(f"/customers/new_{name}").status_code == 404
    )  # a refusal is committed, and must have changed nothing
    assert shop.post(f"/payments/{made}/void", f"{name}-void").status_code == 200
    assert pay(shop, name, f"{name}-anew").status_code == 201


# Constraints of the database


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO payments (id, order_id, customer_id, amount, currency) SELECT '{name}-2', order_id, customer_id, 1, 'EUR'"
        " FROM payments WHERE order_id = '{name}'",
        "UPDATE payments SET refunded = amount + 1 WHERE order_id = '{name}'",
        "UPDATE payments SET status = 'voided' WHERE order_id = '{name}'",
        "UPDATE payments SET amount = 0 WHERE order_id = '{name}'",
        "INSERT INTO entries (kind, reference, debit, credit, amount, currency) VALUES ('refund', 'x', 'a', 'a', 1, 'EUR')",
        "INSERT INTO entries (kind, reference, debit, credit, amount, currency) VALUES ('refund', 'x', 'a', 'b', -1, 'EUR')",
        "INSERT INTO entries (kind, reference, debit, credit, amount, currency) SELECT kind, reference, debit, credit, amount,"
        " currency FROM entries WHERE kind = 'capture'",
    ],
    ids=["second-payment", "refunded-too-much", "void-captured", "nothing", "one-sided", "negative", "booked-twice"],
)
def test_constraints_refuse_inconsistent_rows(shop: Shop, name: str, statement: str) -> None:
    shop.captured(name)
    with pytest.raises((sqlite3.IntegrityError, psycopg.errors.IntegrityError)):
        shop.rows(statement.format(name=name))


def test_balances_add_up_to_zero(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    shop.post("/refunds", name, {"charge_id": charge, "amount": 1000})
    told = shop.get("/ledger").json()
    assert told["balances"]["revenue"] < 0
    assert sum(told["balances"].values()) == 0


# Conditional changes


def test_customer_change_needs_the_current_etag(shop: Shop, name: str) -> None:
    pay(shop, name)
    path = f"/customers/cus_{name}"
    assert shop.get(path).headers["etag"] == '"1"'

    def put(key: str, who: str, **headers: str) -> httpx.Response:
        named = {"Authorization": "Bearer demo", "Idempotency-Key": f"{name}-{key}", **headers}
        return http.put(shop.service.url + path, json={"name": who, "email": "x@example.com"}, headers=named)

    assert code(put("a", "Ann")) == "PRECONDITION.if_match_required"
    changed = put("b", "Ann", **{"If-Match": '"1"'})
    assert (changed.status_code, changed.headers["etag"]) == (200, '"2"')
    again = put("b", "Ann", **{"If-Match": '"1"'})
    assert (again.headers["idempotency-status"], again.headers["etag"]) == ("replayed", '"2"')
    assert code(put("c", "Bob", **{"If-Match": '"1"'})) == "PRECONDITION.if_match_failed"
    assert shop.get(path).json()["name"] == "Ann"


def test_one_of_concurrent_changes_with_one_etag_wins(shop: Shop, name: str) -> None:
    pay(shop, name)

    def put(number: int) -> int:
        headers = {"Authorization": "Bearer demo", "Idempotency-Key": f"{name}-{number}", "If-Match": '"1"'}
        body = {"name": f"n{number}", "email": ""}
        return http.put(f"{shop.service.url}/customers/cus_{name}", json=body, headers=headers).status_code

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(put, range(4))) == [200, 412, 412, 412]
    assert shop.rows("SELECT version FROM customers WHERE id = ?", f"cus_{name}") == [(2,)]


# Invalid requests


@pytest.mark.parametrize(
    "changed",
    [{"amount": 0}, {"amount": 10.5}, {"amount": "5000"}, {"currency": "euro"}, {"order_id": ""}, {"extra": 1}],
)
def test_invalid_payment_is_refused(shop: Shop, name: str, changed: dict[str, Any]) -> None:
    refused = pay(shop, name, **changed)
    assert refused.status_code == 422
    assert code(refused) == "VALIDATION.payload"
    assert shop.rows("SELECT 1 FROM payments WHERE order_id = ?", name) == []


@pytest.mark.parametrize("path", ["/payments/pay_0", "/refunds/rf_0", "/customers/cus_0"])
def test_missing_resources_are_404(shop: Shop, path: str) -> None:
    assert code(shop.get(path)) == "NOT_FOUND.resource"


def test_undeclared_request_is_refused(shop: Shop, name: str) -> None:
    assert code(shop.post("/chargebacks", name, {})) == "VALIDATION.idempotency.undeclared"


# Webhooks


def test_unsigned_webhook_is_refused(shop: Shop, name: str) -> None:
    charge = shop.captured(name)
    refund = shop.post("/refunds", name, {"charge_id": charge, "amount": 1000}).json()["id"]
    body = json.dumps({"type": "refund.succeeded", "data": {"reference": refund}}).encode()
    url = f"{shop.service.url}/webhooks/provider"
    forged = http.post(url, content=body, headers=Signing(new_secret()).sign(body))
    assert forged.status_code == 401
    assert code(forged) == "AUTH.webhook_signature"
    assert http.post(url, content=body).status_code == 401
    genuine = Signing(shop.service.settings["PAYMENTS_WEBHOOK_SECRET"])
    headers = genuine.sign(body, id=f"ev_{name}")
    assert http.post(url, content=body, headers=headers).json()["result"] == "ok"
    other = body.replace(b"refund.succeeded", b"refund.failed")
    flagged = http.post(url, content=other, headers=genuine.sign(other, id=f"ev_{name}"))
    assert (flagged.status_code, flagged.json()["result"]) == (200, "flagged")


# The contract


def test_openapi_describes_the_contract(shop: Shop) -> None:
    document = shop.get("/openapi.json").json()
    validate(document)
    for path, effect in (("/payments", "transaction"), ("/refunds", "steps"), ("/payments/{id}/capture", "steps")):
        told = document["paths"][path]["post"]
        key = next(each for each in told["parameters"] if each["name"] == "Idempotency-Key")
        assert key["required"] is True
        assert told["x-idempotency"]["effect"] == effect
        assert told["x-retry"]
        assert "409" in told["responses"]
    assert document["paths"]["/refunds"]["post"]["x-idempotency"]["ttl"] == 30 * 86400
    assert "412" in document["paths"]["/customers/{id}"]["put"]["responses"]


def test_contract_names_operations_and_their_reverses() -> None:
    contract = Contract.load(CONTRACT)
    contract.check()
    rules = {rule.name: rule for rule in contract.rules}
    reversals = {name: rule.reverses for name, rule in rules.items() if rule.reverses}
    assert reversals == {"payments.void": "payments.create", "refunds.create": "payments.capture"}
    assert all(rules[name].key.required for pair in reversals.items() for name in pair)


def test_readme_names_every_endpoint_and_setting() -> None:
    text = Path(CONTRACT).with_name("README.md").read_text()
    for rule in Contract.load(CONTRACT).rules:
        assert rule.match in text
    for setting in ("DATABASE", "PROVIDER", "PROVIDER_TIMEOUT", "WEBHOOK_SECRET", "GUARD"):
        assert f"PAYMENTS_{setting}" in text
