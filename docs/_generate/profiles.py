"""Writes docs/reference/profiles.md: what each profile does, found out by asking an app that is guarded by it.

python docs/_generate/profiles.py
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.profiles import PROFILES
from oncemore.web.asgi import IdempotencyMiddleware

PAGE = Path(__file__).parents[1] / "reference" / "profiles.md"
V4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
MARKS = ("retry-after", "idempotency-status", "idempotent-replayed", "repeatability-result")


class App:
    """Answers with the next of *statuses*, the last again and again, as soon as it is *open*."""

    def __init__(self, *statuses: int) -> None:
        self.runs = 0
        self.statuses = statuses or (201,)
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        status = self.statuses[min(self.runs, len(self.statuses)) - 1]
        await self.open.wait()
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"run": %d}' % self.runs})


class Asked:
    """An app behind a door under one profile, and someone who asks it."""

    def __init__(self, profile: str, *statuses: int) -> None:
        self.rule = Contract(profile=profile).default
        self.app = App(*statuses)
        self.guard = Guard("memory://", cache=0)
        door = IdempotencyMiddleware(self.app, guard=self.guard, profile=profile)
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(door), base_url="http://test")

    async def ask(
        self,
        key: str | None = f'"{V4}"',
        *,
        method: str = "POST",
        path: str = "/payments",
        amount: int = 100,
        **headers: str,
    ) -> httpx.Response:
        """The response to a request with the key in the profile's own header."""
        fields = {"Authorization": "Bearer alice"} | {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            fields[self.rule.key.name] = key
        return await self._client.request(method, path, headers=fields, json={"amount": amount})


def shown(response: httpx.Response) -> str:
    """A response in few words."""
    headers = [f"`{name.title()}: {response.headers[name]}`" for name in MARKS if name in response.headers]
    place = ["`Location`"] if "location" in response.headers else []
    return ", ".join([str(response.status_code), *headers, *place])


def told(response: httpx.Response) -> str:
    """The same without the status."""
    return shown(response).partition(", ")[2] or "nothing"


# Questions: each takes the name of a profile


async def guarded_methods(profile: str) -> str:
    found = []
    for method in ("POST", "PATCH", "PUT", "DELETE", "GET"):
        asked = Asked(profile)
        await asked.ask(method=method)
        await asked.ask(method=method)
        found += [method] if asked.app.runs == 1 else []
    return ", ".join(found)


async def key_header(profile: str) -> str:
    return f"`{Asked(profile).rule.key.name}`"


async def missing(profile: str) -> str:
    asked = Asked(profile)
    response = await asked.ask(None)
    return "runs unguarded" if asked.app.runs else shown(response)


async def accepted(profile: str, key: str) -> str:
    asked = Asked(profile)
    response = await asked.ask(key)
    return "accepted" if asked.app.runs else shown(response)


async def unquoted(profile: str) -> str:
    return await accepted(profile, V4)


async def malformed(profile: str) -> str:
    return await accepted(profile, f'"{V4}')


async def any_text(profile: str) -> str:
    return await accepted(profile, '"order 7"')


async def long(profile: str) -> str:
    return await accepted(profile, f'"{"k" * 101}"')


async def first(profile: str) -> str:
    return told(await Asked(profile).ask())


async def success(profile: str) -> str:
    asked = Asked(profile)
    await asked.ask()
    response = await asked.ask()
    assert (asked.app.runs, response.json()) == (1, {"run": 1})
    return shown(response)


async def mismatch(profile: str) -> str:
    asked = Asked(profile)
    await asked.ask()
    return shown(await asked.ask(amount=101))


async def other_route(profile: str) -> str:
    asked = Asked(profile)
    await asked.ask()
    response = await asked.ask(path="/refunds")
    return "another operation" if asked.app.runs == 2 else shown(response)


async def in_flight(profile: str) -> str:
    asked = Asked(profile)
    asked.app.open.clear()
    running = asyncio.create_task(asked.ask())
    while not asked.app.runs:
        await asyncio.sleep(0.001)
    impatient = await asked.ask(X_Request_Timeout="0.02")
    waiting = asyncio.create_task(asked.ask())
    await asyncio.sleep(0.02)
    waits = not waiting.done()
    asked.app.open.set()
    await asyncio.gather(running, waiting)
    assert asked.app.runs == 1
    return f"waits; then {shown(impatient)}" if waits else shown(impatient)


async def after(profile: str, status: int) -> str:
    asked = Asked(profile, status, 201)
    await asked.ask()
    response = await asked.ask()
    return "runs again" if asked.app.runs == 2 else f"{response.status_code} replayed"


async def after_500(profile: str) -> str:
    return await after(profile, 500)


async def after_422(profile: str) -> str:
    return await after(profile, 422)


async def after_402(profile: str) -> str:
    return await after(profile, 402)


async def after_429(profile: str) -> str:
    return await after(profile, 429)


async def retention(profile: str) -> str:
    seconds = Asked(profile).rule.policy.ttl
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds % size == 0:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"


async def expired(profile: str) -> str:
    """A day too late, and said so where the profile has a header for it."""
    asked = Asked(profile)
    ttl = asked.rule.policy.ttl
    await asked.ask(Repeatability_First_Sent=formatdate(time.time(), usegmt=True))
    asked.guard.store.shift += ttl + 86400
    response = await asked.ask(Repeatability_First_Sent=formatdate(time.time() - ttl - 86400, usegmt=True))
    return "runs as new" if asked.app.runs == 2 else shown(response)


Question = Callable[[str], Awaitable[str]]
TABLES: dict[str, dict[str, Question]] = {
    "Keys": {
        "guards": guarded_methods,
        "key header": key_header,
        "no key": missing,
        "unquoted": unquoted,
        "malformed": malformed,
        "not a UUID": any_text,
        "over 100 characters": long,
    },
    "Repeats": {
        "the first response says": first,
        "a repeat gets": success,
        "another payload": mismatch,
        "another route": other_route,
        "while the first is running": in_flight,
    },
    "Failures and time": {
        "a repeat after 500": after_500,
        "after 422": after_422,
        "after 402": after_402,
        "after 429": after_429,
        "kept for": retention,
        "a repeat after that": expired,
    },
}


async def answers(questions: dict[str, Question]) -> dict[str, dict[str, str]]:
    """The answer of each profile to each question."""
    return {profile: {name: await ask(profile) for name, ask in questions.items()} for profile in PROFILES}


INTRODUCTION = """\
# Profiles

A profile is a complete set of settings.
Name it in the contract (`profile = "ietf"` under `[defaults]`) or, without a contract, on the middleware (`profile="ietf"`).
Rules and `[defaults]` override it one setting at a time.

| profile | for |
| --- | --- |
| `default` | most services: the rules of the idempotency playbook, which `Retry.playbook()` follows on the client's side |
| `ietf` | the draft of the `Idempotency-Key` header, to the letter |
| `stripe`, `stripe-v2` | clients written for Stripe's APIs |
| `azure` | clients that send `Repeatability-Request-ID` (OASIS Repeatable Requests) |
| `zalando` | Zalando's REST guidelines, rule 230 |
| `matchmaking` | an app in which every write must carry a UUID: messages, matches, reports |
| `patterns` | payments that also want to see the same request under another key (it is logged) |
| `knowledge` | long work: a duplicate gets 202 with a status URL instead of waiting |
| `spring` | clients of Spring services: a required key of at most 100 characters, and failures that are kept |

The tables below say what a guarded app answers. They were made by asking one, under each profile:
`python docs/_generate/profiles.py`.
"""


def table(rows: dict[str, dict[str, str]]) -> str:
    """The answers as a Markdown table, a row for each profile."""
    columns = list(next(iter(rows.values())))
    lines = [["profile", *columns], ["---"] * (len(columns) + 1)]
    lines += [[f"`{profile}`", *(row[column] for column in columns)] for profile, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    """The whole page."""
    parts = [f"## {title}\n\n{table(asyncio.run(answers(questions)))}\n" for title, questions in TABLES.items()]
    return "\n".join([INTRODUCTION, *parts])


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
