"""Retries for plain functions and blocks of code, sync or async, by the same plan as the transports."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial, wraps
from types import CoroutineType, TracebackType
from typing import Any, TypeVar, overload

from .._runtime.plan import Effect, Plan, arun, arun_to, run, run_to
from ..errors import ConfigurationError
from .attempts import World, attempts
from .errors import AttemptTimeout
from .hosts import HOSTS
from .keys import new_key
from .retry import Retry
from .story import RetryObserver, Story
from .verdict import ACCEPTED, Verdict

F = TypeVar("F", bound=Callable[..., Any])
NEVER = float("inf")


class Calling:
    """One call of a function; as an effect, it carries itself out."""

    __slots__ = ("args", "function", "keywords", "limit", "name", "retry", "story")

    key: str | None = None
    lasts = NEVER
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
        result = self.function(*self.args, **self.keywords)
        if isinstance(result, CoroutineType):  # it has not begun, and what it does would not be tried again
            result.close()
            raise ConfigurationError(f"{self.name} gives a coroutine: write it as async def, and await in it")
        return result

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
    chosen = checked(policy) if policy is not None else Retry(**settings)
    world = World(hosts=HOSTS if host else None, observers=tuple(observers))
    return lambda function: _decorated(function, chosen, world, host, key)


def _decorated(function: Callable[..., Any], policy: Retry, world: World, host: str | None, key: str | None) -> Any:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(f"{function!r} is a generator: its body runs after the call, where nothing is retried")
    name = host or own_name(function)
    keyed = None if key is None else Keyed(function, key)

    def calling(args: Any, keywords: Any) -> Calling:
        if keyed is not None:
            args, keywords = keyed.arguments(args, keywords)
        return Calling(function, args, keywords, policy, name)

    @wraps(function)
    def call(*args: Any, **keywords: Any) -> Any:
        return run(attempts(calling(args, keywords), policy, world))

    @wraps(function)
    async def acall(*args: Any, **keywords: Any) -> Any:
        return await arun(attempts(calling(args, keywords), policy, world))

    awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    return acall if awaited else call


def checked(policy: object) -> Retry:
    """The policy, if it is one."""
    if not isinstance(policy, Retry):
        raise ConfigurationError(f"{policy!r} is no policy: give a Retry, such as Retry(attempts=3)")
    return policy


def own_name(function: Any) -> str:
    """What the story calls it: a partial goes by its function, an object by its class."""
    called = function.func if isinstance(function, partial) else function
    named = called if hasattr(called, "__qualname__") else type(called)
    return f"{named.__module__}.{named.__qualname__}"


class Keyed:
    """A function's parameter *key*, which gets a new key wherever the caller gave none."""

    def __init__(self, function: Callable[..., Any], key: str) -> None:
        self.key = key
        self.signature = inspect.signature(function)
        parameters = self.signature.parameters
        self.named = key in parameters
        if not self.named and all(each.kind is not each.VAR_KEYWORD for each in parameters.values()):
            raise ConfigurationError(f"key={key!r}: {own_name(function)} has no such parameter")

    def arguments(self, args: Any, keywords: Any) -> tuple[Any, Any]:
        """The call's, with the key among them."""
        if not self.named:
            made = keywords.get(self.key)
            return args, {**keywords, self.key: new_key() if made is None else made}
        bound = self.signature.bind_partial(*args, **keywords)
        if bound.arguments.get(self.key) is None:
            bound.arguments[self.key] = new_key()
        return bound.args, bound.kwargs


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

    def tell(self, plan: Plan[Any]) -> Effect[Any]:
        """The plan's next effect, now that the block has ended."""
        return plan.send(None) if self.error is None else plan.throw(self.error)

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
        self._policy = Retry() if policy is None else checked(policy)
        self._name = name
        self._world = World(hosts=None, observers=tuple(observers))

    def _plan(self) -> Plan[Any]:
        return attempts(Attempting(retrying, (), {}, self._policy, self._name), self._policy, self._world)

    def __iter__(self) -> Iterator[Block]:
        plan = self._plan()
        block = run_to(Block, plan, partial(next, plan))
        while isinstance(block, Block):
            yield block
            block = run_to(Block, plan, partial(block.tell, plan))

    async def __aiter__(self) -> AsyncIterator[Block]:
        plan = self._plan()
        block = await arun_to(Block, plan, partial(next, plan))
        while isinstance(block, Block):
            yield block
            block = await arun_to(Block, plan, partial(block.tell, plan))
