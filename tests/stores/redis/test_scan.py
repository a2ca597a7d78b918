"""Scans of all records of a Redis store, as operators list, count and purge them, while records change."""

from __future__ import annotations

from typing import Any

import pytest

from oncemore._ledger.store import Filter, Stats
from oncemore._runtime.plan import Plan, run
from oncemore.errors import InvalidPayload
from oncemore.stores.redis import RedisStore

from ..parts import HOUR, claimed, settled

pytestmark = pytest.mark.server


def test_list_shows_every_record_while_others_are_written(store: RedisStore) -> None:
    for n in range(200):
        settled(store, str(n))
    seen, cursor = [], None
    for page_number in range(1000):
        page = run(store.list(Filter(), limit=7, cursor=cursor))
        assert len(page.records) <= 7
        seen += [int(record.key) for record in page.records]
        cursor = page.cursor
        if cursor is None:
            break
        claimed(store, str(1000 + page_number))
    assert sorted(key for key in seen if key < 1000) == list(range(200))


def test_list_finds_few_among_many(store: RedisStore) -> None:
    for n in range(500):
        settled(store, str(n))
    run(store.hold(claimed(store, "held")))
    page = run(store.list(Filter(state="held"), limit=3))
    assert ([record.key for record in page.records], page.cursor) == (["held"], None)


@pytest.mark.parametrize("cursor", [f"0.{5000 * '9'}.", "x", "1.2", "0.0.{}", "-1.0.", "0.0.a b"])
def test_foreign_cursor_is_refused(store: RedisStore, cursor: str) -> None:
    with pytest.raises(InvalidPayload):
        run(store.list(Filter(), cursor=cursor))


def test_purge_in_batches_scans_the_keys_once(store: RedisStore) -> None:
    for n in range(30):
        settled(store, str(n))
    store.shift += 2 * HOUR
    settled(store, "fresh")
    gone = []
    while batch := run(store.purge(batch=8)):
        gone.append(batch)
    assert (sum(gone), max(gone)) == (30, 8)
    settled(store, "later")
    store.shift += 2 * HOUR
    assert run(store.purge()) == 2


@pytest.mark.parametrize("verb", ["stats", "purge"])
def test_record_deleted_during_a_scan_does_not_stop_it(store: RedisStore, server: Any, verb: str) -> None:
    """They expire in the server at any time, so between a step of SCAN and the look at what it found too."""
    for n in range(3):
        settled(store, str(n))
    send = store._runner.run

    def send_and_lose_one(items: Any) -> Plan[Any]:
        results = yield from send(items)
        server.delete(store._name(("scope", "1")))
        return results

    store._runner.run = send_and_lose_one  # type: ignore[method-assign]
    assert run(getattr(store, verb)()) == (0 if verb == "purge" else Stats(settled=2))
