"""Faults that a reading of the code found: each test fails without its mend."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oncemore import Completer, Contract, Guard, Inbox, Operation, Policy, Resolution, Rule
from oncemore._ledger.transactions import Again
from oncemore._ledger.values import replayed, value_outcome
from oncemore._runtime.backoff import Backoff
from oncemore._runtime.batching import Batcher
from oncemore._runtime.plan import Call, Plan, run
from oncemore.errors import Duplicate, StoreUnavailable
from oncemore.stores.memory import MemoryStore
from oncemore.web.asgi import IdempotencyMiddleware

AT_ONCE = Backoff(base=0.0, factor=1.0, cap=0.0, jitter="none")


class FailingInnerClaims(MemoryStore):
    """A store that is down for the records of `unique`."""

    fails = False

    def claim(self, operation: Operation, **settings: Any) -> Plan[Any]:
        if self.fails and operation.scope.startswith("unique|"):
            raise StoreUnavailable("down")
        return (yield from super().claim(operation, **settings))


def test_resolved_outcome_stays_in_doubt_if_unique_cannot_be_claimed() -> None:
    store, charges = FailingInnerClaims(), []
    guard = Guard(store, cache=0)
    resolver = lambda op: Resolution.settled("charged") if charges else Resolution.released()  # noqa: E731
    policy = Policy(on_unknown="resolve", resolver=resolver, lease=5.0)
    crashed = guard.attempt(Operation("s", "k", "f", "pay"), policy)  # before its rule had `unique`
    run(crashed.begin())
    charges.append("crashed")
    crashed.drop()
    store.shift += 60
    operation = Operation("s", "k", "f", "pay", unique="invoice-1")
    store.fails = True
    with pytest.raises(StoreUnavailable):
        guard.run(operation, charges.append, policy=policy)
    store.fails = False
    record = guard.find("s", "k")
    assert record is not None
    assert record.state == "running", "still in doubt, and not released"
    store.shift += 60
    assert guard.run(operation, charges.append, policy=policy).how == "replayed"
    assert charges == ["crashed"]


def test_requeued_dead_letter_of_steps_is_handled() -> None:
    inbox = Inbox(Guard("memory://"), effect="steps", attempts=1)

    def fail(op: Any, payload: Any) -> None:
        raise RuntimeError("down")

    def book(op: Any, payload: Any) -> Any:
        return op.step("book", lambda: payload["amount"])

    assert inbox.handle("e1", "stripe", {"amount": 5}, fail).how == "dead"
    inbox.requeue("e1", "stripe")
    assert inbox.handle("e1", "stripe", {"amount": 5}, book).value == 5


async def test_steps_request_survives_an_earlier_attempt_that_is_forgotten() -> None:
    guard = Guard("memory://")
    policy = Policy(effect="steps", lease=1.0, wait=3.0)
    begun, requests = asyncio.Event(), []

    def operation() -> Operation:
        return Operation("s", "k", "f", "pay", request=lambda: {"amount": 5})

    async def refuse(op: Any) -> None:
        begun.set()
        await asyncio.sleep(0.2)
        raise Duplicate("not now")

    async def crash(op: Any) -> None:
        await op.step("charge", lambda: 1)
        raise RuntimeError("after the first step")

    async def finish(op: Any, request: Any) -> None:
        requests.append(request)
        await op.step("charge", lambda: 1)

    first = asyncio.create_task(guard.arun(operation(), refuse, policy=policy))
    await begun.wait()
    second = asyncio.create_task(guard.arun(operation(), crash, policy=policy))
    await asyncio.gather(first, second, return_exceptions=True)
    tally = await Completer(guard, {"pay": finish}, policy=policy, pace=AT_ONCE).arun_once()
    assert (tally.completed, requests) == (1, [{"amount": 5}])


def test_refusal_of_nested_transaction_does_not_rerun_the_outer(tmp_path: Path) -> None:
    guard, other = Guard(f"sqlite:///{tmp_path}/a.db"), Guard(f"sqlite:///{tmp_path}/b.db")
    policy, calls = Policy(effect="transaction"), []

    def inner(op: Any) -> None:
        calls.append("inner")
        raise Again("deadlock")

    def outer(op: Any) -> None:
        calls.append("outer")
        other.run(Operation("s", "inner"), inner, policy=policy)

    with pytest.raises(StoreUnavailable):
        guard.run(Operation("s", "outer"), outer, policy=policy)
    assert (calls.count("outer"), calls.count("inner")) == (1, 4)
    guard.close()
    other.close()


def test_answered_claim_is_not_undone_when_its_loop_is_closed() -> None:
    granted: list[str] = []

    def run_batch(items: list[str]) -> Plan[list[str]]:
        yield Call(asyncio.sleep, 0)
        granted.extend(items)
        return items

    def undo(items: list[str]) -> Plan[None]:
        yield Call(asyncio.sleep, 60 if slow else 0)
        granted[:] = [item for item in granted if item not in items]

    slow = True
    batcher = Batcher(run_batch, undo=undo)

    async def end_in_the_middle() -> None:
        kept, gone = asyncio.ensure_future(batcher.asubmit("kept")), asyncio.ensure_future(batcher.asubmit("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        assert await kept == "kept"
        await asyncio.sleep(0.01)  # the undo of the other claim is under way

    loop = asyncio.new_event_loop()
    loop.run_until_complete(end_in_the_middle())
    loop.close()
    slow = False

    async def next_call() -> None:
        assert await batcher.asubmit("next") == "next"

    asyncio.run(next_call())
    assert granted == ["kept", "next"]


async def test_interrupt_while_the_runner_starts_leaves_the_batcher_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_batch(items: list[str]) -> Plan[list[str]]:
        yield Call(asyncio.sleep, 0)
        return items

    batcher = Batcher(run_batch)
    loop = asyncio.get_running_loop()

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "create_task", interrupt)
        with pytest.raises(KeyboardInterrupt):
            batcher.asubmit("struck")
    assert await batcher.asubmit("next") == "next"


def test_path_without_leading_slash_matches_its_rule() -> None:
    contract = Contract(Rule("POST /payments", key="required"))
    found = contract.match("POST", "payments")
    assert found is not None
    assert found.rule.name == contract.match("POST", "/payments").rule.name  # type: ignore[union-attr]


@dataclass
class Receipt:
    id: str
    amount: int


def test_object_is_read_as_its_members_if_no_classes_are_wanted() -> None:
    outcome = value_outcome(Receipt("r1", 5), None)
    assert replayed(outcome, types=None) == {"id": "r1", "amount": 5}


async def test_second_final_message_of_an_app_is_ignored() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"paid"})
        await send({"type": "http.response.body", "body": b""})

    middleware = IdempotencyMiddleware(app, guard=Guard("memory://"))

    async def ask() -> list[Any]:
        sent: list[Any] = []
        headers = [(b"idempotency-key", b"k1"), (b"authorization", b"x")]
        scope = {"type": "http", "method": "POST", "path": "/p", "query_string": b"", "headers": headers}

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await middleware(scope, receive, send)
        return [message["body"] for message in sent if "body" in message]

    assert [await ask(), await ask()] == [[b"paid"], [b"paid"]]
