"""StoreContract: the tests that every store must pass.  Subclass it, and give it a `store` fixture.

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self):
        return connect("mystore://...")
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .._ledger.model import Claim, Lease, Operation, Outcome, Record
from .._ledger.store import Filter, Store
from .._runtime.plan import Plan, arun, run
from ..errors import Fenced, InProgress, NotFound, NotResolvable
from .clock import Clock

Drive = Callable[[Plan[Any]], Any]

DONE = Outcome(
    "response", 201, (("content-type", "application/json"), ("link", "a"), ("link", "b")), b'{"id": "rf_123"}'
)
LEASE, RETENTION = 30.0, 3600.0


def claim_of(drive: Drive, store: Store, operation: Operation) -> Claim:
    """Return the claim that made the operation's record."""
    return Claim(operation, drive(store.find(*operation.id)).holder, LEASE)


def write(store: Store, verb: str, lease: Lease) -> Plan[Any]:
    """Return the plan of a verb that needs a lease, with ordinary arguments."""
    verbs: dict[str, Callable[[], Plan[Any]]] = {
        "renew": lambda: store.renew(lease, lease=LEASE),
        "settle": lambda: store.settle(lease, DONE, retention=RETENTION),
        "release": lambda: store.release(lease, retention=RETENTION),
        "hold": lambda: store.hold(lease),
    }
    return verbs[verb]()


class TextSubclass(str):
    """A subclass of str, such as a template engine's safe text."""


