"""Walks through all records of a Redis store: what operators list, count and purge, whatever happens meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from oncemore._ledger.store import Filter, Stats
from oncemore._runtime.plan import Plan, run
from oncemore.errors import InvalidPayload
from oncemore.stores.redis import RedisStore

from ..parts import HOUR, claimed, settled

pytestmark = pytest.mark.server


def test_a_page_goes_on_where_it_ended_whatever_is_written_meanwhile(store: RedisStore) -> None:
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


def test_a_page_of_few_among_many_is_found(store: RedisStore) -> None:
    for n in range(500):
        settled(store, str(n))
    run(store.hold(claimed(store, "held")))
    page = run(store.list(Filter(state="held"), limit=3))
    assert ([record.key for record in page.records], page.cursor) == (["held"], None)


@pytest.mark.parametrize("cursor", [f"0.{5000 * '9'}.", "x", "1.2", "0.0.{}", "-1.0.", "0.0.a b"])
def test_a_cursor_of_another_origin_is_refused(store: RedisStore, cursor: str) -> None:
    with pytest.raises(InvalidPayload):
        run(store.list(Filter(), cursor=cursor))


def test_a_purge_in_batches_passes_over_the_keys_once(store: RedisStore) -> None:
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


@pytest.mark.parametrize("walk", ["stats", "purge"])
def test_a_record_that_goes_while_all_are_counted_does_not_stop_the_count(
    store: RedisStore, server: Any, walk: str
) -> None:
    """They expire in the server at any time, so between a step of SCAN and the look at what it found too."""
    for n in range(3):
        settled(store, str(n))
    fly = store._walk.lane.run_batch

    def fly_and_lose_one(bundles: Any) -> Plan[Any]:
        answers = yield from fly(bundles)
        server.delete(store._name(("scope", "1")))
        return answers

    store._walk.lane.run_batch = fly_and_lose_one
    assert run(getattr(store, walk)()) == (0 if walk == "purge" else Stats(settled=2))
