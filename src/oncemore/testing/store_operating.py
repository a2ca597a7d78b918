"""What every store must let an operator do: hold, resolve, delete, look."""

from __future__ import annotations

import pytest

from .._ledger.model import Operation, Outcome
from .._ledger.store import Filter, Store
from ..errors import Fenced, InProgress, NotFound, NotResolvable
from .clock import Clock
from .store_parts import DONE, LEASE, RETENTION, Drive, Part, write


class Operating(Part):
    """Holding, resolving, deleting, listing and counting."""

    # Holding and resolving

    def test_a_held_record_is_not_claimed(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.hold(lease, note="its holder vanished"))
        clock.advance(LEASE + 1)
        record = drive(store.claim(operation, lease=LEASE))
        assert (record.state, record.note) == ("held", "its holder vanished")

    def test_a_held_record_resolved_as_done_replays(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.hold(lease))
        record = drive(store.resolve(*operation.id, DONE, retention=RETENTION, note="ticket 7"))
        assert (record.state, record.outcome, record.note) == ("settled", DONE, "ticket 7")
        assert drive(store.claim(operation, lease=LEASE)).outcome == DONE
        with pytest.raises(Fenced):
            drive(store.settle(lease, Outcome("response", 500), retention=RETENTION))

    def test_a_lapsed_record_resolved_as_not_done_runs_again(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        late = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        assert drive(store.resolve(*operation.id, None, retention=RETENTION)).state == "released"
        assert drive(store.claim(operation, lease=LEASE)).lapsed is False
        with pytest.raises(Fenced):
            drive(store.settle(late, DONE, retention=RETENTION))

    def test_only_what_is_in_doubt_can_be_resolved(self, store: Store, drive: Drive, operation: Operation) -> None:
        with pytest.raises(NotFound):
            drive(store.resolve(*operation.id, DONE, retention=RETENTION))
        lease = drive(store.claim(operation, lease=LEASE))
        with pytest.raises(InProgress):
            drive(store.resolve(*operation.id, DONE, retention=RETENTION))
        drive(store.settle(lease, DONE, retention=RETENTION))
        with pytest.raises(NotResolvable):
            drive(store.resolve(*operation.id, None, retention=RETENTION))

    def test_delete_makes_the_key_new_but_spares_the_running(
        self, store: Store, drive: Drive, operation: Operation
    ) -> None:
        assert drive(store.delete(*operation.id)) is False
        lease = drive(store.claim(operation, lease=LEASE))
        with pytest.raises(InProgress):
            drive(store.delete(*operation.id))
        drive(store.settle(lease, DONE, retention=RETENTION))
        assert drive(store.delete(*operation.id)) is True
        assert drive(store.find(*operation.id)) is None
        assert drive(store.claim(operation, lease=LEASE)).attempt == 1

    def test_delete_takes_nothing_from_the_audit(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        archived = drive(store.stats()).archived
        drive(store.settle(drive(store.claim(operation, lease=LEASE)), DONE, retention=1.0, audit=True))
        clock.advance(2)
        assert drive(store.delete(*operation.id)) is False
        drive(store.purge())
        assert drive(store.stats()).archived == archived + 1
        assert drive(store.claim(operation, lease=LEASE)).attempt == 1

    # Looking

    def test_list_pages_through_all_once(self, store: Store, drive: Drive, operation: Operation) -> None:
        keys = {f"key-{n}" for n in range(23)}
        for key in keys:
            drive(store.claim(Operation(operation.scope, key), lease=LEASE))
        seen: list[str] = []
        cursor = None
        for _ in range(100):
            page = drive(store.list(Filter(scope=operation.scope), limit=5, cursor=cursor))
            seen += [record.key for record in page.records]
            cursor = page.cursor
            if cursor is None:
                break
        assert sorted(seen) == sorted(keys)
        assert len(drive(store.list(Filter(scope=operation.scope), limit=5, cursor="")).records) == 5, (
            "from the beginning"
        )

    def test_list_filters(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        scope = operation.scope
        drive(store.claim(Operation(scope, "lapsed", name="a"), lease=1))
        drive(
            store.settle(drive(store.claim(Operation(scope, "done", name="b"), lease=LEASE)), DONE, retention=RETENTION)
        )
        clock.advance(5)
        drive(store.claim(Operation(scope, "live", name="a"), lease=LEASE))
        filters = {
            Filter(scope=scope, state="settled"): {"done"},
            Filter(scope=scope, state="running"): {"lapsed", "live"},
            Filter(scope=scope, lapsed=True): {"lapsed"},
            Filter(scope=scope, state="running", lapsed=False): {"live"},
            Filter(scope=scope, name="a"): {"lapsed", "live"},
            Filter(scope=scope, key="done"): {"done"},
        }
        for where, keys in filters.items():
            assert {record.key for record in drive(store.list(where, limit=1000)).records} == keys, where

    def test_stats_count_by_state(self, store: Store, drive: Drive, operation: Operation) -> None:
        before = drive(store.stats())
        for n, verb in enumerate(["settle", "release", "hold", "nothing"]):
            lease = drive(store.claim(Operation(operation.scope, str(n)), lease=LEASE))
            if verb != "nothing":
                drive(write(store, verb, lease))
        after = drive(store.stats())
        for state in ("settled", "released", "held", "running"):
            assert getattr(after, state) == getattr(before, state) + 1, state