class StoreContract:
    """The conformance suite.  Each test runs twice, for callers that block and for callers that await."""

    @pytest.fixture(params=["run", "arun"])
    def drive(self, request: pytest.FixtureRequest, store: Store) -> Iterator[Drive]:
        if request.param == "run":
            yield run
            store.close()
            return
        with asyncio.Runner() as runner:
            yield lambda plan: runner.run(arun(plan))
            runner.run(store.aclose())

    @pytest.fixture
    def clock(self, store: Store) -> Clock:
        return Clock(store)

    @pytest.fixture
    def operation(self) -> Operation:
        return Operation(f"test {uuid.uuid4()}", "key-1", "c1:aa", "refunds.create")

    # Claims

    def test_first_claim_gets_the_lease(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        assert isinstance(lease, Lease)
        assert (lease.attempt, lease.lapsed, lease.token > 0) == (1, False, True)

    def test_second_claim_gets_the_running_record(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        record = drive(store.claim(operation, lease=LEASE))
        assert isinstance(record, Record)
        assert (record.state, record.token, record.fingerprint) == ("running", lease.token, "c1:aa")
        assert (record.scope, record.key, record.name) == (operation.scope, "key-1", "refunds.create")
        assert 0 < record.lease_until - record.now <= LEASE
        assert record.created_at <= record.now
        assert record.outcome is None

    def test_claim_of_settled_returns_outcome_with_repeated_headers(
        self, store: Store, drive: Drive, operation: Operation
    ) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(lease, DONE, retention=RETENTION, note="seen"))
        record = drive(store.claim(operation, lease=LEASE))
        assert (record.state, record.outcome, record.note, record.attempts) == ("settled", DONE, "seen", 1)
        assert record.response_hash == DONE.digest()
        assert record.settled_at >= record.created_at
        assert RETENTION - 5 < record.remaining <= RETENTION

    @pytest.mark.parametrize("body", [b"", b"\x00\xff\xfe", "žluťoučký".encode(), b"x" * 300_000])
    def test_empty_binary_and_large_bodies_are_kept(
        self, store: Store, drive: Drive, operation: Operation, body: bytes
    ) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(lease, Outcome("response", 204, (), body), retention=RETENTION))
        assert drive(store.find(*operation.id)).outcome == Outcome("response", 204, (), body)

    @pytest.mark.parametrize("awkward", ["a:b", "{tag}", "%s %(x)s ?", "žluť\u2028", "' OR 1=1 --", "x" * 255, '"\\'])
    def test_scope_and_key_may_be_any_text(
        self, store: Store, drive: Drive, operation: Operation, awkward: str
    ) -> None:
        one = Operation(operation.scope + awkward, awkward, awkward, awkward)
        lease = drive(store.claim(one, lease=LEASE))
        drive(store.settle(lease, DONE, retention=RETENTION, note=awkward))
        record = drive(store.find(*one.id))
        assert (record.id, record.fingerprint, record.name, record.note) == (one.id, awkward, awkward, awkward)

    def test_subclasses_of_str_are_kept_as_text(self, store: Store, drive: Drive, operation: Operation) -> None:
        """A member of a str enum, or a template engine's safe text, equals its plain text."""
        one = Operation(TextSubclass(operation.scope), TextSubclass("key"), TextSubclass("c1:aa"), TextSubclass("name"))
        lease = drive(store.claim(one, lease=LEASE))
        running = drive(store.claim(one, lease=LEASE))
        drive(store.watch(running))
        drive(store.settle(lease, DONE, retention=RETENTION, note=TextSubclass("note")))
        record = drive(store.find(operation.scope, "key"))
        assert (running.id, record.id) == (one.id, one.id)
        assert (record.fingerprint, record.name, record.note) == ("c1:aa", "name", "note")
        listed = drive(store.list(Filter(scope=TextSubclass(operation.scope), name=TextSubclass("name")))).records
        assert [each.id for each in listed] == [record.id]
        assert drive(store.delete(*one.id))
        assert isinstance(drive(store.claim(operation, lease=LEASE)), Lease), "other claims still work"

    def test_scope_and_key_are_not_joined(self, store: Store, drive: Drive, operation: Operation) -> None:
        """A character moved from the scope to the key makes another operation."""
        base = operation.scope
        one, two = Operation(base + "a:", "b"), Operation(base + "a", ":b")
        assert isinstance(drive(store.claim(one, lease=LEASE)), Lease)
        assert isinstance(drive(store.claim(two, lease=LEASE)), Lease)

    def test_claim_with_another_fingerprint_gets_the_record(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        """While it runs, after its lease has lapsed, after a failure, and after it was settled."""
        other = Operation(operation.scope, operation.key, "c1:bb")
        lease = drive(store.claim(operation, lease=LEASE))
        assert drive(store.claim(other, lease=LEASE)).state == "running"
        clock.advance(LEASE + 1)
        assert drive(store.claim(other, lease=LEASE)).state == "running"
        drive(store.release(lease, retention=RETENTION))
        assert drive(store.claim(other, lease=LEASE)).state == "released"
        again = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(again, DONE, retention=RETENTION))
        assert drive(store.claim(other, lease=LEASE)).fingerprint == "c1:aa"

    # Requests

    def test_request_is_kept_until_the_operation_is_settled(
        self, store: Store, drive: Drive, operation: Operation
    ) -> None:
        lease = drive(store.claim(operation, lease=LEASE, request=b"\x00asked\xff"))
        assert drive(store.find(*operation.id)).request == b"\x00asked\xff"
        assert drive(store.claim(operation, lease=LEASE)).request == b"\x00asked\xff"
        drive(store.settle(lease, DONE, retention=RETENTION))
        assert drive(store.find(*operation.id)).request == b""

    def test_claim_without_request_has_none(self, store: Store, drive: Drive, operation: Operation) -> None:
        drive(store.claim(operation, lease=LEASE))
        assert drive(store.find(*operation.id)).request == b""

    def test_later_claim_replaces_request_only_if_it_brings_one(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        drive(store.release(drive(store.claim(operation, lease=LEASE, request=b"one")), retention=RETENTION))
        drive(store.claim(operation, lease=LEASE))
        assert drive(store.find(*operation.id)).request == b"one"
        clock.advance(LEASE + 1)
        drive(store.claim(operation, lease=LEASE, request=b"two"))
        assert drive(store.find(*operation.id)).request == b"two"

    def test_claim_after_expiry_starts_without_request(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        drive(store.release(drive(store.claim(operation, lease=LEASE, request=b"old")), retention=RETENTION))
        clock.advance(RETENTION + 1)
        drive(store.claim(operation, lease=LEASE))
        assert drive(store.find(*operation.id)).request == b""

    def test_request_of_held_record_survives_requeue(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE, request=b"asked"))
        drive(store.renew(lease, lease=LEASE))
        drive(store.hold(lease, note="dead letter"))
        [record] = drive(store.list(Filter(scope=operation.scope, state="held"))).records
        assert record.request == b"asked"
        assert drive(store.resolve(*operation.id, None, retention=RETENTION)).request == b"asked"
        again = drive(store.claim(operation, lease=LEASE))
        assert drive(store.find(*operation.id)).request == b"asked"
        drive(store.hold(again))
        assert drive(store.resolve(*operation.id, DONE, retention=RETENTION)).request == b""

    def test_large_request_comes_back_as_it_was(self, store: Store, drive: Drive, operation: Operation) -> None:
        request = bytes(range(256)) * 4096
        drive(store.claim(operation, lease=LEASE, request=request))
        assert drive(store.find(*operation.id)).request == request

    # Unclaim

    def test_unclaim_of_first_attempt_leaves_no_trace(self, store: Store, drive: Drive, operation: Operation) -> None:
        drive(store.claim(operation, lease=LEASE))
        drive(store.unclaim([claim_of(drive, store, operation)]))
        lease = drive(store.claim(Operation(*operation.id, "c1:other"), lease=LEASE))
        assert (lease.attempt, lease.lapsed) == (1, False)

    def test_unclaim_of_later_attempt_releases(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        drive(store.release(drive(store.claim(operation, lease=LEASE, request=b"asked")), retention=RETENTION))
        drive(store.claim(operation, lease=LEASE))
        drive(store.unclaim([claim_of(drive, store, operation)]))
        clock.advance(RETENTION + 1)
        other = drive(store.claim(Operation(*operation.id, "c1:other"), lease=LEASE))
        assert (other.state, other.fingerprint, other.request) == ("released", "c1:aa", b"asked")
        lease = drive(store.claim(operation, lease=LEASE))
        assert not lease.lapsed
        assert lease.attempt > 1

    def test_unclaim_of_takeover_leaves_the_outcome_in_doubt(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        assert drive(store.claim(operation, lease=LEASE)).lapsed
        drive(store.unclaim([claim_of(drive, store, operation)]))
        assert drive(store.claim(operation, lease=LEASE)).lapsed

    def test_unclaim_by_another_holder_changes_nothing(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.unclaim([Claim(operation, "host:1:nobody:1", LEASE)]))
        assert drive(store.claim(operation, lease=LEASE)).state == "running"
        drive(store.settle(lease, DONE, retention=RETENTION))

    def test_unclaim_may_come_twice_and_late(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        drive(store.claim(operation, lease=LEASE))
        gone = claim_of(drive, store, operation)
        drive(store.unclaim([gone]))
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.unclaim([gone]))
        drive(store.settle(lease, DONE, retention=RETENTION))
        settled = claim_of(drive, store, operation)
        drive(store.unclaim([gone, settled]))
        assert drive(store.find(*operation.id)).outcome == DONE

    def test_unclaim_fences_the_holder_that_comes_back(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.unclaim([claim_of(drive, store, operation)]))
        drive(store.claim(operation, lease=LEASE))
        with pytest.raises(Fenced):
            drive(store.settle(lease, DONE, retention=RETENTION))

    def test_unclaim_of_many_undoes_each(self, store: Store, drive: Drive, operation: Operation) -> None:
        several = [Operation(operation.scope, f"key-{n}", "c1:aa") for n in range(20)]
        for each in several:
            drive(store.claim(each, lease=LEASE))
        drive(store.unclaim([claim_of(drive, store, each) for each in several]))
        drive(store.unclaim([]))
        assert {drive(store.claim(each, lease=LEASE)).attempt for each in several} == {1}

    # Leases and tokens

    def test_released_record_is_claimed_again(self, store: Store, drive: Drive, operation: Operation) -> None:
        first = drive(store.claim(operation, lease=LEASE))
        drive(store.release(first, retention=RETENTION))
        second = drive(store.claim(operation, lease=LEASE))
        assert (second.attempt, second.lapsed) == (2, False)
        assert second.token > first.token

    def test_lapsed_lease_is_taken_over(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        """No background process is needed: the next lease says that it has taken over a lapsed record."""
        first = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        second = drive(store.claim(operation, lease=LEASE))
        assert (second.attempt, second.lapsed) == (2, True)
        assert second.token > first.token

    def test_renewed_lease_does_not_lapse(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE - 5)
        renewed = drive(store.renew(lease, lease=LEASE))
        assert renewed.expires_at > lease.expires_at
        clock.advance(LEASE - 5)
        assert drive(store.claim(operation, lease=LEASE)).state == "running"

    def test_renewal_for_zero_seconds_ends_the_lease(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.renew(lease, lease=0.0))
        assert drive(store.claim(operation, lease=LEASE)).lapsed

    @pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold"])
    def test_late_owner_is_fenced(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock, verb: str
    ) -> None:
        """After a takeover, each write of the former owner is refused and changes nothing."""
        late = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        current = drive(store.claim(operation, lease=LEASE))
        with pytest.raises(Fenced):
            drive(write(store, verb, late))
        drive(store.settle(current, DONE, retention=RETENTION))
        with pytest.raises(Fenced):
            drive(write(store, verb, late))
        assert drive(store.find(*operation.id)).outcome == DONE

    @pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold"])
    def test_owner_of_a_deleted_record_is_fenced(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock, verb: str
    ) -> None:
        """Tokens grow even if the record was deleted, or expired and purged, in between."""
        former = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(former, DONE, retention=RETENTION))
        drive(store.delete(*operation.id))
        with pytest.raises(Fenced):
            drive(write(store, verb, former))
        middle = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(middle, DONE, retention=RETENTION))
        clock.advance(RETENTION + 1)
        drive(store.purge())
        last = drive(store.claim(operation, lease=LEASE))
        assert former.token < middle.token < last.token
        for lease in (former, middle):
            with pytest.raises(Fenced):
                drive(write(store, verb, lease))

    @pytest.mark.parametrize("verb", ["settle", "release", "hold"])
    def test_repeated_write_changes_nothing(self, store: Store, drive: Drive, operation: Operation, verb: str) -> None:
        """If the answer to a write is lost, the caller sends it again, and the second write changes nothing."""
        lease = drive(store.claim(operation, lease=LEASE))
        drive(write(store, verb, lease))
        before = drive(store.find(*operation.id))
        drive(write(store, verb, lease))
        after = drive(store.find(*operation.id))
        assert (after.state, after.outcome, after.token) == (before.state, before.outcome, before.token)

    def test_settled_record_is_final(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(lease, DONE, retention=RETENTION))
        drive(store.settle(lease, Outcome("response", 500), retention=RETENTION))
        for verb in ("renew", "release", "hold"):
            with pytest.raises(Fenced):
                drive(write(store, verb, lease))
        assert drive(store.find(*operation.id)).outcome == DONE

    def test_owner_may_settle_after_lapse_without_takeover(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        drive(store.settle(lease, DONE, retention=RETENTION))
        assert drive(store.find(*operation.id)).state == "settled"

    # Retention

    @pytest.mark.parametrize("verb", ["settle", "release"])
    def test_expired_record_is_absent(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock, verb: str
    ) -> None:
        drive(write(store, verb, drive(store.claim(operation, lease=LEASE))))
        clock.advance(RETENTION + 1)
        assert drive(store.find(*operation.id)) is None
        assert drive(store.list(Filter(scope=operation.scope))).records == ()
        lease = drive(store.claim(Operation(*operation.id, "c1:other"), lease=LEASE))
        assert (lease.attempt, lease.lapsed) == (1, False)
        record = drive(store.find(*operation.id))
        assert (record.fingerprint, record.outcome, record.attempts) == ("c1:other", None, 1)

    def test_running_and_held_records_never_expire(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        """An unfinished operation stays until it is finished or resolved."""
        held = Operation(operation.scope, "held")
        drive(store.hold(drive(store.claim(held, lease=LEASE)), note="why"))
        drive(store.claim(operation, lease=LEASE))
        clock.advance(1000 * RETENTION)
        drive(store.purge())
        assert drive(store.find(*held.id)).note == "why"
        assert drive(store.find(*operation.id)).state == "running"
        assert drive(store.claim(operation, lease=LEASE)).lapsed

    def test_touch_extends_the_retention(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        drive(store.settle(drive(store.claim(operation, lease=LEASE)), DONE, retention=RETENTION))
        clock.advance(RETENTION - 10)
        record = drive(store.find(*operation.id))
        drive(store.touch(record, retention=RETENTION))
        clock.advance(RETENTION - 10)
        touched = drive(store.find(*operation.id))
        assert touched.outcome == DONE
        assert touched.accessed_at > record.accessed_at

    def test_purge_removes_expired_records_batch_by_batch(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        old = [Operation(operation.scope, f"old-{n}") for n in range(5)]
        for each in old:
            drive(store.settle(drive(store.claim(each, lease=LEASE)), DONE, retention=RETENTION))
        drive(store.settle(drive(store.claim(operation, lease=LEASE)), DONE, retention=9 * RETENTION))
        clock.advance(RETENTION + 1)
        while gone := drive(store.purge(batch=2)):
            assert 0 < gone <= 2
        assert drive(store.find(*operation.id)).outcome == DONE
        assert all(drive(store.find(*each.id)) is None for each in old)

    def test_audited_record_is_archived_when_it_expires(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        before = drive(store.stats()).archived
        again = Operation(operation.scope, "again")
        for each in (operation, again):
            drive(store.settle(drive(store.claim(each, lease=LEASE)), DONE, retention=RETENTION, audit=True))
        clock.advance(RETENTION + 1)
        assert drive(store.claim(again, lease=LEASE)).attempt == 1
        while drive(store.purge()):
            pass
        assert drive(store.find(*operation.id)) is None
        assert drive(store.stats()).archived == before + 2

    # Holding and resolving

    def test_held_record_is_not_claimed(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.hold(lease, note="its process crashed"))
        clock.advance(LEASE + 1)
        record = drive(store.claim(operation, lease=LEASE))
        assert (record.state, record.note) == ("held", "its process crashed")

    def test_held_record_resolved_with_outcome_replays(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.hold(lease))
        record = drive(store.resolve(*operation.id, DONE, retention=RETENTION, note="ticket 7"))
        assert (record.state, record.outcome, record.note) == ("settled", DONE, "ticket 7")
        assert drive(store.claim(operation, lease=LEASE)).outcome == DONE
        with pytest.raises(Fenced):
            drive(store.settle(lease, Outcome("response", 500), retention=RETENTION))

    def test_lapsed_record_resolved_as_released_runs_again(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        late = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        assert drive(store.resolve(*operation.id, None, retention=RETENTION)).state == "released"
        assert drive(store.claim(operation, lease=LEASE)).lapsed is False
        with pytest.raises(Fenced):
            drive(store.settle(late, DONE, retention=RETENTION))

    def test_resolve_needs_an_unknown_outcome(self, store: Store, drive: Drive, operation: Operation) -> None:
        with pytest.raises(NotFound):
            drive(store.resolve(*operation.id, DONE, retention=RETENTION))
        lease = drive(store.claim(operation, lease=LEASE))
        with pytest.raises(InProgress):
            drive(store.resolve(*operation.id, DONE, retention=RETENTION))
        drive(store.settle(lease, DONE, retention=RETENTION))
        with pytest.raises(NotResolvable):
            drive(store.resolve(*operation.id, None, retention=RETENTION))

    def test_delete_makes_the_key_new_unless_it_is_running(
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

    def test_delete_keeps_audited_records(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        archived = drive(store.stats()).archived
        drive(store.settle(drive(store.claim(operation, lease=LEASE)), DONE, retention=1.0, audit=True))
        clock.advance(2)
        assert drive(store.delete(*operation.id)) is False
        drive(store.purge())
        assert drive(store.stats()).archived == archived + 1
        assert drive(store.claim(operation, lease=LEASE)).attempt == 1

    # Listing and counting

    def test_list_returns_each_record_once_over_pages(self, store: Store, drive: Drive, operation: Operation) -> None:
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

    def test_list_filters_records(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
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

    # Concurrency

    def test_one_of_24_threads_gets_the_lease(self, store: Store, operation: Operation) -> None:
        start = threading.Barrier(24)

        def claim(_: int) -> Lease | Record:
            start.wait()
            return run(store.claim(operation, lease=LEASE))

        with ThreadPoolExecutor(24) as pool:
            found = list(pool.map(claim, range(24)))
        store.close()
        assert sum(isinstance(each, Lease) for each in found) == 1
        assert len({each.token for each in found}) == 1

    async def test_one_task_per_key_gets_the_lease(self, store: Store, operation: Operation) -> None:
        operations = [Operation(operation.scope, f"key-{n % 8}") for n in range(64)]
        found = await asyncio.gather(*(arun(store.claim(each, lease=LEASE)) for each in operations))
        won = [each for each in found if isinstance(each, Lease)]
        assert sorted(each.operation.key for each in won) == [f"key-{n}" for n in range(8)]
        await asyncio.gather(*(arun(store.settle(each, DONE, retention=RETENTION)) for each in won))
        again = await asyncio.gather(*(arun(store.claim(each, lease=LEASE)) for each in operations))
        assert all(isinstance(each, Record) and each.outcome == DONE for each in again)
        await store.aclose()

    async def test_fenced_item_does_not_fail_its_batch(self, store: Store, operation: Operation) -> None:
        """Each item of a batch has its own result."""
        leases: list[Any] = [await arun(store.claim(Operation(operation.scope, str(n)), lease=LEASE)) for n in range(6)]
        await arun(store.settle(leases[3], DONE, retention=RETENTION))
        await arun(store.delete(operation.scope, "3"))
        settles = [arun(store.settle(lease, DONE, retention=RETENTION)) for lease in leases]
        answers = await asyncio.gather(*settles, return_exceptions=True)
        assert [isinstance(answer, Fenced) for answer in answers] == [n == 3 for n in range(6)]
        await store.aclose()

    async def test_cancelled_claim_leaves_the_key_free(self, store: Store, operation: Operation) -> None:
        """A cancelled caller's claim is undone immediately, not when its lease lapses."""
        for delay in itertools.chain([0.0] * 5, [0.0005, 0.001, 0.002, 0.004]):
            task = asyncio.create_task(arun(store.claim(operation, lease=LEASE)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            # The claim may have been faster than the cancellation.
            if not task.cancelled() and isinstance(lease := task.result(), Lease):
                await arun(store.release(lease, retention=RETENTION))
        async with asyncio.timeout(5):
            while not isinstance(found := await arun(store.claim(operation, lease=LEASE)), Lease):
                await asyncio.sleep(0.01)
        assert found.lapsed is False
        await store.aclose()

    async def test_cancelled_first_claim_is_not_counted_as_attempt(self, store: Store) -> None:
        """Checks that are made before a first attempt must be made for the next caller, too."""
        for number, delay in enumerate([0.0, 0.0, 0.0005, 0.001, 0.002, 0.004]):
            operation = Operation("left", str(number))
            task = asyncio.create_task(arun(store.claim(operation, lease=LEASE)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                async with asyncio.timeout(5):
                    while not isinstance(found := await arun(store.claim(operation, lease=LEASE)), Lease):
                        await asyncio.sleep(0.01)
                assert found.attempt == 1
        await store.aclose()

    def test_waiter_is_woken_by_settle_release_and_hold(self, store: Store, drive: Drive, operation: Operation) -> None:
        for n, verb in enumerate(["settle", "release", "hold"]):
            one = Operation(operation.scope, str(n))
            lease = drive(store.claim(one, lease=LEASE))
            with store.wakeups.waiting(one.id) as waiter:
                drive(write(store, verb, lease))
                assert waiter.arm(lambda: None) is False, verb

    def test_closed_store_can_be_used_again(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        store.close()
        store.close()
        drive(store.settle(lease, DONE, retention=RETENTION))
        assert drive(store.find(*operation.id)).outcome == DONE
