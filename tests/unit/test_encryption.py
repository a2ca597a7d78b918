"""Encryption at rest: the store shows nothing of an outcome, and a changed or moved outcome is refused."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oncemore import Guard, Operation, Outcome, Policy, Resolution, once
from oncemore._ledger.events import Event
from oncemore._runtime.plan import run
from oncemore.encryption import Seal
from oncemore.errors import ConfigurationError, CorruptRecord, UnknownOutcome
from oncemore.stores.memory import MemoryStore

KEY, OTHER = b"k" * 32, b"o" * 32
PAYMENT = Operation("refunds.create:principal:alice", "key-1", "c1:aa", "refunds.create")
SECRET = Outcome("response", 201, (("location", "/refunds/rf_secret"),), b'{"iban": "DE-secret"}')

texts = st.text(max_size=20)
outcomes = st.builds(
    Outcome,
    st.sampled_from(["response", "value", "error", "tombstone"]),
    st.integers(0, 599),
    st.lists(st.tuples(st.text(), st.text()), max_size=4).map(tuple),
    st.binary(max_size=200),
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def test_raw_key_as_seal_is_refused_and_not_shown() -> None:
    key: Any = b"secret" * 6
    with pytest.raises(ConfigurationError, match=r"write Seal\(key\), from oncemore\.encryption") as refused:
        Guard("memory://", seal=key)
    assert "secret" not in str(refused.value)


@pytest.fixture
def sealed(store: MemoryStore) -> Iterator[Guard]:
    """A guard on *store* without a cache, so each replay is read from the store."""
    with closing(Guard(store, seal=Seal([KEY]), cache=0)) as guard:
        yield guard


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "once.db"


@pytest.fixture
def guard(file: Path) -> Iterator[Guard]:
    with closing(Guard(f"sqlite:///{file}", seal=Seal([KEY]), cache=0)) as guard:
        yield guard


def stored_outcome(store: MemoryStore, operation: Operation = PAYMENT) -> Outcome:
    """Return the outcome as a reader of the store sees it."""
    record = run(store.find(*operation.id))
    assert record is not None
    assert record.outcome is not None
    return record.outcome


def overwrite_outcome(store: MemoryStore, operation: Operation, outcome: Outcome) -> None:
    """Replace a stored outcome, as an attacker with write access could."""
    record = store._records[operation.id]
    store._records[operation.id] = msgspec.structs.replace(record, outcome=outcome)


class TestSeal:
    @given(scope=texts, key=texts, outcome=outcomes)
    def test_open_returns_the_sealed_outcome(self, scope: str, key: str, outcome: Outcome) -> None:
        seal = Seal([KEY])
        assert seal.open((scope, key), seal.seal((scope, key), outcome)) == outcome

    @given(first=st.tuples(texts, texts), second=st.tuples(texts, texts), outcome=outcomes)
    def test_open_under_another_record_is_corrupt(
        self, first: tuple[str, str], second: tuple[str, str], outcome: Outcome
    ) -> None:
        """Also if scope and key of both records are equal when joined."""
        assume(first != second)
        seal = Seal([KEY])
        with pytest.raises(CorruptRecord, match="cannot be decrypted"):
            seal.open(second, seal.seal(first, outcome))

    @given(data=st.data(), outcome=outcomes)
    def test_one_changed_bit_is_corrupt(self, data: st.DataObject, outcome: Outcome) -> None:
        seal = Seal([KEY])
        sealed = seal.seal(PAYMENT.id, outcome)
        body = bytearray(sealed.body)
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(CorruptRecord):
            seal.open(PAYMENT.id, msgspec.structs.replace(sealed, body=bytes(body)))

    @given(length=st.integers(0, 40))
    def test_shortened_outcome_is_corrupt(self, length: int) -> None:
        seal = Seal([KEY])
        sealed = seal.seal(PAYMENT.id, SECRET)
        with pytest.raises(CorruptRecord):
            seal.open(PAYMENT.id, msgspec.structs.replace(sealed, body=sealed.body[:length]))

    @pytest.mark.parametrize("change", [{"status": 200}, {"kind": "tombstone"}])
    def test_changed_status_or_kind_is_corrupt(self, change: dict[str, Any]) -> None:
        seal = Seal([KEY])
        with pytest.raises(CorruptRecord):
            seal.open(PAYMENT.id, msgspec.structs.replace(seal.seal(PAYMENT.id, SECRET), **change))

    def test_sealed_outcome_hides_headers_and_body(self) -> None:
        sealed = Seal([KEY]).seal(PAYMENT.id, SECRET)
        assert b"secret" not in msgspec.msgpack.encode(sealed)
        assert (sealed.kind, sealed.status) == ("response", 201)

    def test_equal_outcomes_are_sealed_differently(self) -> None:
        seal = Seal([KEY])
        assert len({seal.seal(PAYMENT.id, SECRET).body for _ in range(100)}) == 100

    def test_rotated_keys_open_older_outcomes(self) -> None:
        """During a deployment, processes with the old and the new list of keys read each other's outcomes."""
        old, both, new = Seal([OTHER]), Seal([KEY, OTHER]), Seal([KEY])
        assert both.open(PAYMENT.id, old.seal(PAYMENT.id, SECRET)) == SECRET
        assert new.open(PAYMENT.id, both.seal(PAYMENT.id, SECRET)) == SECRET
        with pytest.raises(CorruptRecord, match="a key that Seal was not given"):
            new.open(PAYMENT.id, old.seal(PAYMENT.id, SECRET))

    def test_unsealed_outcome_is_corrupt_unless_plain_is_allowed(self) -> None:
        with pytest.raises(CorruptRecord, match="plain=True"):
            Seal([KEY]).open(PAYMENT.id, SECRET)
        assert Seal([KEY], plain=True).open(PAYMENT.id, SECRET) == SECRET

    @pytest.mark.parametrize("keys", [[], [b"short"], KEY, "text", ["k" * 32], None])
    def test_malformed_keys_are_refused(self, keys: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"bytes"):
            Seal(keys)

    def test_keys_may_be_an_iterator(self) -> None:
        sealed = Seal(iter([KEY])).seal(PAYMENT.id, SECRET)
        assert Seal([KEY]).open(PAYMENT.id, sealed) == SECRET


