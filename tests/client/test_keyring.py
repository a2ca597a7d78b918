"""The keyrings: what is claimed is there before anything is sent, and each entry has one owner at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from oncemore import Guard
from oncemore._runtime.plan import arun, run
from oncemore.client.errors import KeyReused, KeyringError
from oncemore.client.keyring import MemoryKeyring, open_keyring
from oncemore.client.keyring.entry import Entry, Keyring
from oncemore.client.keyring.sqlite import SqliteKeyring, is_alive, this_process
from oncemore.client.retry import Retry
from oncemore.errors import ConfigurationError

from ..support.processes import separate_processes
from .clients import Httpx
from .server import Server

RETRY = Retry(base=0.005, cap=0.01, budget=None)
BODY = b'{"amount": 100}'
JSON = {"Content-Type": "application/json"}


SERVERS = [pytest.param(name, marks=pytest.mark.server) for name in ("postgres", "valkey")]


@pytest.fixture(params=["memory", "sqlite", "guard", *SERVERS])
def keyring(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keyring]:
    if request.param in ("postgres", "valkey"):
        place = request.getfixturevalue(f"{request.param}_place")
    else:
        place = {"memory": "memory://", "sqlite": f"sqlite:///{tmp_path}/keys.db", "guard": Guard("memory://")}[
            request.param
        ]
    ring = open_keyring(place)
    yield ring
    ring.close()


def entry(key: str = "k1", body: bytes = BODY, token: int = 1, created_at: float | None = None) -> Entry:
    return Entry(
        scope="POST http://h/p",
        key=key,
        fingerprint=f"r1:{body.hex()}",
        method="POST",
        url="http://h/p",
        headers=(("Content-Type", "application/json"),),
        body=body,
        created_at=time.time() if created_at is None else created_at,
        token=token,
    )


def claim(keyring: Keyring, one: Entry) -> Entry:
    return run(keyring.claim(one, oldest=time.time() - 3600))


def adopt_all(keyring: Keyring, *, opened: bool = False) -> list[Entry]:
    """Adopt the entries that `resume` would send."""
    found = [one for one in run(keyring.pending()) if one.state == "sending" or opened]
    return [adopted for one in found if (adopted := run(keyring.adopt(one)))]


def test_a_claim_gives_back_what_was_written(keyring: Keyring) -> None:
    one = entry()
    held = claim(keyring, one)
    assert replace(held, owner=0) == one


def test_a_second_claim_keeps_the_first_date(keyring: Keyring) -> None:
    first = claim(keyring, entry(created_at=time.time() - 60))
    assert claim(keyring, entry(token=2)).created_at == first.created_at


def test_a_key_is_refused_for_another_payload(keyring: Keyring) -> None:
    """In flight, left open, and settled."""
    held = claim(keyring, entry())
    for step in (None, keyring.leave(held), keyring.settle(held, 201)):
        if step is not None:
            run(step)
        with pytest.raises(KeyReused):
            claim(keyring, entry(body=b"other", token=2))


def test_the_same_key_elsewhere_is_another_operation(keyring: Keyring) -> None:
    claim(keyring, entry())
    claim(keyring, replace(entry(body=b"other"), scope="POST http://h/elsewhere"))


def test_key_older_than_server_memory_is_unchanged(keyring: Keyring) -> None:
    old = claim(keyring, entry(created_at=time.time() - 3599))
    time.sleep(0.01)
    held = run(keyring.claim(entry(token=2), oldest=time.time() - 3599))
    assert (held.token, held.created_at) == (1, old.created_at)


def test_a_key_from_the_future_has_no_known_age(keyring: Keyring) -> None:
    """The clock was set back by an hour."""
    claim(keyring, entry(created_at=time.time() + 3600))
    assert claim(keyring, entry(token=2)).token == 1


def test_only_the_unsettled_is_pending(keyring: Keyring) -> None:
    for number, verb in enumerate(["settle", "leave", "forget"]):
        held = claim(keyring, entry(f"k{number}"))
        run(getattr(keyring, verb)(held, *([201] if verb == "settle" else [])))
    assert [one.key for one in run(keyring.pending())] == ["k1"]
    assert adopt_all(keyring) == []
    assert [one.key for one in adopt_all(keyring, opened=True)] == ["k1"]


def test_pending_entry_is_adopted_once_until_released(keyring: Keyring) -> None:
    run(keyring.leave(claim(keyring, entry())))
    [listed] = run(keyring.pending())
    adopted = run(keyring.adopt(listed))
    assert adopted is not None
    assert run(keyring.adopt(listed)) is None
    assert run(keyring.pending()) == []
    run(keyring.release(adopted))
    assert [one.state for one in run(keyring.pending())] == ["open"]
    again = run(keyring.adopt(run(keyring.pending())[0]))
    assert again is not None
    run(keyring.settle(claim(keyring, replace(again, created_at=time.time())), 201))
    assert run(keyring.adopt(listed)) is None
    assert run(keyring.pending()) == []


@pytest.mark.parametrize("keyring", ["sqlite"], indirect=True)
def test_keyring_leave_and_forget_do_not_affect_newer_call(keyring: Keyring) -> None:
    first = claim(keyring, entry())
    claim(keyring, entry(token=2))
    run(keyring.leave(first))
    run(keyring.forget(first))
    assert run(keyring.pending()) == []
    run(keyring.leave(entry(token=2)))
    assert len(run(keyring.pending())) == 1


def test_settled_bodies_are_dropped(tmp_path: Path) -> None:
    ring = SqliteKeyring(str(tmp_path / "keys.db"))
    run(ring.settle(claim(ring, entry()), 201))
    rows = sqlite3.connect(tmp_path / "keys.db").execute("SELECT state, status, body FROM oncemore_keys").fetchall()
    assert rows == [("settled", 201, None)]


def test_retention_drops_settled_keys_but_no_pending_ones(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.db")
    ring = SqliteKeyring(path)
    for key, verb in (("done", "settle"), ("open", "leave")):
        old = entry(key, created_at=time.time() - 100)
        held = run(ring.claim(old, oldest=0))
        run(getattr(ring, verb)(held, *([201] if verb == "settle" else [])))
    ring.close()
    again = SqliteKeyring(path, retention=50)
    assert [one.key for one in run(again.pending())] == ["open"]
    assert run(again.claim(entry("done", body=b"other"), oldest=0)).body == b"other"


def test_a_process_that_lives_on_forgets_settled_keys_too(tmp_path: Path) -> None:
    """Nobody opens the file again for months."""
    ring = SqliteKeyring(str(tmp_path / "keys.db"), retention=50)
    now = time.time()
    for number in range(200):
        held = run(ring.claim(entry(f"k{number}", created_at=now + number), oldest=0))
        run(ring.leave(held) if number == 0 else ring.settle(held, 201))
    rows = sqlite3.connect(ring.path).execute("SELECT key FROM oncemore_keys").fetchall()
    assert ("k0",) in rows
    assert len(rows) < 60


def test_memory_drops_settled_keys_too() -> None:
    ring = MemoryKeyring(retention=50)
    for number in range(3000):
        ring.store.shift = float(number)  # a second passes
        run(ring.settle(run(ring.claim(entry(f"k{number}", token=number), oldest=0)), 201))
    assert len(ring.store._records) < 1500  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "place",
    ["sqlite://", "sqlite:///", "keys.db", "sqlite://host/keys.db", "sqlite:///:memory:", Path("keys.db"), 17, None],
)
def test_an_unknown_keyring_is_named(place: Any) -> None:
    with pytest.raises(ConfigurationError, match="sqlite:///"):
        open_keyring(place)


def test_sqlite_url_takes_retention_and_encoded_path(tmp_path: Path) -> None:
    ring = open_keyring(f"sqlite:///{tmp_path}/my%20keys.db?retention=30d")
    assert isinstance(ring, SqliteKeyring)
    assert (ring.path, ring.retention) == (str(tmp_path / "my keys.db"), 30 * 86400.0)


@pytest.mark.parametrize(
    ("url", "mistake"),
    [
        ("sqlite:///keys.db?lease=5s", "lease=5s"),
        ("sqlite:///keys.db?retentoin=5d", "retentoin"),
        ("memory://?retention=soon", "retention=soon"),
        ("postgresql://h/d?lease=0s", "lease=0s"),
    ],
)
def test_an_option_that_a_keyring_does_not_have_is_named(url: str, mistake: str) -> None:
    with pytest.raises(ConfigurationError, match=mistake):
        open_keyring(url)


def test_a_keyring_that_cannot_be_written_sends_nothing(tmp_path: Path) -> None:
    (tmp_path / "keys.db").write_text("this is not a database, but it is long enough to be taken for one" * 20)
    with Server() as server, pytest.raises(KeyringError, match=r"keys\.db"):
        Httpx(RETRY, f"sqlite:///{tmp_path}/keys.db").request("POST", server.url, BODY)
    assert not server.visits


@pytest.mark.parametrize("verb", ["claim", "pending", "adopt"])
def test_keyring_file_in_missing_folder_is_named(verb: str, tmp_path: Path) -> None:
    ring = SqliteKeyring(str(tmp_path / "nowhere" / "keys.db"))
    plans: Any = {"claim": ring.claim(entry(), oldest=0), "pending": ring.pending(), "adopt": ring.adopt(entry())}
    with pytest.raises(KeyringError, match="nowhere"):
        run(plans[verb])


def test_fork_does_not_inherit_memory_keyring_lock() -> None:
    """Another thread was at the keyring in memory when the process forked."""
    ring = MemoryKeyring()
    with ring.store._lock:  # type: ignore[attr-defined]
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            claim(ring, entry())
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("error", [KeyringError("disk full"), RuntimeError("cannot schedule new futures")], ids=type)
def test_a_keyring_that_fails_afterwards_does_not_lose_the_answer(error: Any, tmp_path: Path, caplog: Any) -> None:

    class Full(SqliteKeyring):
        def _write(self, statement: str, *values: Any) -> bool:
            raise error

    with Server() as server:
        assert Httpx(RETRY, Full(str(tmp_path / "keys.db"))).request("POST", server.url, BODY).status == 201
    assert "stays pending" in caplog.text


def test_interrupt_while_file_is_locked_releases_it(tmp_path: Path) -> None:
    """Ctrl-C, while another process has the lock: the signal is noticed when our turn has come."""
    ring = SqliteKeyring(str(tmp_path / "keys.db"))
    claim(ring, entry("first"))
    other = sqlite3.connect(ring.path, isolation_level=None, timeout=2, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    timers = [
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)),
        threading.Timer(0.6, other.execute, ("COMMIT",)),
    ]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        claim(ring, entry("second"))
    timers[1].join()
    other.execute("BEGIN IMMEDIATE")
    other.execute("COMMIT")
    claim(ring, entry("second"))


async def test_a_claim_that_is_cancelled_is_taken_back_in_order(tmp_path: Path) -> None:
    ring = SqliteKeyring(str(tmp_path / "keys.db"))
    one = entry()
    task = asyncio.create_task(arun(ring.claim(one, oldest=0)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await arun(ring.leave(one))
    assert all(known.state == "open" for known in await arun(ring.pending()))


@pytest.mark.parametrize(("verb", "state"), [("settle", "settled"), ("leave", "open")])
async def test_keyring_ending_is_stored_despite_cancellation(verb: str, state: str, tmp_path: Path) -> None:
    """Otherwise it would be this process's to work on until it ends, and nobody would see it."""
    ring = SqliteKeyring(str(tmp_path / "keys.db"))
    held = await arun(ring.claim(entry(), oldest=0))
    other = sqlite3.connect(ring.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    before = asyncio.create_task(arun(ring.pending()))  # it waits for the lock, and the next one for it
    noting = asyncio.create_task(arun(ring.settle(held, 201) if verb == "settle" else ring.leave(held)))
    await asyncio.sleep(0.1)
    noting.cancel()
    await asyncio.gather(noting, return_exceptions=True)
    assert noting.cancelled()
    other.execute("COMMIT")
    await before
    await ring.aclose()
    assert other.execute("SELECT state FROM oncemore_keys").fetchall() == [(state,)]


# Many processes


def work(path: str, name: int, count: int) -> int:
    ring = SqliteKeyring(path)
    for number in range(count):
        held = run(ring.claim(entry(f"{name}-{number}"), oldest=0))
        run(ring.settle(held, 201))
    return count


def test_many_processes_and_threads_share_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.db")
    context = separate_processes()
    with context.Pool(8) as pool:
        assert pool.starmap(work, [(path, name, 40) for name in range(8)]) == [40] * 8
    ring = SqliteKeyring(path)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda name: work(path, name, 10), range(100, 108))) == [10] * 8
    assert run(ring.pending()) == []
    assert sqlite3.connect(path).execute("SELECT count(*) FROM oncemore_keys").fetchone() == (8 * 40 + 8 * 10,)


