"""Everyday accidents, each run over HTTP against a provider and a service in processes of their own.

A story does not know whether the guard is on: it sends requests, causes the accident, and counts the effects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import httpx

from examples.payments.processes import Nats, PaymentSystem

REFUND = 1_000  # 10.00, of the 100.00 that each story's order has paid
TIMEOUT = 20.0  # seconds to wait for an effect


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a story: the requests sent, the effects that happened, whether each answer was right, and a sentence."""

    requests: int
    effects: int
    right: bool
    how: str
    refunds: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.right and self.effects == 1


@dataclass(frozen=True, slots=True)
class Story:
    title: str
    effect: str  # the effect that is counted, in the singular
    play: Callable[[PaymentSystem, str], Ending]
    left_out: Callable[[], str] = str  # returns the reason if the story cannot be played here, else an empty text


class Played(NamedTuple):
    """A story and its endings, without the guard and with it."""

    number: int
    story: Story
    without: Ending
    ended: Ending


def refund(system: PaymentSystem, charge: str, key: str, amount: int = REFUND) -> httpx.Response:
    return system.post("/refunds", key, {"charge_id": charge, "amount": amount})


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + TIMEOUT
    while not true():
        if time.monotonic() > ends:
            raise TimeoutError(f"an effect that the story waits for did not happen within {TIMEOUT:g} s")
        time.sleep(0.02)


def ids(answers: list[httpx.Response]) -> tuple[str, ...]:
    """Return the ids of the refunds in the answers, without repeats."""
    return tuple(dict.fromkeys(answer.json()["id"] for answer in answers if answer.status_code == 201))


def statuses(answers: list[httpx.Response]) -> str:
    return ", ".join(str(answer.status_code) for answer in answers)


def double_click(system: PaymentSystem, name: str) -> Ending:
    charge, before = system.captured(name), system.payouts()
    answers = [refund(system, charge, name) for _ in range(2)]
    right = answers[0].content == answers[1].content and answers[1].headers["idempotency-status"] == "replayed"
    how = "the second click got the first one's answer" if right else "each click was a refund of its own"
    return Ending(2, system.payouts() - before, right, how, ids(answers))


def ten_at_once(system: PaymentSystem, name: str) -> Ending:
    charge, before = system.captured(name), system.payouts()
    together = threading.Barrier(10)

    def ask(_: int) -> httpx.Response:
        together.wait()
        return refund(system, charge, name)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, range(10)))
    right = {answer.status_code for answer in answers} == {201} and len(ids(answers)) == 1
    how = "nine waited for the first one's answer" if right else "everyone was served, and the money went out each time"
    return Ending(10, system.payouts() - before, right, how, ids(answers))


def another_amount(system: PaymentSystem, name: str) -> Ending:
    charge, before = system.captured(name), system.payouts()
    answers = [refund(system, charge, name), refund(system, charge, name, amount=9 * REFUND)]
    code = answers[1].json().get("error_code", "")
    right = answers[1].status_code == 409 and code == "CONFLICT.idempotency.payload_mismatch"
    how = "409: the key stands for another amount" if right else f"{statuses(answers)}: both amounts went out"
    return Ending(2, system.payouts() - before, right, how, ids(answers))


def gateway_timeout(system: PaymentSystem, name: str) -> Ending:
    charge, before = system.captured(name), system.payouts()
    asked = len(system.calls())
    system.provider.order({"timeout_after": 30})
    answers = [refund(system, charge, name), refund(system, charge, name)]
    right = [answer.status_code for answer in answers] == [504, 201]
    keys = {call["key"] for call in system.calls()[asked:]}
    how = f"the provider was asked again, under {'the same' if len(keys) == 1 else 'a new'} key"
    return Ending(2, system.payouts() - before, right, f"{statuses(answers)}: {how}", ids(answers))


def killed(system: PaymentSystem, name: str) -> Ending:
    charge, before = system.captured(name), system.payouts()
    system.provider.order({"latency_after": 10})  # so that the service is killed between the payout and its answer
    unanswered: list[bool] = []

    def ask() -> None:
        try:
            refund(system, charge, name)
        except httpx.TransportError:
            unanswered.append(True)

    caller = threading.Thread(target=ask)
    caller.start()
    until(lambda: system.payouts() > before)
    system.service.crash()
    caller.join()
    system.service.start()
    again = refund(system, charge, name)
    right = unanswered == [True] and again.status_code == 201
    how = (
        "restarted, it continued after its last step"
        if system.payouts() - before == 1
        else "the retry began from the start"
    )
    return Ending(2, system.payouts() - before, right, f"no answer, then {again.status_code}: {how}", ids([again]))


def duplicate_webhook(system: PaymentSystem, name: str) -> Ending:
    charge = system.captured(name)
    made = ids([refund(system, charge, name)])

    def booked() -> int:  # counts this refund only, because an event of an earlier story may still arrive
        return sum(entry["reference"] == made[0] for entry in system.entries("settlement"))

    until(lambda: booked() > 0)
    events = system.provider.get("/admin/events")["events"]
    event = next(event["id"] for event in events if event["data"]["reference"] == made[0])
    answers = system.provider.replay(event, 5)
    effects = booked()
    how = "all six acknowledged, one booked" if effects == 1 else "booked at every delivery"
    return Ending(6, effects, answers == [200] * 5, how, made)


def killed_relay(system: PaymentSystem, name: str) -> Ending:
    """Kill the relay between the broker's confirmation of the message and the note that it was sent."""
    messages = system.messages
    messages.start()
    made = ids([refund(system, system.captured(name), name)])

    def entries() -> int:
        return sum(entry["reference"] == made[0] for entry in messages.books.get("/entries")["entries"])

    def deliveries() -> int:
        count: int = messages.books.get("/entries")["deliveries"].get(f"{made[0]}.succeeded", 0)
        return count

    messages.relay.pause = 60.0
    messages.relay.start()
    until(lambda: entries() > 0)  # now the broker has stored the message, and the outbox still has it
    messages.relay.crash()
    messages.relay.pause = 0.0
    messages.relay.start()
    until(lambda: system.service.get("/outbox")["pending"] == 0 and deliveries() > 1)
    effects, sent = entries(), deliveries()
    how = "the books recognised the message" if effects == 1 else "the books booked it each time"
    return Ending(sent, effects, sent == 2, f"sent {sent} times: {how}", made)


def without_broker() -> str:
    """Return the reason why this environment has no broker, or an empty text if it has one."""
    missing = Nats.missing()
    return f"it needs a message broker: pip install {missing}" if missing else ""


STORIES = (
    Story("a double click", "payout", double_click),
    Story("ten at once", "payout", ten_at_once),
    Story("same key, another amount", "payout", another_amount),
    Story("gateway timeout, then a retry", "payout", gateway_timeout),
    Story("kill -9 before the answer", "payout", killed),
    Story("a webhook, delivered six times", "booking", duplicate_webhook),
    Story("kill -9 of the message relay", "booking", killed_relay, without_broker),
)
