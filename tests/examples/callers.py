"""Callers of the payments service that use the retry client with each HTTP library, and checks of the effects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from oncemore import Retry
from oncemore.client.errors import RetriesExhausted
from oncemore.client.story import RetryEvent, Story
from tests.client.clients import CLIENTS, Answer

from .conftest import Shop
from .test_refunds import entries, payouts_of, refunds_of

# Every failure is tested with these two; the other libraries share the retry loop.
BOTH = ["httpx", "httpx-async"]
ALL = [*BOTH, "requests", "aiohttp"]

# No budget, because it would carry the failures of one test over to the next.
PLAYBOOK = Retry.playbook(budget=None, attempt_timeout=5)

# The key belongs to these credentials: resumed with others, the request would be another refund.
CREDENTIALS = {"Authorization": "Bearer demo"}


def shop_fixture(**settings: str) -> Any:
    """Return a fixture `shop` for a module, on SQLite only, because its tests are about the caller."""

    @pytest.fixture(scope="module", name="shop")
    def made() -> Iterator[Shop]:
        with Shop(**settings) as shop:
            yield shop

    return made


class Caller:
    """A client of the service at *url*; *mend* is called before its first retry."""

    def __init__(
        self,
        library: str,
        url: str,
        retry: Retry = PLAYBOOK,
        keyring: str | None = None,
        *,
        mend: Callable[[], object] | None = None,
        **options: Any,
    ) -> None:
        self.url = url
        self.events: list[RetryEvent] = []
        self._mend = mend
        if library == "httpx":  # to load the certificates takes longer than most requests here
            options["transport"] = httpx.HTTPTransport(verify=False)
        made: Any = CLIENTS[library]
        self.client = made(retry, keyring, observers=[self._observe], **options)
        self.client.headers = CREDENTIALS

    def _observe(self, event: RetryEvent) -> None:
        self.events.append(event)
        if event.kind == "retrying" and self._mend is not None:
            mend, self._mend = self._mend, None
            mend()

    def ask(self, method: str, path: str, body: Any, key: str | None = None, **headers: str) -> Answer:
        named = {**CREDENTIALS, "Content-Type": "application/json", **headers}
        if key is not None:
            named["Idempotency-Key"] = key
        sent = body if hasattr(body, "__next__") else json.dumps(body).encode()
        answer: Answer = self.client.request(method, self.url + path, sent, named)
        return answer

    def refund(self, charge: str, amount: int = 1000, key: str | None = None) -> Answer:
        return self.ask("POST", "/refunds", {"charge_id": charge, "amount": amount}, key)


def refund_until_exhausted(caller: Caller, charge: str) -> Story:
    """Request a refund until the retries are exhausted, and return the story of its attempts."""
    with pytest.raises(RetriesExhausted) as caught:
        caller.refund(charge)
    assert caught.value.story is not None
    return caught.value.story


@dataclass
class ProblemSummary:
    """The code of a problem document, and whether it is retryable."""

    code: str
    retryable: bool


def told(answer: Answer) -> ProblemSummary:
    problem = json.loads(answer.body)
    return ProblemSummary(problem["error_code"], problem["retryable"])


def codes(story: Story) -> list[str]:
    """Return the status of each attempt, or the name of its error."""
    return [attempt.verdict.code or attempt.verdict.name for attempt in story.attempts]


def delays(story: Story) -> list[float]:
    return [attempt.delay for attempt in story.attempts[1:]]


def assert_refunded_once(shop: Shop, charge: str, answer: Answer, amount: int = 1000) -> None:
    """Check that there is one refund in the database, one entry in the ledger, and one payout at the provider."""
    assert answer.status == 201
    made = json.loads(answer.body)["id"]
    assert refunds_of(shop, charge) == [made]
    assert shop.rows("SELECT status, amount FROM refunds WHERE id = ?", made) == [("succeeded", amount)]
    assert shop.rows("SELECT refunded FROM payments WHERE charge_id = ?", charge) == [(amount,)]
    assert entries(shop, made, "refund") == 1
    assert len(payouts_of(shop, made)) == 1


def assert_nothing_refunded(shop: Shop, charge: str) -> None:
    assert shop.rows("SELECT refunded FROM payments WHERE charge_id = ?", charge) == [(0,)]
    assert [made for made in refunds_of(shop, charge) if payouts_of(shop, made)] == []


def claims(shop: Shop, key: str | None) -> int:
    """Return how often the service began to perform under *key*."""
    return len(shop.logged(event="claimed", operation="refunds.create", idempotency_key=key))
