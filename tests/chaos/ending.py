"""A process that is killed while it gives an operation up: `python -m tests.chaos.ending inbox|steps URL [kill]`.

`inbox` handles an event that always fails, and dies between the claim and the hold of its dead letter.  `steps` takes a
step and fails for good, and dies between the claim and the settling of the mark that says so.  Prints what came of it.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from oncemore import Guard, Inbox, Op, Operation, Policy
from oncemore._ledger.encrypted import StoreWrapper
from oncemore._ledger.steps import is_mark
from oncemore.errors import OncemoreError
from oncemore.testing.crashes import die

LEASE = 0.5


class Declined(Exception):
    pass


class Dying(StoreWrapper):
    """Kills the process instead of the write that ends the operation; its claim has been committed."""

    def hold(self, held: Any, *, note: str = "") -> Any:
        die()

    def settle(self, held: Any, outcome: Any, **settings: Any) -> Any:
        if is_mark(outcome):
            die()
        return self.inner.settle(held, outcome, **settings)


def fail(op: Op, event: Any) -> NoReturn:
    raise ValueError("poison")


def pay(op: Op) -> NoReturn:
    op.step("reserve", lambda: print("reserved", flush=True), undo=lambda value: print("undone", flush=True))
    raise Declined("insufficient funds")


def main(what: str, url: str, kill: str = "") -> None:
    guard = Guard(url)
    if kill:
        guard.store = Dying(guard.store)  # type: ignore[assignment]
    try:
        if what == "inbox":
            print(Inbox(guard, attempts=1, lease=LEASE, wait=10).handle("ev_001", "payments", {}, fail).how)
        else:
            policy = Policy(effect="steps", errors=(Declined,), lease=LEASE, wait=10)
            print(repr(guard.run(Operation("customer-1", "k1", name="orders.pay"), pay, policy=policy).value))
    except OncemoreError as error:
        print(error.code)
    guard.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
