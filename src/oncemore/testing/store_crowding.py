"""What every store must do when many ask at once, or go away again."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._ledger.model import Lease, Operation, Record
from .._ledger.store import Store
from .._runtime.plan import arun, run
from ..errors import Fenced
from .store_parts import DONE, LEASE, RETENTION, Drive, Part, write


class Crowding(Part):
    """Threads, tasks, groups, cancellations and wake-ups."""

    # Many at once

    def test_24_threads_claim_one_key_and_one_wins(self, store: Store, operation: Operation) -> None:
        """CASES 52."""
        start = threading.Barrier(24)

        def claim(_: int) -> Lease | Record:
            start.wait()
            return run(store.claim(operation, lease=LEASE))

        with ThreadPoolExecutor(24) as pool:
            found = list(pool.map(claim, range(24)))
        store.close()
        assert sum(isinstance(each, Lease) for each in found) == 1
        assert len({each.token for each in found}) == 1

    async def test_64_tasks_claim_8_keys_and_8_win(self, store: Store, operation: Operation) -> None:
        operations = [Operation(operation.scope, f"key-{n % 8}") for n in range(64)]
        found = await asyncio.gather(*(arun(store.claim(each, lease=LEASE)) for each in operations))
        won = [each for each in found if isinstance(each, Lease)]
        assert sorted(each.operation.key for each in won) == [f"key-{n}" for n in range(8)]
        await asyncio.gather(*(arun(store.settle(each, DONE, retention=RETENTION)) for each in won))
        again = await asyncio.gather(*(arun(store.claim(each, lease=LEASE)) for each in operations))
        assert all(isinstance(each, Record) and each.outcome == DONE for each in again)
        await store.aclose()

    async def test_one_that_is_fenced_does_not_fail_its_neighbours(self, store: Store, operation: Operation) -> None:
        """One bad item in a group has its own failure, and the others their own answers."""
        leases: list[Any] = [await arun(store.claim(Operation(operation.scope, str(n)), lease=LEASE)) for n in range(6)]
        await arun(store.settle(leases[3], DONE, retention=RETENTION))
        await arun(store.delete(operation.scope, "3"))
        settles = [arun(store.settle(lease, DONE, retention=RETENTION)) for lease in leases]
        answers = await asyncio.gather(*settles, return_exceptions=True)
        assert [isinstance(answer, Fenced) for answer in answers] == [n == 3 for n in range(6)]
        await store.aclose()

    async def test_a_cancelled_claim_leaves_the_key_free(self, store: Store, operation: Operation) -> None:
        """A claim whose caller has gone away is given back at once, not after its lease."""
        for delay in itertools.chain([0.0] * 5, [0.0005, 0.001, 0.002, 0.004]):
            task = asyncio.create_task(arun(store.claim(operation, lease=LEASE)))
            await asyncio.sleep(delay)
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled() and isinstance(lease := task.result(), Lease):  # it was quicker, and is the owner
                await arun(store.release(lease, retention=RETENTION))
        async with asyncio.timeout(5):
            while not isinstance(found := await arun(store.claim(operation, lease=LEASE)), Lease):
                await asyncio.sleep(0.01)
        assert found.lapsed is False
        await store.aclose()

    async def test_a_first_claim_whose_caller_has_gone_away_is_no_attempt(self, store: Store) -> None:
        """The next caller is the first: what is looked at before anything is performed must be looked at then."""
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

    def test_a_waiter_hears_of_every_end(self, store: Store, drive: Drive, operation: Operation) -> None:
        for n, verb in enumerate(["settle", "release", "hold"]):
            one = Operation(operation.scope, str(n))
            lease = drive(store.claim(one, lease=LEASE))
            with store.wakeups.waiting(one.id) as waiter:
                drive(write(store, verb, lease))
                assert waiter.arm(lambda: None) is False, verb

    def test_it_can_be_closed_and_used_again(self, store: Store, drive: Drive, operation: Operation) -> None:
        lease = drive(store.claim(operation, lease=LEASE))
        store.close()
        store.close()
        drive(store.settle(lease, DONE, retention=RETENTION))
        assert drive(store.find(*operation.id)).outcome == DONE
