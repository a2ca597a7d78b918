"""Accidents of a dating app, each run over HTTP against the matchmaking service; the committed effects are counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from examples.matchmaking.processes import Matchmaking, WebhookReceiver, new_key

from .stories import until

DATE = "2026-02-19"
USERS = 6  # the number of users in the scheduler's story


@dataclass(frozen=True, slots=True)
class MatchmakingEnding:
    """The end of a story: the requests sent, the effects expected and found, whether each answer was right, a sentence."""

    requests: int
    expected: int
    effects: int
    right: bool
    how: str

    @property
    def holds(self) -> bool:
        return self.right and self.effects == self.expected


@dataclass(frozen=True, slots=True)
class MatchmakingStory:
    title: str
    effect: str  # the effect that is counted, in the singular
    play: Callable[[Matchmaking, WebhookReceiver, str], MatchmakingEnding]


def users(service: Matchmaking, name: str) -> tuple[str, str]:
    return service.sign_in(f"{name}-ann"), service.sign_in(f"{name}-bob")


def double_swipe(service: Matchmaking, _: WebhookReceiver, name: str) -> MatchmakingEnding:
    ann, bob = users(service, name)
    offers = service.offers(ann, bob)
    key = new_key()
    path = f"/matches/offers/{offers[ann]}/action"
    answers = [service.post(path, {"action": "accept"}, ann, key) for _ in range(2)]
    other = service.post(path, {"action": "accept"}, ann)  # under a new key, the answer comes from the offer's state
    refused = service.post(path, {"action": "pass"}, ann)
    right = answers[0].content == answers[1].content == other.content and refused.status_code == 409
    right = right and answers[1].headers["idempotency-status"] == "replayed"
    return MatchmakingEnding(
        4, 1, len(service.effects("offer.answered", ann)), right, "200, 200, 200; to pass after that: 409"
    )


def ten_at_once(service: Matchmaking, _: WebhookReceiver, name: str) -> MatchmakingEnding:
    ann, bob = users(service, name)
    offers = service.offers(ann, bob)
    service.post(f"/matches/offers/{offers[ann]}/action", {"action": "accept"}, ann).raise_for_status()
    key, path = new_key(), f"/matches/offers/{offers[bob]}/action"
    answers = service.at_once(10, lambda _: service.post(path, {"action": "accept"}, bob, key))
    same = {(answer.status_code, answer.content) for answer in answers}
    right = len(same) == 1 and answers[0].json().get("state") == "matched"
    how = "nine got the first one's answer: matched"
    return MatchmakingEnding(10, 1, len(service.effects("match.created", ann, bob)), right, how)


def scheduler_with_a_kill(service: Matchmaking, _: WebhookReceiver, name: str) -> MatchmakingEnding:
    zones = ("UTC", "America/New_York", "Asia/Kolkata")
    for number in range(USERS):
        service.sign_in(f"{name}-{number}", zones[number % len(zones)])
    before = len(service.effects("offers.generated"))
    unanswered: list[bool] = []

    def run() -> None:
        try:
            service.daily_offers(DATE, delay=0.2)
        except httpx.TransportError:
            unanswered.append(True)

    running = threading.Thread(target=run)
    running.start()
    until(lambda: len(service.effects("offers.generated")) > before)
    service.crash()
    running.join()
    service.start()
    runs = [service.daily_offers(DATE) for _ in range(4)]
    named = {slot["slot"]: slot["offers"] for slot in runs[-1]}
    right = unanswered == [True] and all(named[slot["slot"]] == slot["offers"] for each in runs for slot in each)
    right = right and sorted(service.effects("offers.generated")) == sorted(named)
    made = len(service.effects("offers.generated")) - before
    return MatchmakingEnding(5, len(named) - before, made, right, "killed in the first run; the same offers in each")


def receiver_down(service: Matchmaking, receiver: WebhookReceiver, name: str) -> MatchmakingEnding:
    receiver.down()
    ann, bob = users(service, name)
    match = service.match(ann, bob)
    service.restart()  # kill -9

    def arrived() -> list[str]:
        return [event["eventId"] for event in receiver.events if event["data"]["matchId"] == match]

    receiver.up()
    service.advance(60)  # its second attempt is due after 5 seconds; if it was killed in the first one, after 45
    until(lambda: len(arrived()) > 0)
    how = "the service was killed meanwhile; delivered when it was up"
    return MatchmakingEnding(2, 1, len(set(arrived())), True, how)


def chat_retry(service: Matchmaking, _: WebhookReceiver, name: str) -> MatchmakingEnding:
    ann, bob = users(service, name)
    path = f"/matches/{service.match(ann, bob)}/messages"
    body = {"content": "Hello!", "clientMessageId": new_key()}
    died = service.dies(lambda: service.post(path, body, ann, fault="kill"))
    answers = [service.post(path, body, ann) for _ in range(2)]
    other = service.post(path, {**body, "content": "Hi!"}, ann)
    right = died and [answer.status_code for answer in (*answers, other)] == [201, 201, 409]
    right = right and answers[0].content == answers[1].content
    how = "no answer, 201, 201; other words under the same id: 409"
    return MatchmakingEnding(4, 1, len(service.effects("message.created", ann)), right, how)


STORIES = (
    MatchmakingStory("a double swipe", "answer", double_swipe),
    MatchmakingStory("ten accept at once", "match", ten_at_once),
    MatchmakingStory("the scheduler, run five times with a kill", "slot", scheduler_with_a_kill),
    MatchmakingStory("the webhook receiver is down", "event", receiver_down),
    MatchmakingStory("a chat message, retried after kill -9", "message", chat_retry),
)
