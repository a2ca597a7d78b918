"""One principal never gets anything of another: each gets the same answers as if it were alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any, Literal

from hypothesis import given, settings
from hypothesis import strategies as st

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore.web.asgi import IdempotencyMiddleware

from .wire import Wire

Do = Literal["succeed", "fail", "raise", "stream", "hang", "leave", "finish", "look"]

KEYS = ["k", "k:", ":k", "a:k", "%3Ak", "~", '"k"', "user:b"]
NAMES = ["a", "b", "a:", ":a", "user:a", "a:k", "%3A", "~", "ž", "a\x00", "\ud800", "x" * 300, "x" * 299 + "y"]
CONTRACT = Contract(
    Rule("POST /payments", key="required", name="payments", in_flight="conflict"),
    Rule("POST /accounts/{id}", key="required", in_flight="accepted"),
    Rule("POST /messages", key="template:{body.amount}", name="messages", in_flight="conflict"),
    Rule("POST /shared", across_routes="conflict", in_flight="conflict"),
)
PATHS = ["/payments", "/accounts/1", "/accounts/2", "/messages", "/shared"]
VOLATILE = {"created_at", "expires_at"}


@dataclass(frozen=True)
class Step:
    """The next action of one principal."""

    who: str
    do: Do
    key: str
    path: str
    amount: int


@dataclass
class World:
    """An app, its ledger, and the answers that each principal got."""

    runs: dict[tuple[str, ...], int] = field(default_factory=dict)
    answers: dict[str, list[Any]] = field(default_factory=dict)
    hanging: dict[str, list[asyncio.Event]] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.door = IdempotencyMiddleware(
            self.app, guard=Guard("memory://"), contract=CONTRACT, principal=lambda scope: scope["step"].who
        )

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        step: Step = scope["step"]
        key = (step.who, step.path, step.key)
        self.runs[key] = self.runs.get(key, 0) + 1
        if step.do in ("hang", "leave"):
            gate = asyncio.Event()
            self.hanging.setdefault(step.who, []).append(gate)
            await gate.wait()
        if step.do == "raise":
            raise RuntimeError(secret(step.who))
        body = f"{secret(step.who)} has {step.amount} in run {self.runs[key]}".encode()
        headers = [(b"x-owner", secret(step.who).encode())]
        headers += [(b"content-length", b"%d" % len(body))] if step.do != "stream" else []
        await send({"type": "http.response.start", "status": 503 if step.do == "fail" else 201, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": step.do == "stream"})
        if step.do == "stream":
            await send({"type": "http.response.body"})

    async def take(self, step: Step) -> None:
        """Take one step, and note its answer."""
        if step.do == "finish":
            for gate in self.hanging.get(step.who, [])[:1]:
                gate.set()
                self.hanging[step.who].remove(gate)
        answer: list[Any] = []
        self.answers.setdefault(step.who, []).append(answer)
        self.tasks.append(asyncio.create_task(self.ask(step, answer)))
        for _ in range(50):
            await asyncio.sleep(0)

    async def ask(self, step: Step, answer: list[Any]) -> None:
        body = json.dumps({"amount": step.amount}).encode()
        wire = Wire(step.path, key=step.key, body=body, step=step)
        if step.do == "look":
            wire = Wire(f"/idempotency?operation={step.path[1:]}", method="GET", key=step.key, step=step)
        if step.do == "leave":
            wire.leave()
        try:
            await wire.through(self.door)
        except RuntimeError as error:
            answer.append(str(error))
            return
        answer += [wire.status, wire.said, wire.headers.get("x-owner"), lasting(wire.body)]

    async def live(self, steps: list[Step]) -> dict[str, list[Any]]:
        """Return the last answers of each principal."""
        for step in steps:
            await self.take(step)
        while self.hanging:
            _, gates = self.hanging.popitem()
            for gate in gates:
                gate.set()
            await asyncio.sleep(0.001)
        await asyncio.gather(*self.tasks)
        return self.answers


def secret(who: str) -> str:
    """Return a text that only *who* may see."""
    return f"<secret of {who!a}>"


def lasting(body: bytes) -> Any:
    """Return the body without values that differ from one moment to the next."""
    try:
        document = json.loads(body)
    except ValueError:
        return body
    return {name: value for name, value in document.items() if name not in VOLATILE}


def steps_of(names: list[str]) -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        st.sampled_from(names),
        st.sampled_from(["succeed", "fail", "raise", "stream", "hang", "leave", "finish", "look"]),
        st.sampled_from(KEYS[:3]) | st.sampled_from(KEYS),
        st.sampled_from(PATHS[:1]) | st.sampled_from(PATHS),
        st.integers(1, 2),
    )
    return st.lists(step, min_size=2, max_size=24)


@settings(max_examples=200)
@given(st.lists(st.sampled_from(NAMES) | st.text(min_size=1), min_size=2, max_size=3, unique=True).flatmap(steps_of))
def test_each_principal_gets_what_it_would_get_alone(steps: list[Step]) -> None:
    """Running, settled, failed and streamed operations of others change nothing."""
    together = asyncio.run(World().live(steps))
    for who, answers in together.items():
        assert asyncio.run(World().live([step for step in steps if step.who == who])) == {who: answers}
        strangers = {secret(other) for other in together if other != who}
        assert not [answer for answer in answers if any(stranger in str(answer) for stranger in strangers)]
