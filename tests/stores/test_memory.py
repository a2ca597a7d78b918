"""The memory store keeps the contract; it is also the model for the others."""

import pytest

from oncemore.core.model import Lease, Operation, Outcome
from oncemore.core.plan import run
from oncemore.core.store import Filter, Stats
from oncemore.errors import InvalidPayload
from oncemore.stores import connect, schema
from oncemore.stores.memory import MemoryStore
from oncemore.testing.store_contract import StoreContract
from oncemore.testing.store_machine import store_machine


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()


def test_each_connection_is_a_ledger_of_its_own() -> None:
    assert connect("memory://") is not connect("memory://")


def test_memory_needs_no_schema() -> None:
    assert schema("memory://") == ""


@pytest.mark.parametrize("cursor", ["1.0.ab", "9" * 5000])
def test_a_cursor_of_another_origin_is_refused(cursor: str) -> None:
    with pytest.raises(InvalidPayload, match="cursor"):
        run(MemoryStore().list(Filter(), cursor=cursor))


def test_a_deletion_takes_nothing_from_the_audit() -> None:
    store = MemoryStore()
    lease = run(store.claim(Operation("scope", "key"), lease=1.0))
    assert isinstance(lease, Lease)
    run(store.settle(lease, Outcome(), retention=1.0, audit=True))
    store.shift += 2.0
    assert run(store.delete("scope", "key")) is False
    assert run(store.stats()) == Stats(archived=1)


class TestMemoryMachine(store_machine(MemoryStore).TestCase):  # type: ignore[misc]
    """The machine agrees with itself; what it proves, it proves of the other stores."""
