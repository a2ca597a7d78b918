"""The PostgreSQL store keeps its guarantees when processes race, are killed or frozen, or the server is restarted."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from oncemore._contract.policy import Policy
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Lease, Operation, Outcome
from oncemore._runtime.plan import run
from oncemore.errors import InProgress, OncemoreError, StoreError, UnknownOutcome
from oncemore.stores.postgres import PostgresStore
from oncemore.testing.stores import DONE, LEASE, RETENTION
from tests.support import processes
from tests.support.servers import PostgresServer

CHILD = Path(__file__).with_name("children.py")
SERIALIZABLE = quote("-c default_transaction_isolation=serializable")


class Child:
    """Another process, which runs one of the tasks in children.py."""

    def __init__(self, url: str, task: str) -> None:
        command = [sys.executable, str(CHILD), url, task]
        self.process = processes.Program(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def hear(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        return line.strip()

    def tell(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def signal(self, which: signal.Signals) -> None:
        self.process.send_signal(which)


@contextmanager
def children(url: str, task: str, count: int = 1) -> Iterator[list[Child]]:
    made = [Child(url, task) for _ in range(count)]
    try:
        yield made
    finally:
        for child in made:
            child.process.kill()
            child.process.communicate()


# Other processes


def test_16_processes_on_empty_database_grant_one_lease(url: str) -> None:
    """They race first to create the tables, and then to claim the key."""
    with children(url, "claim", 16) as processes:
        for process in processes:
            assert process.hear() == "ready"
        for process in processes:
            process.tell()
        found = [process.hear().split() for process in processes]
    assert sorted(name for name, _ in found) == ["Lease"] + ["Record"] * 15
    assert len({token for _, token in found}) == 1


def test_serialization_failures_are_retried_by_the_store(url: str) -> None:
    """Four processes claim the same keys in the strictest isolation, and none of them gets an error."""
    with children(f"{url}&options={SERIALIZABLE}&timeout=30s", "contend", 4) as processes:
        for process in processes:
            assert process.hear() == "ready"
        for process in processes:
            process.tell()
        assert sum(int(process.hear()) for process in processes) == 60


@pytest.mark.chaos
def test_key_of_killed_holder_is_free_after_its_lease(store: PostgresStore, url: str) -> None:
    with children(url, "settle") as (child,):
        token = int(child.hear())
        child.signal(signal.SIGKILL)
        record = run(store.claim(Operation("s", "k"), lease=LEASE))
        assert (record.state, record.token) == ("running", token)
        store.shift += LEASE + 1
        lease = run(store.claim(Operation("s", "k"), lease=LEASE))
        assert (lease.lapsed, lease.attempt) == (True, 2)
        assert lease.token > token


@pytest.mark.chaos
def test_frozen_holder_is_fenced_on_every_verb(store: PostgresStore, url: str) -> None:
    with children(url, "hold") as (child,):
        token = int(child.hear())
        child.signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while not isinstance(found := run(store.claim(Operation("s", "k"), lease=LEASE)), Lease):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert found.lapsed
        assert found.token > token
        child.signal(signal.SIGCONT)
        child.tell()
        assert [child.hear() for _ in range(4)] == ["renew Fenced", "settle Fenced", "release Fenced", "hold Fenced"]
    run(store.settle(found, DONE, retention=RETENTION))
    assert run(store.find("s", "k")).outcome == DONE


def test_waiter_is_woken_by_another_process(url: str) -> None:
    store = PostgresStore(f"{url}&poll=30s")
    with children(url, "settle") as (child,), store.wakeups.waiting(("s", "k")) as waiter:
        child.hear()
        record = run(store.claim(Operation("s", "k"), lease=LEASE))
        run(store.watch(record))
        time.sleep(0.5)  # the listener has connected by now, and woken everyone once
        waiter.disarm()
        child.tell()
        waiter.wait(store.poll).run()
        woken = time.time()
        assert run(store.claim(Operation("s", "k"), lease=LEASE)).state == "settled"
        assert woken - float(child.hear()) < 5  # in truth, milliseconds
    store.close()


# The server


@pytest.mark.chaos
def test_server_restart_under_load_causes_no_second_effect(own_postgres: PostgresServer) -> None:
    """Each key is performed at most once, and none is blocked longer than its lease."""
    policy = Policy(lease=LEASE, wait=0.2, on_unknown="hold")
    performed: Counter[str] = Counter()
    answers: list[tuple[str, bytes]] = []
    errors: list[OncemoreError] = []
    over = threading.Event()

    def work(seed: int, guard: Guard) -> None:
        n = 0
        while not over.is_set():
            n += 1
            key = f"{(seed * 7 + n) // 3}"  # several workers come to the same key, several times
            try:
                answer = guard.run(Operation("s", key, key), lambda op: perform(op.key), policy=policy)
                answers.append((key, answer.outcome.body))
            except OncemoreError as error:
                errors.append(error)

    def perform(key: str) -> Outcome:
        performed[key] += 1
        return Outcome("response", 200, (), key.encode())

    guards = [Guard(own_postgres.url, cache=0) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, seed, guards[seed % 2]) for seed in range(8)]
        for _ in range(2):
            time.sleep(1.0)
            own_postgres.restart(immediate=True)
        time.sleep(1.0)
        over.set()
        for worker in workers:
            worker.result()
    assert len(performed) > 50
    assert set(performed.values()) == {1}
    assert all(body == key.encode() for key, body in answers)
    assert all(isinstance(error, StoreError | InProgress | UnknownOutcome) for error in errors), errors
    store = PostgresStore(own_postgres.url)
    store.shift = LEASE + 1
    for key in performed:
        found = run(store.claim(Operation("s", key, key), lease=LEASE))
        assert isinstance(found, Lease) or found.state == "settled", found
        if not isinstance(found, Lease):
            assert found.outcome == Outcome("response", 200, (), key.encode())
    for guard in guards:
        guard.close()
    store.close()


@pytest.mark.chaos
def test_tokens_grow_across_server_restarts(own_postgres: PostgresServer) -> None:
    store = PostgresStore(own_postgres.url)
    tokens = []
    for _ in range(3):
        lease = run(store.claim(Operation("s", "k"), lease=LEASE))
        tokens.append(lease.token)
        run(store.release(lease, retention=RETENTION))
        own_postgres.restart(immediate=True)
    assert tokens == sorted(set(tokens))
    store.close()
