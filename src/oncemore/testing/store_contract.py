"""What every store must do, as tests: subclass StoreContract, give it a `store` fixture, and pytest does the rest.

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self):
        return connect("mystore://...")
"""

from __future__ import annotations

import pytest

from .._ledger.model import Claim, Lease, Operation, Outcome, Record
from .._ledger.store import Filter, Store
from ..errors import Fenced
from .clock import Clock
from .store_crowding import Crowding
from .store_operating import Operating
from .store_parts import DONE, LEASE, RETENTION, Drive, claim_of, write


class Marked(str):
    """A text of a class of its own."""


class StoreContract(Operating, Crowding):
    """All of it; this part is about claims, leases, tokens and retention."""

    # Claims

    def test_a_first_claim_gets_the_lease(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        assert isinstance(lease, Lease)
        assert (lease.attempt, lease.lapsed, lease.token > 0) == (1, False, True)

    def test_a_second_claim_gets_the_running_record(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        record = drive(store.claim(operation, lease=LEASE))
        assert isinstance(record, Record)
        assert (record.state, record.token, record.fingerprint) == ("running", lease.token, "c1:aa")
        assert (record.scope, record.key, record.name) == (operation.scope, "key-1", "refunds.create")
        assert 0 < record.lease_until - record.now <= LEASE
        assert record.created_at <= record.now
        assert record.outcome is None

    def test_a_settled_record_is_given_back_whole(self, store: Store, drive: Drive, operation: Operation) -> None:
        """CASES 16, 19: what is stored comes back byte for byte, repeated headers included."""
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(lease, DONE, retention=RETENTION, note="seen"))
        record = drive(store.claim(operation, lease=LEASE))
        assert (record.state, record.outcome, record.note, record.attempts) == ("settled", DONE, "seen", 1)
        assert record.response_hash == DONE.digest()
        assert record.settled_at >= record.created_at
        assert RETENTION - 5 < record.remaining <= RETENTION

    @pytest.mark.parametrize("body", [b"", b"\x00\xff\xfe", "žluťoučký".encode(), b"x" * 300_000])
    def test_any_body_comes_back_as_it_was(self, store: Store, drive: Drive, operation: Operation, body: bytes) -> None:
        """CASES 19: empty, binary and large bodies."""
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(lease, Outcome("response", 204, (), body), retention=RETENTION))
        assert drive(store.find(*operation.id)).outcome == Outcome("response", 204, (), body)

    @pytest.mark.parametrize("awkward", ["a:b", "{tag}", "%s %(x)s ?", "žluť\u2028", "' OR 1=1 --", "x" * 255, '"\\'])
    def test_any_text_can_be_scope_and_key(
        self, store: Store, drive: Drive, operation: Operation, awkward: str
    ) -> None:
        one = Operation(operation.scope + awkward, awkward, awkward, awkward)
        lease = drive(store.claim(one, lease=LEASE))
        drive(store.settle(lease, DONE, retention=RETENTION, note=awkward))
        record = drive(store.find(*one.id))
        assert (record.id, record.fingerprint, record.name, record.note) == (one.id, awkward, awkward, awkward)

    def test_a_text_may_be_of_a_class_of_its_own(self, store: Store, drive: Drive, operation: Operation) -> None:
        """A member of an enum, or what a template engine marked as safe, is the text that it is."""
        one = Operation(Marked(operation.scope), Marked("key"), Marked("c1:aa"), Marked("name"))
        lease = drive(store.claim(one, lease=LEASE))
        running = drive(store.claim(one, lease=LEASE))
        drive(store.watch(running))
        drive(store.settle(lease, DONE, retention=RETENTION, note=Marked("note")))
        record = drive(store.find(operation.scope, "key"))
        assert (running.id, record.id) == (one.id, one.id)
        assert (record.fingerprint, record.name, record.note) == ("c1:aa", "name", "note")
        listed = drive(store.list(Filter(scope=Marked(operation.scope), name=Marked("name")))).records
        assert [each.id for each in listed] == [record.id]
        assert drive(store.delete(*one.id))
        assert isinstance(drive(store.claim(operation, lease=LEASE)), Lease), "others are answered as ever"

    def test_scope_and_key_are_kept_apart(self, store: Store, drive: Drive, operation: Operation) -> None:
        """CASES 7: moving a character from the one to the other makes another operation."""
        base = operation.scope
        one, two = Operation(base + "a:", "b"), Operation(base + "a", ":b")
        assert isinstance(drive(store.claim(one, lease=LEASE)), Lease)
        assert isinstance(drive(store.claim(two, lease=LEASE)), Lease)

    def test_a_claim_with_another_fingerprint_gets_the_record_whatever_its_state(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        """CASES 14: in flight, after a failure, after the lease, and after settling."""
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

    # What was asked

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

    # Claims whose callers are gone

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

    def test_a_released_record_is_claimed_again(self, store: Store, drive: Drive, operation: Operation) -> None:
        first = drive(store.claim(operation, lease=LEASE))
        drive(store.release(first, retention=RETENTION))
        second = drive(store.claim(operation, lease=LEASE))
        assert (second.attempt, second.lapsed) == (2, False)
        assert second.token > first.token

    def test_a_lapsed_lease_is_taken_over(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        """CASES 24: no reaper is needed; the next claim is told that a holder vanished."""
        first = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        second = drive(store.claim(operation, lease=LEASE))
        assert (second.attempt, second.lapsed) == (2, True)
        assert second.token > first.token

    def test_a_renewed_lease_does_not_lapse(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE - 5)
        renewed = drive(store.renew(lease, lease=LEASE))
        assert renewed.expires_at > lease.expires_at
        clock.advance(LEASE - 5)
        assert drive(store.claim(operation, lease=LEASE)).state == "running"

    def test_a_lease_can_be_ended_at_once(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.renew(lease, lease=0.0))
        assert drive(store.claim(operation, lease=LEASE)).lapsed

    @pytest.mark.parametrize("verb", ["renew", "settle", "release", "hold"])
    def test_a_late_owner_is_fenced(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock, verb: str
    ) -> None:
        """CASES 24: every write of an owner whose operation was taken over is refused, and changes nothing."""
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
    def test_an_owner_of_a_former_life_is_fenced(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock, verb: str
    ) -> None:
        """CASES 53: tokens grow even when the record was deleted, or expired and purged, in between."""
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
    def test_the_same_write_may_come_twice(self, store: Store, drive: Drive, operation: Operation, verb: str) -> None:
        """An answer that was lost on the way is asked for again; the second write changes nothing."""
        lease = drive(store.claim(operation, lease=LEASE))
        drive(write(store, verb, lease))
        before = drive(store.find(*operation.id))
        drive(write(store, verb, lease))
        after = drive(store.find(*operation.id))
        assert (after.state, after.outcome, after.token) == (before.state, before.outcome, before.token)

    def test_settled_is_final(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        drive(store.settle(lease, DONE, retention=RETENTION))
        drive(store.settle(lease, Outcome("response", 500), retention=RETENTION))
        for verb in ("renew", "release", "hold"):
            with pytest.raises(Fenced):
                drive(write(store, verb, lease))
        assert drive(store.find(*operation.id)).outcome == DONE

    def test_an_owner_whose_lease_lapsed_unnoticed_may_settle(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        clock.advance(LEASE + 1)
        drive(store.settle(lease, DONE, retention=RETENTION))
        assert drive(store.find(*operation.id)).state == "settled"

    # Retention

    @pytest.mark.parametrize("verb", ["settle", "release"])
    def test_an_expired_record_is_as_good_as_none(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock, verb: str
    ) -> None:
        """CASES 29."""
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
        """CASES 29: what is unfinished stays until someone finishes it."""
        held = Operation(operation.scope, "held")
        drive(store.hold(drive(store.claim(held, lease=LEASE)), note="why"))
        drive(store.claim(operation, lease=LEASE))
        clock.advance(1000 * RETENTION)
        drive(store.purge())
        assert drive(store.find(*held.id)).note == "why"
        assert drive(store.find(*operation.id)).state == "running"
        assert drive(store.claim(operation, lease=LEASE)).lapsed

    def test_a_touched_record_lives_on(self, store: Store, drive: Drive, operation: Operation, clock: Clock) -> None:
        drive(store.settle(drive(store.claim(operation, lease=LEASE)), DONE, retention=RETENTION))
        clock.advance(RETENTION - 10)
        record = drive(store.find(*operation.id))
        drive(store.touch(record, retention=RETENTION))
        clock.advance(RETENTION - 10)
        touched = drive(store.find(*operation.id))
        assert touched.outcome == DONE
        assert touched.accessed_at > record.accessed_at

    def test_purge_takes_only_what_has_expired_a_batch_at_a_time(
        self, store: Store, drive: Drive, operation: Operation, clock: Clock
    ) -> None:
        """CASES 29."""
        old = [Operation(operation.scope, f"old-{n}") for n in range(5)]
        for each in old:
            drive(store.settle(drive(store.claim(each, lease=LEASE)), DONE, retention=RETENTION))
        drive(store.settle(drive(store.claim(operation, lease=LEASE)), DONE, retention=9 * RETENTION))
        clock.advance(RETENTION + 1)
        while gone := drive(store.purge(batch=2)):
            assert 0 < gone <= 2
        assert drive(store.find(*operation.id)).outcome == DONE
        assert all(drive(store.find(*each.id)) is None for each in old)

    def test_an_audited_record_is_archived_when_it_expires(
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
