"""`send` in an operation's transaction and in the user's own, on every driver; and a database that goes away."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from oncemore import Guard, Op, Operation, Policy, Webhooks
from oncemore._ledger.transactions import Do
from oncemore._runtime.plan import Plan
from oncemore.webhooks import Sender
from tests.messages.places import in_own_transaction
from tests.support.servers import PostgresServer
from tests.transactions.conftest import on_each_kind, shop, shops_url
from tests.transactions.shops import Shop
from tests.webhooks.conftest import LOOPBACK, send
from tests.webhooks.hooks import Hooks

__all__ = ["shop", "shops_url"]
WAIT = 90.0


@on_each_kind
async def test_event_commits_with_the_users_own_transaction(shop: Shop, hooks: Hooks) -> None:
    webhooks = Webhooks(shop.guard, allow=LOOPBACK, allow_http=True)
    await webhooks.endpoints.acreate(hooks.url())

    def work(place: Any) -> Plan[Any]:
        return (yield Do(lambda: webhooks.send(place, "a", 1), lambda: webhooks.asend(place, "a", 1)))

    sender = Sender(webhooks)
    await in_own_transaction(shop, work, fails=True)
    assert await sender.arun_once() == 0
    id = await in_own_transaction(shop, work)
    assert await sender.arun_once() == 1
    assert hooks.ids == [id]


@pytest.mark.server
def test_sender_outlives_a_crash_of_the_database(own_postgres: PostgresServer, hooks: Hooks) -> None:
    guard = Guard(own_postgres.url, policy=Policy(effect="transaction"))
    webhooks = Webhooks(guard, allow=LOOPBACK, allow_http=True)
    webhooks.endpoints.create(hooks.url("/fifo"), order="fifo")
    sender = Sender(webhooks)
    thread = threading.Thread(target=sender.run)
    thread.start()
    ids: list[str] = []
    try:
        for turn in range(2):
            ids += send(webhooks, *range(50))
            own_postgres.crash()
            own_postgres.start()
            ends = time.monotonic() + WAIT
            while delivered(webhooks) < 50 * (turn + 1):
                assert time.monotonic() < ends
                time.sleep(0.1)
    finally:
        sender.stop()
        thread.join(WAIT)
    assert not thread.is_alive()
    assert list(dict.fromkeys(hooks.ids)) == ids  # in order; what was sent when the database crashed may come twice
    guard.close()


def delivered(webhooks: Webhooks) -> int:
    from oncemore.errors import StoreError

    try:
        return webhooks.stats()["delivered"]
    except StoreError:
        return 0


def test_send_needs_a_transaction(webhooks: Webhooks) -> None:
    from oncemore.errors import ConfigurationError

    def perform(op: Op) -> None:
        webhooks.send(object(), "a", 1)

    with pytest.raises(ConfigurationError, match="no transaction"):
        webhooks.guard.run(Operation("t", "k"), perform)