def test_forked_child_owns_its_own_entries(tmp_path: Path) -> None:
    ring = SqliteKeyring(str(tmp_path / "keys.db"))
    claim(ring, entry("parent"))
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            claim(ring, entry("child"))
            failed = int(adopt_all(ring) != [])  # the parent lives
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [one.key for one in run(ring.pending())] == ["child"]  # the child has died since
    run(ring.settle(claim(ring, entry("parent", token=2)), 201))


def test_forked_childs_entries_survive_parents_close(tmp_path: Path) -> None:
    ring = SqliteKeyring(str(tmp_path / "keys.db"))
    claim(ring, entry("parent"))
    begun, closed = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            claim(ring, entry("first"))
            os.write(begun[1], b"1")
            os.read(closed[0], 1)
            claim(ring, entry("second"))
        finally:
            os._exit(0)  # without a last word to the file, as when it is killed
    os.read(begun[0], 1)
    ring.close()
    os.write(closed[1], b"1")
    os.waitpid(child, 0)
    assert [one.key for one in run(ring.pending())] == ["first", "second"]


def test_concurrent_adopters_share_no_entry(tmp_path: Path) -> None:
    path = str(tmp_path / "keys.db")
    context = separate_processes()
    orphan = context.Process(target=leave_orphans, args=(path, 20))
    orphan.start()
    orphan.join()
    with context.Pool(4) as pool:
        taken = pool.map(adopt_and_wait, [path] * 4)
    assert sorted(key for keys in taken for key in keys) == sorted(f"k{number}" for number in range(20))


