"""The everyday accidents, each played over HTTP against a provider and a service that are real processes.

A story knows nothing of guards: it sends what callers send, breaks what breaks in the night, and counts the effects.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import httpx

from examples.payments.processes import World

REFUND = 1_000  # 10.00, of the 100.00 that each story's order has paid
PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Ending:
    """How a story ended: the requests sent, the effects there are, whether every caller was treated right, and how."""

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
    effect: str  # what is counted, in the singular
    play: Callable[[World, str], Ending]


class Played(NamedTuple):
    """How a story ended, without the guard and with it."""

    number: int
    story: Story
    without: Ending
    ended: Ending


def refund(world: World, charge: str, key: str, amount: int = REFUND) -> httpx.Response:
    return world.post("/refunds", key, {"charge_id": charge, "amount": amount})


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > ends:
            raise TimeoutError("what the story waits for did not happen")
        time.sleep(0.02)


def ids(answers: list[httpx.Response]) -> tuple[str, ...]:
    """The refunds that callers were told of, each once."""
    return tuple(dict.fromkeys(answer.json()["id"] for answer in answers if answer.status_code == 201))


def statuses(answers: list[httpx.Response]) -> str:
    return ", ".join(str(answer.status_code) for answer in answers)


def double_click(world: World, name: str) -> Ending:
    charge, before = world.captured(name), world.payouts()
    answers = [refund(world, charge, name) for _ in range(2)]
    right = answers[0].content == answers[1].content and answers[1].headers["idempotency-status"] == "replayed"
    how = "the second click got the first one's answer" if right else "each click was a refund of its own"
    return Ending(2, world.payouts() - before, right, how, ids(answers))


def ten_at_once(world: World, name: str) -> Ending:
    charge, before = world.captured(name), world.payouts()
    together = threading.Barrier(10)

    def ask(_: int) -> httpx.Response:
        together.wait()
        return refund(world, charge, name)

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, range(10)))
    right = {answer.status_code for answer in answers} == {201} and len(ids(answers)) == 1
    how = "nine waited for the first one's answer" if right else "everyone was served, and the money went out each time"
    return Ending(10, world.payouts() - before, right, how, ids(answers))


def another_amount(world: World, name: str) -> Ending:
    charge, before = world.captured(name), world.payouts()
    answers = [refund(world, charge, name), refund(world, charge, name, amount=9 * REFUND)]
    code = answers[1].json().get("error_code", "")
    right = answers[1].status_code == 409 and code == "CONFLICT.idempotency.payload_mismatch"
    how = "409: the key stands for another amount" if right else f"{statuses(answers)}: both amounts went out"
    return Ending(2, world.payouts() - before, right, how, ids(answers))


def gateway_timeout(world: World, name: str) -> Ending:
    charge, before = world.captured(name), world.payouts()
    asked = len(world.calls())
    world.provider.order({"timeout_after": 30})
    answers = [refund(world, charge, name), refund(world, charge, name)]
    right = [answer.status_code for answer in answers] == [504, 201]
    keys = {call["key"] for call in world.calls()[asked:]}
    how = f"the provider was asked again, under {'the same' if len(keys) == 1 else 'a new'} key"
    return Ending(2, world.payouts() - before, right, f"{statuses(answers)}: {how}", ids(answers))


def killed(world: World, name: str) -> Ending:
    charge, before = world.captured(name), world.payouts()
    world.provider.order(
        {"latency_after": 10}
    )  # so the money is out, and the answer on its way, when the lights go out
    unanswered: list[bool] = []

    def ask() -> None:
        try:
            refund(world, charge, name)
        except httpx.TransportError:
            unanswered.append(True)

    caller = threading.Thread(target=ask)
    caller.start()
    until(lambda: world.payouts() > before)
    world.service.crash()
    caller.join()
    world.service.start()
    again = refund(world, charge, name)
    right = unanswered == [True] and again.status_code == 201
    how = (
        "restarted, it went on after its last step" if world.payouts() - before == 1 else "the retry began from nothing"
    )
    return Ending(2, world.payouts() - before, right, f"no answer, then {again.status_code}: {how}", ids([again]))


def duplicate_webhook(world: World, name: str) -> Ending:
    charge = world.captured(name)
    made = ids([refund(world, charge, name)])

    def booked() -> int:  # for this refund: an event of an earlier story may still be under way
        return sum(entry["reference"] == made[0] for entry in world.entries("settlement"))

    until(lambda: booked() > 0)
    events = world.provider.get("/admin/events")["events"]
    event = next(event["id"] for event in events if event["data"]["reference"] == made[0])
    answers = world.provider.replay(event, 5)
    effects = booked()
    how = "all six acknowledged, one booked" if effects == 1 else "booked at every delivery"
    return Ending(6, effects, answers == [200] * 5, how, made)


STORIES = (
    Story("a double click", "payout", double_click),
    Story("ten at once", "payout", ten_at_once),
    Story("same key, another amount", "payout", another_amount),
    Story("gateway timeout, then a retry", "payout", gateway_timeout),
    Story("kill -9 before the answer", "payout", killed),
    Story("a webhook, delivered six times", "booking", duplicate_webhook),
)
