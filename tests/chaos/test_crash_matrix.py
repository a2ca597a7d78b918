"""Each level × driver × crash point: a process is killed there, another takes over, and there is one refund in the end.

What comes of each is the table in docs/explain/crashes.md: with ONCEMORE_MATRIX naming a folder, each
test leaves its row there, and `docs/_generate/crashes.py` makes the page of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from oncemore import Answer, Operation
from oncemore._ledger.context import Op
from oncemore._ledger.store import Filter
from oncemore.errors import StoreError, UnknownOutcome
from oncemore.testing.crashes import POINTS
from tests.support import processes
from tests.support.proxy import FaultProxy
from tests.transactions.conftest import emptied
from tests.transactions.shops import ON_POSTGRES, ON_SQLITE, Shop

from .crashing import LEASE, LEVELS, REFUND, opened, perform, policy

pytestmark = pytest.mark.chaos

# Killed at these points, an operation whose rule says `hold` waits for a person.
IN_DOUBT = {"after claim", "after effect", "before commit"}

ON_BOTH = ("sqlite3", "psycopg-async")  # a lease knows nothing of the driver: one of each store is enough
# One of each driver; how its pool or engine is set up is for the other tests.
VARIANTS = ("pool", "under-a-loop", "beginning")
DRIVERS = [name for name in (*ON_SQLITE, *ON_POSTGRES) if not any(word in name for word in VARIANTS)]
CELLS = [
    pytest.param(level, driver, point, marks=[pytest.mark.server] if driver in ON_POSTGRES else [])
    for level in LEVELS
    for driver in (DRIVERS if level == "transaction" else ON_BOTH)
    for point in POINTS
]


@pytest.fixture
def url(driver: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if driver in ON_SQLITE:
        return f"sqlite:///{tmp_path / 'shop.db'}"
    return emptied(request.getfixturevalue("shops_url"))


async def killed(level: str, driver: str, url: str, point: str) -> None:
    command = [sys.executable, "-m", "tests.chaos.crashing", level, driver, url, point]
    ended = await asyncio.to_thread(processes.run_to_end, command)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


async def retried(shop: Shop, level: str) -> str:
    """The end of the client's retry, which waits for the lease of the killed process, if it has one."""
    try:
        answer = await shop.run(REFUND, perform(shop, level), policy=policy(level, shop))
    except UnknownOutcome:
        return "refused: outcome_unknown"
    assert answer.outcome.kind == "value"
    return "runs" if answer.how == "stored" and answer.value is not None else "replays"


@pytest.mark.parametrize(("level", "driver", "point"), CELLS)
async def test_a_process_killed_there_leaves_one_refund_in_the_end(
    level: str, driver: str, point: str, url: str
) -> None:
    before = opened(driver, url)
    await before.open()
    await before.close()
    await killed(level, driver, url, point)
    shop = opened(driver, url)
    await shop.open()
    try:
        if level != "transaction" and point in IN_DOUBT:
            await asyncio.sleep(LEASE)
        first = await retried(shop, level)
        again = await retried(shop, level)
        refunds, page = shop.refunds(), await shop.guard.alist(Filter())
    finally:
        await shop.close()
    if level == "lease, hold" and point in IN_DOUBT:
        assert first == again == "refused: outcome_unknown"
        assert len(refunds) <= 1
        assert [record.state for record in page.records] == ["held"]
    else:
        assert (refunds, again) == (["k1"], "replays")
        assert [record.state for record in page.records] == ["settled"]
    note(level, driver, point, first, len(refunds))


async def asked_until_told(shop: Shop, performing: Any) -> Answer:
    """The answer; while the server cannot be reached, the caller asks once more."""
    for _ in range(50):
        try:
            return await shop.run(REFUND, performing, policy=policy("transaction", shop))
        except StoreError:
            await asyncio.sleep(0.1)
    raise AssertionError("the server never came back")


def note(level: str, driver: str, point: str, retry: str, effects: int) -> None:
    """Leave what came of it for the page."""
    if folder := os.environ.get("ONCEMORE_MATRIX"):
        row = {"level": level, "driver": driver, "point": point, "retry": retry, "effects": effects}
        Path(folder, f"{secrets.token_hex(8)}.json").write_text(json.dumps(row))


class CommitProxy(FaultProxy):
    """Resets the connection at the answer to the next COMMIT."""

    def __init__(self, *, port: int, host: str = "127.0.0.1") -> None:
        super().__init__(port=port, host=host)
        self._armed = False

    def cut_commit(self, driver: str) -> None:
        if driver in ONE_STATEMENT_AT_A_TIME:
            self._armed = True
        else:  # the outcome and the COMMIT are one pipeline
            self.cut_answers()

    async def _pass_requests(self, source: Any, target: Any) -> None:
        committing = False
        while data := await source.read(65_536):
            committing = committing or (self._armed and b"COMMIT" in data.upper())
            if committing and data.startswith((b"Q", b"B")):  # pg8000 has it parsed first, and that answered
                self._armed, self._fault, self._allowance = False, "cut_answers", 0
            target.write(data)
            await target.drain()
        target.write_eof()


ONE_STATEMENT_AT_A_TIME = ("asyncpg", "alchemy-psycopg2", "alchemy-pg8000", "alchemy-asyncpg")


@pytest.mark.parametrize(
    "driver", [pytest.param(name, marks=pytest.mark.server) for name in DRIVERS if name in ON_POSTGRES]
)
async def test_commit_whose_answer_was_lost_is_found(driver: str, url: str) -> None:
    """The server has committed, the connection is cut at its answer, and the same call goes on."""
    shop = opened(driver, url)
    await shop.open()
    with CommitProxy.before(url) as proxy:
        away = opened(driver, proxy.url(url))
        await away.open()
        runs: list[str] = []

        def performing(op: Op) -> Generator[Any, Any, Any]:
            value = yield from perform(away, "transaction")(op)
            runs.append(op.key)
            if op.key == REFUND.key and runs.count(op.key) == 1:
                proxy.cut_commit(driver)
                healing.start()
            return value

        healing = threading.Timer(0.2, proxy.heal)
        try:
            await away.run(Operation("customer-1", "warm"), performing)
            answer = await asked_until_told(away, performing)
            healing.join()
        finally:
            await away.close()
    again, refunds = await retried(shop, "transaction"), shop.refunds()
    await shop.close()
    assert answer.outcome.kind == "value"
    assert (again, refunds, runs) == ("replays", ["k1", "warm"], ["warm", "k1"])
    note("transaction", driver, "commit sent, answer lost", "replays", refunds.count("k1"))
