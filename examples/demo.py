"""The everyday accidents, played against a ledger on SQLite: whatever goes wrong, the card is charged exactly once.

The world outside is a file, the bank's statement.  Each story asks several times for the same payment, with real threads
and processes, and then counts the charges on the statement.  The exit code is 0 only if every story ends well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from oncemore import Guard, Resolution, once
from oncemore.errors import PayloadMismatch, UnknownOutcome

LEASE = 1.0  # seconds; short, so that the stories about killed workers need not wait long


class Ending(NamedTuple):
    """How a story ended: how often was asked, whether every caller was treated right, and how."""

    asked: int
    right: bool
    how: str


class Shop:
    """A shop that charges cards; its ledger and the bank's statement are in one folder."""

    def __init__(self, folder: Path, *, on_unknown: str = "hold") -> None:
        self.folder = folder
        self.statement = folder / "statement.txt"
        self.guard = Guard(f"sqlite:///{folder / 'ledger.db'}")
        self.before: Callable[[], object] = lambda: None  # the accidents: before the effect,
        self.after: Callable[[], object] = lambda: None  # and after it, when the outcome is not yet in the ledger
        self.pay = once(self.guard, key="order:{order}", name="pay", lease=LEASE, on_unknown=on_unknown)(self._charge)

    def _charge(self, order: int, amount: int) -> str:
        self.before()
        receipt = uuid.uuid4().hex[:8]
        with self.statement.open("a") as statement:
            statement.write(f"order {order}: {amount}, receipt {receipt}\n")
        self.after()
        return receipt

    @property
    def charges(self) -> int:
        return len(self.statement.read_text().splitlines()) if self.statement.exists() else 0

    def killed_worker(self, when: str) -> None:
        """Let a process of its own take the order, and die by kill -9 before or after the effect."""
        worker = subprocess.run([sys.executable, __file__, "worker", self.folder, when])
        assert worker.returncode == -signal.SIGKILL
        time.sleep(LEASE * 1.2)


def worker(folder: str, when: str) -> None:
    """The process that is killed."""
    shop = Shop(Path(folder))
    setattr(shop, when, lambda: os.kill(os.getpid(), signal.SIGKILL))
    shop.pay(1, 100)


def double_click(shop: Shop) -> Ending:
    """a double click"""
    first, second = shop.pay(1, 100), shop.pay(1, 100)
    return Ending(2, first == second, "the second got the first one's receipt")


def ten_at_once(shop: Shop) -> Ending:
    """ten at once"""
    shop.after = lambda: time.sleep(0.2)
    together = threading.Barrier(10)

    def pay(_: int) -> str:
        together.wait()
        return shop.pay(1, 100)

    with ThreadPoolExecutor(10) as pool:
        receipts = set(pool.map(pay, range(10)))
    return Ending(10, len(receipts) == 1, "nine waited, and got the first one's receipt")


def another_amount(shop: Shop) -> Ending:
    """same order, other amount"""
    shop.pay(1, 100)
    try:
        shop.pay(1, 999)
    except PayloadMismatch:
        return Ending(2, True, "the second was refused: the key means another request")
    return Ending(2, False, "the second was accepted")


def bank_unreachable(shop: Shop) -> Ending:
    """the bank is unreachable, once"""

    def fail() -> None:
        shop.before = lambda: None
        raise ConnectionError("no route to the bank")

    shop.before = fail
    try:
        shop.pay(1, 100)
    except ConnectionError:
        receipt = shop.pay(1, 100)
        return Ending(3, shop.pay(1, 100) == receipt, "the failure was not kept; the retry ran, the third replayed")
    return Ending(1, False, "the failure was swallowed")


def killed_before(shop: Shop) -> Ending:
    """kill -9 before the charge"""
    shop.killed_worker("before")
    retrying = Shop(shop.folder, on_unknown="retry")
    receipt = retrying.pay(1, 100)
    return Ending(3, retrying.pay(1, 100) == receipt, "the lease ran out, and the rule was to retry")


def killed_after(shop: Shop) -> Ending:
    """kill -9 after the charge"""
    shop.killed_worker("after")
    try:
        shop.pay(1, 100)
    except UnknownOutcome:
        operation = shop.pay.operation(1, 100)  # type: ignore[attr-defined]
        shop.guard.resolve(operation.scope, operation.key, Resolution.settled("found on the statement"))
        replayed = shop.pay(1, 100) == "found on the statement"
        return Ending(3, replayed, "held as unknown; a person looked and resolved it; then it replayed")
    return Ending(2, False, "the retry ran blindly")


STORIES = (double_click, ten_at_once, another_amount, bank_unreachable, killed_before, killed_after)


def main() -> int:
    """Play all stories, print one line for each; 0 if all of them end well."""
    print(f"{'story':32}{'asked':>7}{'charged':>9}   what happened")
    all_well = True
    for story in STORIES:
        with tempfile.TemporaryDirectory() as folder:
            shop = Shop(Path(folder))
            ending = story(shop)
            shop.guard.close()
            charges = shop.charges
        well = ending.right and charges == 1
        all_well &= well
        print(f"{story.__doc__:32}{ending.asked:7}{charges:9}   {'✓' if well else '✗'} {ending.how}")
    print("\nEvery card was charged exactly once." if all_well else "\nSomething is wrong.")
    return not all_well


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    sys.exit(main())
