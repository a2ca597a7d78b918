"""The work of every runner's tasks.  It writes events down, and is slow, killed or interrupted as its story says.

It is imported by worker processes, also by one in an environment that has nothing but arq and oncemore's own needs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from oncemore import Guard, Resolution

LEASE = 2.0
LONGEST = 60.0  # a task that nobody interrupts ends after so many seconds


def folder() -> Path:
    return Path(os.environ["ONCEMORE_TEST_FOLDER"])


def new_guard() -> Guard:
    return Guard(f"sqlite:///{folder() / 'ledger.db'}")


def note(what: str, kind: str, story: str, key: str, value: Any = None) -> None:
    """Write an event down, immediately, so that a kill loses none."""
    line = json.dumps({"what": what, "kind": kind, "story": story, "key": key, "value": value}) + "\n"
    with (folder() / "events").open("a") as file:
        file.write(line)


def events(what: str, kind: str, story: str = "", key: str = "") -> list[Any]:
    """Return the values of these events so far."""
    path = folder() / "events"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # one may be half written
    return [
        each["value"]
        for each in found
        if (each["what"], each["kind"]) == (what, kind) and story in ("", each["story"]) and key in ("", each["key"])
    ]


def steps(kind: str, story: str, key: str) -> Iterator[float]:
    """Do the work, and yield how long to sleep before it goes on."""
    runs = len(events("effect", kind, story, key))
    if story == "retry" and not events("failed", kind, story, key):
        note("failed", kind, story, key)
        raise RuntimeError("the first attempt fails before it has an effect")
    note("effect", kind, story, key)
    ends = time.monotonic() + LONGEST
    if story == "duplicate":
        ends = time.monotonic() + 3.0  # a duplicate is run later more often than the runner would try it
    elif story == "long":
        ends = time.monotonic() + 7.0
    elif runs or story == "retry":  # a second run does not meet the same fate
        return
    while time.monotonic() < ends and not (story == "frozen" and (folder() / "thawed").exists()):
        yield 0.05


def bare(story: str, key: str, kind: str = "bare") -> str:
    for seconds in steps(kind, story, key):
        time.sleep(seconds)
    return f"{story} {key}"


async def abare(story: str, key: str, kind: str = "bare") -> str:
    for seconds in steps(kind, story, key):
        await asyncio.sleep(seconds)
    return f"{story} {key}"


def look_up(op: Any) -> Resolution:
    """Resolve the operation by looking for its effect."""
    key = str(op.key)
    story, _, name = key.partition(":")
    return Resolution.settled(f"{story} {name}") if events("effect", "once", story, name) else Resolution.released()


def guarded(once_task: Any, *, held: bool = False, is_async: bool = False) -> Callable[..., Any]:
    """Return the same work behind `once_task`."""
    unknown: dict[str, Any] = {} if held else {"on_unknown": "resolve", "resolver": look_up}

    def once(story: str, key: str) -> str:
        return bare(story, key, "once")

    async def aonce(story: str, key: str) -> str:
        return await abare(story, key, "once")

    decorate = once_task(new_guard(), key="{story}:{key}", name="work", lease=LEASE, **unknown)
    return decorate(aonce if is_async else once)  # type: ignore[no-any-return]


def noted(function: Callable[..., Any], kind: str, name: str) -> Callable[..., Any]:
    """Return a function that also writes down the result that the runner gets."""

    def told(how: str, value: Any, args: Any, kwargs: Any) -> None:
        story, key = (kwargs["story"], kwargs["key"]) if "story" in kwargs else args[-2:]
        note(how, kind, story, key, value)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            told("raised", type(error).__name__, args, kwargs)
            raise
        if isinstance(value, str):  # RQ's task returns a Retry to be run later
            told("returned", value, args, kwargs)
        return value

    @functools.wraps(function)
    async def acall(*args: Any, **kwargs: Any) -> Any:
        try:
            value = await function(*args, **kwargs)
        except BaseException as error:
            told("raised", type(error).__name__, args, kwargs)
            raise
        told("returned", value, args, kwargs)
        return value

    made: Any = acall if inspect.iscoroutinefunction(function) else call
    made.__name__ = made.__qualname__ = name
    made.__module__ = __name__
    return made  # type: ignore[no-any-return]


def all_tasks(once_task: Any, *, is_async: bool = False) -> dict[str, Callable[..., Any]]:
    """Return the functions of a runner by name: each without and with `once_task`, and two that have a time limit."""
    plain = abare if is_async else bare
    return {
        "bare": noted(plain, "bare", "bare"),
        "once": noted(guarded(once_task, is_async=is_async), "once", "once"),
        "bare_limited": noted(plain, "bare", "bare_limited"),
        "once_limited": noted(guarded(once_task, held=True, is_async=is_async), "once", "once_limited"),
    }
