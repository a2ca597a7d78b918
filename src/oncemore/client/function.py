"""Retries for plain functions and blocks of code, sync or async, by the same plan as the transports."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar, overload

from ..core.plan import Effect, arun, run
from .attempts import World, attempts
from .errors import AttemptTimeout
from .hosts import HOSTS
from .judge import ACCEPTED, Verdict
from .keys import new_key
from .retry import Retry
from .story import RetryObserver, Story

F = TypeVar("F", bound=Callable[..., Any])
NEVER = float("inf")


class Calling:
    """One call of a function; as an effect, it carries itself out."""

    __slots__ = ("args", "function", "keywords", "limit", "name", "retry", "story")

    key: str | None = None
    lasts = NEVER
    hedgeable = False  # a function may have effects: it is called again after it failed, but never beside itself
    telling = False

    def __init__(self, function: Callable[..., Any], args: Any, keywords: Any, retry: Retry, name: str) -> None:
        self.function = function
        self.args = args
        self.keywords = keywords
        self.retry = retry
        self.name = name
        self.story: Story | None = None

    def attempt(self, number: int, limit: float) -> Effect[Any]:
        self.limit = limit
        return self

    def run(self) -> Any:
        return self.function(*self.args, **self.keywords)

    async def arun(self) -> Any:
        timeout = asyncio.timeout(self.limit)
        try:
            async with timeout:
                return await self.function(*self.args, **self.keywords)
        except TimeoutError as error:
            if timeout.expired():
                raise AttemptTimeout(f"{self.name} took longer than {self.limit:.3g} s and was cut") from error
            raise

    def judge(self, reply: Any) -> Verdict:
        return ACCEPTED

    def judge_error(self, error: Exception) -> Verdict:
        again = isinstance(error, AttemptTimeout) or self.retry.wants(error)
        after = getattr(error, "retry_after", None)
        wish = float(after) if isinstance(after, int | float) and after >= 0 else None
        kind = "timeout" if isinstance(error, TimeoutError) else "error"
        return Verdict(again, kind, type(error).__name__, known="unknown", after=wish, blame=again)

    def resendable(self) -> bool:
        return True

    def discard(self, reply: Any) -> None:
        return None

    def exhausted(self, story: Story, error: Exception | None) -> Exception | None:
        # The caller expects the function's own errors; the story rides along.
        if error is not None:
            error.add_note(str(story))
        return error


@overload
def retry(policy: F, /) -> F: ...
@overload
def retry(
    policy: Retry | None = None,
    /,
    *,
    host: str | None = None,
    key: str | None = None,
    observers: Sequence[RetryObserver] = (),
    **settings: Any,
) -> Callable[[F], F]: ...
def retry(
    policy: Any = None,
    /,
    *,
    host: str | None = None,
    key: str | None = None,
    observers: Sequence[RetryObserver] = (),
    **settings: Any,
) -> Any:
    """The function, called again while it fails as the policy says; its last error is raised with the story as a note.

    Give a `Retry`, or its settings by name.  *host* names the budget and circuit that the calls share with others.
    *key* names a parameter that gets a key, made once per call and the same in every attempt.  The deadline cuts async
    functions; a sync one is not begun again after it, but cannot be cut.
    """
    if callable(policy) and not isinstance(policy, Retry):
        return retry()(policy)
    if policy is not None and settings:
        raise TypeError(f"retry: give a policy or settings, not both ({', '.join(settings)})")
    chosen: Retry = policy or Retry(**settings)
    world = World(hosts=HOSTS if host else None, observers=tuple(observers))
    return lambda function: _decorated(function, chosen, world, host, key)


def _decorated(function: Callable[..., Any], policy: Retry, world: World, host: str | None, key: str | None) -> Any:
    name = host or f"{function.__module__}.{function.__qualname__}"

    def calling(args: Any, keywords: Any) -> Calling:
        if key is not None and keywords.get(key) is None:
            keywords[key] = new_key()
        return Calling(function, args, keywords, policy, name)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return run(attempts(calling(args, keywords), policy, world))

    @wraps(function)
    async def acall(*args: Any, **keywords: Any) -> Any:
        return await arun(attempts(calling(args, keywords), policy, world))

    return acall if inspect.iscoroutinefunction(function) else call


class Block:
    """One attempt at a `with` block."""

    __slots__ = ("error", "number", "remaining")

    def __init__(self, number: int, remaining: float) -> None:
        self.number = number
        self.remaining = remaining
        self.error: Exception | None = None

    def __enter__(self) -> Block:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        # Held back, not swallowed: the plan decides whether it is raised or tried again.
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None

    def run(self) -> None:
        raise AssertionError("a block is carried out by its caller")

    async def arun(self) -> None:
        raise AssertionError("a block is carried out by its caller")


class Attempting(Calling):
    """A block of code in place of a function."""

    __slots__ = ()

    def attempt(self, number: int, limit: float) -> Effect[Any]:
        return Block(number, limit)


class retrying:
    """Attempts at a block: `for attempt in retrying(Retry()):` (or `async for`), and in it `with attempt:`.

    `attempt.remaining` is the time that the attempt may take, for passing on to whatever blocks inside.
    """

    def __init__(
        self, policy: Retry | None = None, *, name: str = "block", observers: Sequence[RetryObserver] = ()
    ) -> None:
        policy = policy or Retry()
        work = Attempting(retrying, (), {}, policy, name)
        self._plan = attempts(work, policy, World(hosts=None, observers=tuple(observers)))

    def __iter__(self) -> Iterator[Block]:
        effect = next(self._plan)
        while True:
            try:
                if isinstance(effect, Block):
                    yield effect
                    effect = self._resume(effect)
                else:
                    effect = self._plan.send(effect.run())
            except StopIteration:
                return

    async def __aiter__(self) -> AsyncIterator[Block]:
        effect = next(self._plan)
        while True:
            try:
                if isinstance(effect, Block):
                    yield effect
                    effect = self._resume(effect)
                else:
                    effect = self._plan.send(await effect.arun())
            except StopIteration:
                return

    def _resume(self, block: Block) -> Effect[Any]:
        return self._plan.send(None) if block.error is None else self._plan.throw(block.error)
