"""A ledger works after its table was partitioned as the page on capacity describes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
import pytest

from oncemore._ledger.model import Lease, Operation, Outcome
from oncemore._runtime.plan import run
from oncemore.stores.postgres import PostgresStore
from oncemore.testing.stores import StoreContract

PAGE = Path(__file__).parents[3] / "docs" / "explain" / "capacity.md"
[SCRIPT] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def partitioned(postgres_url: str, postgres_schema: str) -> str:
    """The URL of a ledger with one record, whose table was then partitioned."""
    url = f"{postgres_url}?schema={postgres_schema}"
    store = PostgresStore(url)
    settle(store, "before")
    store.close()
    with psycopg.connect(postgres_url, autocommit=True, options=f"-c search_path={postgres_schema}") as server:
        server.execute(SCRIPT)
    return f"{url}&create=false"


def settle(store: PostgresStore, key: str, *, retention: float = 1000.0) -> None:
    lease = run(store.claim(Operation("s", key), lease=30))
    assert isinstance(lease, Lease)
    run(store.settle(lease, Outcome(body=b"x"), retention=retention))


class TestPartitionedPostgres(StoreContract):
    @pytest.fixture
    def store(self, partitioned: str) -> PostgresStore:
        store = PostgresStore(partitioned)
        run(store.delete("s", "before"))
        return store


def test_record_survives_partitioning(partitioned: str) -> None:
    store = PostgresStore(partitioned)
    record = run(store.find("s", "before"))
    assert record is not None
    assert record.outcome == Outcome(body=b"x")
    store.close()


def test_purge_spares_same_ctid_in_another_partition(partitioned: str, postgres_url: str, postgres_schema: str) -> None:
    """Rows of two partitions may have the same ctid, and only one of them has expired."""
    store = PostgresStore(partitioned)
    for number in range(60):
        settle(store, f"old-{number}", retention=0.001)
        settle(store, f"new-{number}")
    with psycopg.connect(postgres_url, options=f"-c search_path={postgres_schema}") as server:
        [(shared,)] = server.execute(
            "SELECT count(*) FROM oncemore_records a JOIN oncemore_records b"
            " ON a.ctid = b.ctid AND a.key LIKE 'old%' AND b.key LIKE 'new%'"
        ).fetchall()
    assert shared > 0  # or the test shows nothing
    removed = run(store.purge(batch=1000))
    left: Any = run(store.stats())
    store.close()
    assert (removed, left.settled, left.expired) == (60, 61, 0)
