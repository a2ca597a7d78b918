"""One step as it was asked for: what its function takes decides what it is, and its retry how often it is tried."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from .._contract.policy import Policy
from .._runtime.backoff import Backoff
from ..errors import ConfigurationError, Fenced, Refusal
from .classes import annotated_classes
from .context import Op

StepEffect = Literal["lease", "transaction"]
OnUnknownStep = Literal["retry", "hold", "resolve"]

BORROWED = {"connection", "session"}
GIVEN = {"key", *BORROWED}


BACKOFF = Backoff()


class Retrying(Protocol):
    """How often a step is tried: which errors deserve it, and the delays in between.  `oncemore.Retry` is one."""

    def wants(self, error: Exception, /) -> bool: ...
    def delays(self) -> Iterator[float]: ...


@dataclass(frozen=True, slots=True)
class StepRetry:
    """So many *attempts*, whatever the error."""

    attempts: int = 3
    backoff: Backoff = BACKOFF

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise ConfigurationError(f"retry = {self.attempts!r}: there is at least the first attempt")

    def wants(self, error: Exception, /) -> bool:
        return True

    def delays(self) -> Iterator[float]:
        previous = 0.0
        for retry in range(1, self.attempts):
            previous = self.backoff.delay(retry, random.random(), previous)
            yield previous


EXTERNAL, ONCE = StepRetry(), StepRetry(1)


class Step:
    """What `op.step` was given, judged before anything is claimed."""

    def __init__(
        self,
        number: int | str,
        name: str,
        function: Callable[..., Any],
        retry: Retrying | int | None = None,
        effect: StepEffect | None = None,
        on_unknown: OnUnknownStep = "retry",
        resolver: Callable[..., Any] | None = None,
        *,
        again: bool = False,
        undoes: bool = False,
    ) -> None:
        self.number = number
        self.name = name
        self.function = function
        # What its key for the provider is made from: a second charge under the first one's key would be the first.
        self.label = f"{name}\n{number}" if again else name
        self.undoes = undoes
        self.takes = taken_by(function, name, takes_value=undoes)
        borrows = any(each.name in BORROWED for each in self.takes)
        self.effect: StepEffect = effect or ("transaction" if borrows else "lease")
        # A transaction that the database refused is run again anyway, and nothing else is cured by time alone.
        usual = ONCE if self.effect == "transaction" else EXTERNAL
        self.retry: Retrying = usual if retry is None else StepRetry(retry) if isinstance(retry, int) else retry
        self.on_unknown = on_unknown
        self.resolver = resolver
        if self.effect == "lease" and borrows:
            raise ConfigurationError(f"step {name!r} takes a connection, which effect = 'lease' does not have")
        if on_unknown == "resolve" and resolver is None:
            raise ConfigurationError(f"step {name!r}: on_unknown = 'resolve' needs a resolver")

    def naming(self, policy: Policy) -> Policy:
        """Return *policy*, with the classes that the return annotation of the step's function names."""
        new = tuple(kind for kind in annotated_classes(self.function, "return") if kind not in policy.types)
        return dataclasses.replace(policy, types=policy.types + new) if new else policy

    def policy(self, policy: Policy, key: str) -> Policy:
        """The usual policy of steps, with what this one says about a holder that vanished in it.

        The policy's errors may be what comes of a step, and never what comes of its undoing: that has failed.
        """
        if self.undoes:
            return dataclasses.replace(policy, errors=())
        if self.on_unknown == "retry":
            return policy
        resolver = self.resolver
        asks = None if resolver is None else (lambda op: resolver(key))
        return dataclasses.replace(policy, on_unknown=self.on_unknown, resolver=asks)

    def called(self, key: str, value: Any) -> Called:
        return Called(self, key, value)


class Called:
    """The performer of a step: calls its function with what it takes, and remembers that it was called."""

    __slots__ = ("began", "key", "step", "value")

    def __init__(self, step: Step, key: str, value: Any) -> None:
        self.step = step
        self.key = key
        self.value = value
        self.began = False

    def __call__(self, op: Op) -> Any:
        self.began = True
        first = [self._given(each.name, op) for each in self.step.takes if each.kind is each.POSITIONAL_ONLY]
        rest = {
            each.name: self._given(each.name, op) for each in self.step.takes if each.kind is not each.POSITIONAL_ONLY
        }
        given = self.step.function(*first, **rest)
        return nothing_of(given) if self.step.undoes else given

    def __repr__(self) -> str:  # where it is named in an error
        return f"{self.step.function!r} of step {self.step.name!r}"

    def _given(self, name: str, op: Op) -> Any:
        if name == "connection":
            return op.connection
        if name == "session":
            return op.session()
        return self.key if name == "key" else self.value


def nothing_of(given: Any) -> Any:
    """What an undo gives is nobody's business: it may well be what no checkpoint could hold."""

    async def ended() -> None:
        await given

    return ended() if hasattr(given, "__await__") else None


def taken_by(function: Callable[..., Any], name: str, *, takes_value: bool) -> tuple[inspect.Parameter, ...]:
    """Those parameters that are given: of an undo, the first that is nothing else gets the step's value."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return ()
    named = [each for each in parameters if each.kind not in VARIADIC]
    others = [each for each in named if each.name not in GIVEN and each.default is each.empty]
    value = others.pop(0) if takes_value and others else None
    if others:
        raise ConfigurationError(
            f"step {name!r}: its function takes {', '.join(each.name for each in others)}; a step is given a connection, "
            "a session or a key, so bind the rest with a lambda or functools.partial"
        )
    return tuple(each for each in named if each.name in GIVEN or each is value)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def wants(retry: Retrying, error: Exception) -> bool:
    """Whether the same step may work in a moment; what the ledger refuses, or the programmer has to mend, will not."""
    if isinstance(error, Refusal | Fenced | ConfigurationError):
        return getattr(error, "retryable", False) and not isinstance(error, Fenced)
    return retry.wants(error)
