"""SQLite on a failing disk: every fault is an error that names the file, and none looks like a settled record."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from oncemore._ledger.model import Lease, Operation
from oncemore._ledger.transactions import Statement
from oncemore._runtime.plan import arun, run
from oncemore.errors import StoreError, StoreUnavailable
from oncemore.stores.sqlite import SqliteStore, connect

from ..parts import DONE, HOUR
from . import children
from .children import CAN_FAIL, child

FAULTS = [("fsync fdatasync", "EIO"), ("pwrite64", "ENOSPC"), ("pwrite64", "EIO"), ("pwrite64 ftruncate", "EDQUOT")]


def states(store: SqliteStore) -> tuple[str | None, str | None]:
    """Return the states of the record to be settled, and of the record to be claimed."""
    found = [run(store.find("disk", key)) for key in ("key", "other")]
    store.close()
    return tuple(record and record.state for record in found)  # type: ignore[return-value]


@pytest.mark.chaos
@pytest.mark.skipif(not CAN_FAIL, reason="system calls can be made to fail on Linux only, on x86-64 and ARM")
@pytest.mark.parametrize("end", ["exit", "kill"])
@pytest.mark.parametrize(("calls", "error"), FAULTS)
def test_failed_write_is_an_error_and_no_record(
    store: SqliteStore, path: Path, calls: str, error: str, end: str
) -> None:
    """Nothing is written, whether the process lives, ends normally, or crashes and the file is recovered."""
    with child(children.settle_on_a_failing_disk, store.url, calls, error) as process:
        assert process.says().startswith(f"StoreError: {path}: the disk")
        assert process.says().startswith(f"StoreError: {path}: the disk")
        if end == "exit":
            assert states(store) == ("running", None)
            process.tell()
            assert process.wait() == 0
        else:
            process.kill()
            process.wait()
    assert states(store) == ("running", None)
    assert isinstance(run(store.claim(Operation("disk", "other"), lease=HOUR)), Lease)
    assert states(store) == ("running", "running")


def test_full_disk_within_own_transaction_is_a_store_error(store: SqliteStore, path: Path) -> None:
    """Relays, senders and schedules wait for a store that fails, and end if any other error comes out."""
    run(store.ready())
    transaction = store.tables.open()
    run(transaction.begin())
    run(transaction.execute((Statement("PRAGMA max_page_count = 20"), ())))
    with pytest.raises(StoreError, match="the disk is full") as told:
        run(transaction.execute((Statement("CREATE TABLE large AS SELECT randomblob(200000)"), ())))
    assert str(path) in str(told.value)
    run(transaction.rollback())


def test_full_disk_is_an_error_until_there_is_room(store: SqliteStore, path: Path) -> None:
    lease = run(store.claim(Operation("disk", "key"), lease=HOUR))
    assert isinstance(lease, Lease)
    large = type(DONE)(body=os.urandom(200_000))
    store._writer.use(lambda connection: connection.execute("PRAGMA max_page_count = 20").fetchall())
    with pytest.raises(StoreError, match="the disk is full") as told:
        run(store.settle(lease, large, retention=HOUR))
    assert str(path) in str(told.value)
    assert states(store) == ("running", None)
    run(store.settle(lease, large, retention=HOUR))  # the connection was made anew, and with it its limit
    assert states(store) == ("settled", None)


@pytest.mark.parametrize("damage", ["no database", "pages"])
def test_damaged_file_is_named_in_the_error(store: SqliteStore, path: Path, damage: str) -> None:
    for n in range(50):
        run(store.claim(Operation("disk", str(n)), lease=HOUR))
    store.close()
    whole = bytearray(path.read_bytes())
    page = 4096
    if damage == "pages":
        whole[page:] = os.urandom(len(whole) - page)
    else:
        whole[:page] = b"not a database, but something else of the same length".ljust(page)
    path.write_bytes(whole)
    with pytest.raises(StoreError, match=r"damaged|not a SQLite database") as told:
        run(store.claim(Operation("disk", "key"), lease=HOUR))
    assert str(path) in str(told.value)


def test_missing_folder_is_named_in_the_error(tmp_path: Path) -> None:
    store = connect(f"sqlite:///{tmp_path}/none/once.db")
    with pytest.raises(StoreUnavailable, match=r"none/once\.db: it cannot be opened"):
        run(store.find("disk", "key"))
    with pytest.raises(StoreUnavailable, match=r"none/once\.db: it cannot be opened"):
        asyncio.run(arun(store.claim(Operation("disk", "key"), lease=HOUR)))
    store.close()


@pytest.mark.parametrize("what", ["file", "folder"])
def test_unwritable_file_or_folder_is_a_store_error(store: SqliteStore, path: Path, what: str) -> None:
    run(store.claim(Operation("disk", "key"), lease=HOUR))
    store.close()
    path.chmod(0o444)
    if what == "folder":
        path.chmod(0o666)
        path.parent.chmod(0o555)
    with child(children.claim_as_nobody, store.url) as process:
        line = process.says()
    path.parent.chmod(0o755)
    assert line.startswith(("StoreError", "StoreUnavailable"))
    assert f"{path}: " in line
    assert "read-only" in line or "cannot be opened" in line