def leave_orphans(path: str, count: int) -> None:
    ring = SqliteKeyring(path)
    for number in range(count):
        run(ring.claim(entry(f"k{number}"), oldest=0))


def adopt_and_wait(path: str) -> list[str]:
    keys = [one.key for one in adopt_all(SqliteKeyring(path))]
    time.sleep(1)  # alive, so that nobody adopts them from here
    return keys


def test_a_process_is_alive_while_it_lives(tmp_path: Path) -> None:
    path = str(tmp_path / "owners")
    assert is_alive(path, this_process(path))
    assert not is_alive(path, this_process(path) + 1)
    with separate_processes().Pool(1) as pool:
        other = pool.apply(this_process, (path,))
        assert is_alive(path, other)
    assert not is_alive(path, other)


OPEN_AND_CLOSE = """
import sys
from oncemore._runtime.plan import run
from oncemore.client.keyring.sqlite import SqliteKeyring
keyring = SqliteKeyring(sys.argv[1])
run(keyring.pending())
keyring.close()
"""


def test_second_keyring_on_a_file_does_not_release_its_locks(tmp_path: Path) -> None:
    """Closing any descriptor of a file drops SQLite's locks on it; another process would then remove the log."""
    path = str(tmp_path / "keys.db")
    first = SqliteKeyring(path)
    claim(first, entry("0"))
    second = SqliteKeyring(path)
    run(second.pending())
    subprocess.run([sys.executable, "-c", OPEN_AND_CLOSE, path], check=True)
    for number in range(1, 6):
        claim(first, entry(str(number)))
    count = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT count(*) FROM oncemore_keys').fetchone()[0])"
    seen = subprocess.run([sys.executable, "-c", count, path], check=True, capture_output=True, text=True).stdout
    assert int(seen) == 6
    second.close()
    first.close()