class TestGuard:
    def test_sqlite_file_has_no_plain_outcome(self, guard: Guard, file: Path) -> None:
        guard.run(PAYMENT, lambda op: SECRET)
        guard.store.close()
        stored = b"".join(part.read_bytes() for part in file.parent.iterdir())
        assert b"key-1" in stored, "the file is the ledger"
        assert b"secret" not in stored

    def test_replay_returns_the_first_outcome(self, guard: Guard) -> None:
        first = guard.run(PAYMENT, lambda op: SECRET)
        again = guard.run(PAYMENT, lambda op: pytest.fail("performed twice"))
        assert (first.how, again.how, again.outcome) == ("stored", "replayed", SECRET)

    def test_once_replays_an_empty_list(self, sealed: Guard) -> None:
        calls: list[int] = []

        @once(sealed, key="{number}")
        def send(number: int) -> list[int]:
            calls.append(number)
            return []

        assert (send(1), send(1), calls) == ([], [], [1])

    def test_find_decrypts_and_list_does_not(self, guard: Guard) -> None:
        guard.run(PAYMENT, lambda op: SECRET)
        found = guard.find(*PAYMENT.id)
        assert found is not None
        assert found.outcome == SECRET
        (listed,) = guard.list().records
        assert listed.outcome is not None
        assert b"secret" not in listed.outcome.body
        assert guard.find("nobody", "nothing") is None

    def test_resolved_outcome_is_sealed(self, sealed: Guard, store: MemoryStore) -> None:
        run(store.claim(PAYMENT, lease=0.001))
        sealed.store.shift = 10.0
        with pytest.raises(UnknownOutcome):
            sealed.run(PAYMENT, lambda op: pytest.fail("its outcome is unknown"))
        assert sealed.store.shift == store.shift == 10.0
        assert sealed.resolve(*PAYMENT.id, Resolution.settled(SECRET)).outcome == SECRET
        assert b"secret" not in stored_outcome(store).body
        assert sealed.run(PAYMENT, lambda op: pytest.fail("it had happened")).outcome == SECRET

    def test_resolve_as_released_runs_again(self, sealed: Guard, store: MemoryStore) -> None:
        run(store.claim(PAYMENT, lease=0.001))
        sealed.store.shift = 10.0
        assert sealed.resolve(*PAYMENT.id, Resolution.released()).outcome is None
        assert sealed.run(PAYMENT, lambda op: SECRET).how == "stored"

    def test_unique_by_replay_is_decrypted(self, sealed: Guard, store: MemoryStore) -> None:
        first, second = (Operation("s", key, unique="order-7", name="pay") for key in ("a", "b"))
        sealed.run(first, lambda op: SECRET)
        assert sealed.run(second, lambda op: pytest.fail("paid twice")).outcome == SECRET
        assert all(b"secret" not in stored_outcome(store, one).body for one in (first, second))

    def test_suspected_duplicate_replay_is_decrypted(self, sealed: Guard) -> None:
        policy, twin = Policy(suspect="replay"), msgspec.structs.replace(PAYMENT, key="key-2")
        sealed.run(PAYMENT, lambda op: SECRET, policy=policy)
        assert sealed.run(twin, lambda op: pytest.fail("the same request"), policy=policy).outcome == SECRET

    def test_swapped_outcomes_are_corrupt_and_nothing_runs(self, sealed: Guard, store: MemoryStore) -> None:
        """Write access to the store does not suffice to answer one caller with another's response."""
        told: list[Event] = []
        sealed.observers = (told.append,)
        mine, theirs = Operation("s:alice", "k"), Operation("s:bob", "k")
        sealed.run(mine, lambda op: b"mine")
        sealed.run(theirs, lambda op: b"theirs")
        overwrite_outcome(store, mine, stored_outcome(store, theirs))
        with pytest.raises(CorruptRecord) as refused:
            sealed.run(mine, lambda op: pytest.fail("performed twice"))
        assert (refused.value.status, refused.value.retryable) == (503, True)
        assert (told[-1].kind, told[-1].code) == ("failed", "TRANSIENT.idempotency.record_corrupt")

    def test_plain_seal_replays_outcomes_stored_before_it(self, store: MemoryStore) -> None:
        with closing(Guard(store)) as before:
            before.run(PAYMENT, lambda op: SECRET)
        with closing(Guard(store, seal=Seal([KEY], plain=True), cache=0)) as after:
            assert after.run(PAYMENT, lambda op: pytest.fail("performed twice")).outcome == SECRET

    async def test_async_replay_is_decrypted(self, sealed: Guard) -> None:
        await sealed.arun(PAYMENT, lambda op: SECRET)
        assert (await sealed.arun(PAYMENT, lambda op: pytest.fail("performed twice"))).outcome == SECRET

    def test_stored_digest_is_of_the_sealed_body(self, guard: Guard, file: Path) -> None:
        """A short body can be guessed from its digest, so only the digest of the sealed body is stored."""
        guard.run(PAYMENT, lambda op: SECRET)
        found = guard.find(*PAYMENT.id)
        assert found is not None
        assert found.response_hash
        assert found.response_hash != SECRET.digest()
        with closing(sqlite3.connect(file)) as connection:
            dump = "\n".join(connection.iterdump())
        assert SECRET.digest() not in dump

    def test_request_is_sealed_in_the_store_only(self, sealed: Guard, store: MemoryStore) -> None:
        run(sealed.store.claim(PAYMENT, lease=30.0, request=b"iban DE-secret"))
        assert b"secret" not in run(store.find(*PAYMENT.id)).request
        assert run(sealed.store.find(*PAYMENT.id)).request == b"iban DE-secret"
        assert run(sealed.store.claim(PAYMENT, lease=30.0)).request == b"iban DE-secret"

    def test_request_moved_to_another_record_is_corrupt(self, sealed: Guard, store: MemoryStore) -> None:
        run(sealed.store.claim(PAYMENT, lease=30.0, request=b"asked"))
        moved = Operation(PAYMENT.scope, "key-2")
        run(store.claim(moved, lease=30.0, request=run(store.find(*PAYMENT.id)).request))
        with pytest.raises(CorruptRecord):
            run(sealed.store.find(*moved.id))

    def test_request_stored_before_the_seal_needs_plain(self, store: MemoryStore) -> None:
        run(store.claim(PAYMENT, lease=30.0, request=b"asked"))
        with closing(Guard(store, seal=Seal([KEY]))) as strict, pytest.raises(CorruptRecord):
            strict.find(*PAYMENT.id)
        with closing(Guard(store, seal=Seal([KEY], plain=True))) as lenient:
            assert lenient.find(*PAYMENT.id).request == b"asked"
