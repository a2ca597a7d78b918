"""One attempt at an order in steps, in a process that kills or freezes itself at a given point.

`python steps_child.py <sync|async> <database> <provider> <what: attempt|complete> [<signal> <point>]`; prints its answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from typing import Any

from oncemore import Guard, Op, Operation, Policy
from oncemore._ledger.completer import Completer
from oncemore._ledger.steps import StepRetry
from oncemore._ledger.values import replayed
from oncemore._runtime.backoff import Backoff
from oncemore.errors import ProviderDuplicate

KIND, DATABASE, PROVIDER, WHAT, *REST = sys.argv[1:]
SIGNAL, POINT = REST[:2] if REST else ("", "")
MODE = os.environ.get("PROVIDER_MODE", "")
MARK = "?" if DATABASE.startswith("sqlite") else "%s"
INSERT = f"INSERT INTO refunds VALUES ({MARK}, 'x')"
POLICY = Policy(effect="steps", lease=0.4, wait=20, errors=(LookupError,))
RETRY = StepRetry(4, Backoff(base=0.05, cap=0.05))


def point(name: str) -> None:
    """End or freeze this process, if *name* is the given point."""
    if name == POINT:
        print("here", flush=True)
        os.kill(os.getpid(), getattr(signal, SIGNAL))


def payout(key: str, timeout: float = 5.0) -> Any:
    request = urllib.request.Request(f"{PROVIDER}/payouts?mode={MODE}", b"{}", {"Idempotency-Key": key})
    try:
        with urllib.request.urlopen(request, timeout=0.3 if MODE == "late" else timeout) as response:
            return json.load(response)["receipt"]
    except urllib.error.HTTPError as error:
        if error.code == 409:
            raise ProviderDuplicate(result=json.load(error)["receipt"]) from error
        raise


def send(key: str) -> Any:
    point("before payout")
    receipt = payout(key)
    point("after payout")
    return receipt


def insert(connection: Any, name: str) -> Any:
    connection.execute(INSERT, (name,))
    point(f"in {name}")
    return name


def pay(op: Op, request: Any) -> Any:
    point("claimed")
    reserved = op.step("reserve", lambda connection: insert(connection, "reserve"))
    point("reserved")
    receipt = op.step("payout", send, retry=RETRY)
    point("paid")
    booked = op.step("book", lambda connection: insert(connection, "book"))
    point("booked")
    return [request["order"], reserved, receipt, booked]


async def apay(op: Op, request: Any) -> Any:
    async def ainsert(connection: Any, name: str) -> Any:
        await connection.execute(INSERT, (name,))
        point(f"in {name}")
        return name

    point("claimed")
    reserved = await op.step("reserve", lambda connection: ainsert(connection, "reserve"))
    point("reserved")
    receipt = await op.step("payout", lambda key: asyncio.to_thread(send, key), retry=RETRY)
    point("paid")
    booked = await op.step("book", lambda connection: ainsert(connection, "book"))
    point("booked")
    return [request["order"], reserved, receipt, booked]


ORDER = {"order": 7}
ASKED = Operation("customer-1", "order-7", "same", "orders.pay", request=lambda: ORDER)


def main() -> None:
    guard = Guard(DATABASE, policy=POLICY)
    if WHAT == "complete":
        performers: Any = {"orders.pay": pay if KIND == "sync" else apay}
        completer = Completer(guard, performers, pace=Backoff(base=0, cap=0))
        tally = completer.run_once() if KIND == "sync" else asyncio.run(completer.arun_once())
        print(json.dumps(tally.completed))
        return
    if KIND == "sync":
        answer = guard.run(ASKED, lambda op: pay(op, ORDER))
    else:
        answer = asyncio.run(guard.arun(ASKED, lambda op: apay(op, ORDER)))
    print(json.dumps(replayed(answer.outcome)))


if __name__ == "__main__":
    main()
