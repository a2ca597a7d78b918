"""Retries for plain functions and blocks of code, sync or async, by the same loop as the transports."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial, wraps
from types import CoroutineType, TracebackType
from typing import Any, TypeVar, overload

from .._runtime.plan import Effect, Plan, arun, run
from ..errors import ConfigurationError
from .attempts import Environment, send_with_retries
from .deadlines import with_deadline
from .errors import AttemptTimeout
from .hosts import HOSTS
from .keys import new_key
from .retry import Retry, check_policy
from .story import RetryObserver, Story
from .verdict import ACCEPTED, Verdict

F = TypeVar("F", bound=Callable[..., Any])
NEVER = float("inf")


class FunctionCall:
    """One call of a function.  It is also the effect of one attempt."""

    __slots__ = ("args", "function", "keywords", "name", "policy", "story", "timeout")

    key: str | None = None
    lasts = NEVER

    def __init__(self, function: Callable[..., Any], args: Any, keywords: Any, policy: Retry, name: str) -> None:
        self.function = function
        self.args = args
        self.keywords = keywords
        self.policy = policy
        self.name = name
        self.story: Story | None = None

    def attempt(self, number: int, timeout: float) -> Effect[Any]:
        self.timeout = timeout
        return self

    def run(self) -> Any:
        result = self.function(*self.args, **self.keywords)
        if isinstance(result, CoroutineType):  # it has not begun, so its errors would not be seen here
            result.close()
            raise ConfigurationError(f"{self.name} returned a coroutine: write it as async def, and await in it")
        return result

    async def arun(self) -> Any:
        return await with_deadline(self.function(*self.args, **self.keywords), self.timeout, AttemptTimeout, self.name)

    def judge(self, reply: Any, error: Exception | None) -> Verdict:
        if error is None:
            return ACCEPTED
        again = isinstance(error, AttemptTimeout) or self.policy.wants(error)
        retry_after = getattr(error, "retry_after", None)
        after = float(retry_after) if isinstance(retry_after, int | float) and retry_after >= 0 else None
        kind = "timeout" if isinstance(error, TimeoutError) else "error"
        return Verdict(again, kind, type(error).__name__, known="unknown", after=after, blame=again)

    def resendable(self) -> bool:
        return True

    def close(self, reply: Any) -> None:
        return None

    def failure(self, story: Story, error: Exception | None) -> Exception | None:
        # The caller expects the function's own error, so the story is a note on it.
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
    """Decorate a function so that it is called again after the errors that the policy names.

    The last error is raised, with the story as a note.  The deadline cuts async functions; a sync function is not called again
    after it, but cannot be cut.

    Args:
        policy: a `Retry`; its *settings* can be given by name instead.
        host: names the budget and the breaker, which all calls with this host share.
        key: names a parameter that gets a key if the caller gave none.  All attempts of a call have the same key.
        observers: are called with each `RetryEvent`.
    """
    if callable(policy) and not isinstance(policy, Retry):
        return retry()(policy)
    if policy is not None and settings:
        raise TypeError(f"retry: give a policy or settings, not both ({', '.join(settings)})")
    chosen = Retry(**settings) if policy is None else check_policy(policy)
    environment = Environment(hosts=HOSTS if host else None, observers=tuple(observers))
    return lambda function: _decorate(function, chosen, environment, host, key)


def _decorate(
    function: Callable[..., Any], policy: Retry, environment: Environment, host: str | None, key: str | None
) -> Any:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function!r} is a generator, whose errors come after the call: retry a function that consumes it"
        )
    name = host or own_name(function)
    fill_key = None if key is None else key_filler(function, key)

    def plan(args: Any, keywords: Any) -> Plan[Any]:
        if fill_key is not None:
            args, keywords = fill_key(args, keywords)
        return send_with_retries(FunctionCall(function, args, keywords, policy, name), policy, environment)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return run(plan(args, keywords))

    @wraps(function)
    async def acall(*args: Any, **keywords: Any) -> Any:
        return await arun(plan(args, keywords))

    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return acall if awaited else call


def own_name(function: Any) -> str:
    """Return the name for the story.  A partial is named after its function, a callable object after its class."""
    called = function.func if isinstance(function, partial) else function
    named = called if hasattr(called, "__qualname__") else type(called)
    return f"{named.__module__}.{named.__qualname__}"


def key_filler(function: Callable[..., Any], key: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a function that adds a new key to a call's arguments as the parameter *key*, if the caller gave none."""
    signature = inspect.signature(function)
    named = key in signature.parameters
    if not named and all(each.kind is not each.VAR_KEYWORD for each in signature.parameters.values()):
        raise ConfigurationError(f"key={key!r}: {own_name(function)} has no such parameter")

    def fill(args: Any, keywords: Any) -> tuple[Any, Any]:
        if not named:
            given = keywords.get(key)
            return args, {**keywords, key: new_key() if given is None else given}
        bound = signature.bind_partial(*args, **keywords)
        if bound.arguments.get(key) is None:
            bound.arguments[key] = new_key()
        return bound.args, bound.kwargs

    return fill


class Block:
    """One attempt at a `with` block.

    *remaining* is the time in seconds that it may take; the code in the block can use it as its own timeout.
    """

    __slots__ = ("error", "number", "remaining")

    def __init__(self, number: int, remaining: float) -> None:
        self.number = number
        self.remaining = remaining
        self.error: Exception | None = None

    def __enter__(self) -> Block:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> bool:
        # The error is kept: the retry loop decides whether to raise it or to try again.
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None

    def report(self, plan: Plan[Any]) -> Effect[Any]:
        """Tell the retry loop how the block ended, and return its next effect."""
        return plan.send(None) if self.error is None else plan.throw(self.error)


class BlockCall(FunctionCall):
    """A block of code in place of a function: each attempt at it is a Block, which `retrying` passes to its caller."""

    __slots__ = ()

    def attempt(self, number: int, timeout: float) -> Any:
        return Block(number, timeout)


class retrying:
    """Attempts at a block: `for attempt in retrying(Retry()):` (or `async for`), and in it `with attempt:`.

    `attempt.remaining` is the time in seconds that the attempt may take.
    """

    def __init__(
        self, policy: Retry | None = None, *, name: str = "block", observers: Sequence[RetryObserver] = ()
    ) -> None:
        self._policy = check_policy(policy)
        self._name = name
        self._environment = Environment(hosts=None, observers=tuple(observers))

    def _plan(self) -> Plan[Any]:
        block = BlockCall(retrying, (), {}, self._policy, self._name)
        return send_with_retries(block, self._policy, self._environment)

    def __iter__(self) -> Iterator[Block]:
        plan = self._plan()
        with suppress(StopIteration):  # the end of the plan
            effect = next(plan)
            while True:
                if isinstance(effect, Block):
                    yield effect
                    effect = effect.report(plan)
                else:  # a pause
                    effect = plan.send(effect.run())

    async def __aiter__(self) -> AsyncIterator[Block]:
        plan = self._plan()
        with suppress(StopIteration):
            effect = next(plan)
            while True:
                if isinstance(effect, Block):
                    yield effect
                    effect = effect.report(plan)
                else:
                    effect = plan.send(await effect.arun())
