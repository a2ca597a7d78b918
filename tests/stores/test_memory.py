"""The memory store keeps the contract; it is also the model for the others."""

import pytest

from oncemore._ledger.store import Filter
from oncemore._runtime.plan import run
from oncemore.errors import InvalidPayload
from oncemore.stores import connect, schema
from oncemore.stores.memory import MemoryStore
from oncemore.testing.machine import store_machine
from oncemore.testing.stores import StoreContract


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


class TestMemoryMachine(store_machine(MemoryStore).TestCase):  # type: ignore[misc]
    """The machine agrees with itself; what it proves, it proves of the other stores."""
