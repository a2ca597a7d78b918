"""The decorator `once`: a function, sync or async, runs once per key."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar, cast

from .._contract.keys import check_name
from .._contract.policy import Policy
from .._contract.templates import Template, remembered
from .._fingerprint.fingerprint import fingerprint_of
from .._runtime.plan import Plan, arun, run
from ..errors import ConfigurationError, CorruptRecord
from .classes import annotated_classes, can_be_returned, module_of
from .context import Op, running
from .decisions import Answer
from .guard import Guard, check_guard
from .model import Operation
from .steps import VARIADIC
from .transactions import Do
from .values import replayed

P = ParamSpec("P")
T = TypeVar("T")


def once(
    guard: Guard,
    *,
    key: str | Callable[..., str],
    name: str = "",
    ignore: Sequence[str] = (),
    **settings: Any,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function runs once per *key*, and every further call gets the first one's result.

    *key* is a template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the same arguments.
    The arguments must be the same each time; those in *ignore* (a session, a logger) are not compared.  *name* owns the
    keys; by default it is the function's own.  *settings* are those of `Policy`: `ttl="7d"`, `errors=(...)`; the guard's
    policy gives the others.  A repeated call returns an equal value of the same type: built-in types, and the classes
    that the function's return annotation or `types=(Order,)` names.
    """
    policy = check_guard(guard).policy.but(**settings)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        return Once(guard, function, key, name, ignore, policy).wrapped()

    return decorate


class Once(Generic[P, T]):
    """A guarded function."""

    def __init__(
        self,
        guard: Guard,
        function: Callable[P, T],
        key: str | Callable[..., str],
        name: str,
        ignore: Sequence[str],
        policy: Policy,
    ) -> None:
        check_function(function)
        self.guard = guard
        self.function = function
        self.settings = policy
        self.name = name or own_name(function)
        self.signature = inspect.signature(function)
        names = tuple(self.signature.parameters)
        ignore = (ignore,) if isinstance(ignore, str) else ignore
        for unknown in sorted(set(ignore) - set(names)):
            raise ConfigurationError(f"ignore names {unknown!r}, which {self.name} does not take")
        owner = {"self", "cls"}.intersection(names[:1])
        # An object or class has no fingerprint of its own: if it matters, the key names it, as in "{self.id}".
        self.compared = tuple(each for each in names if each not in ignore and each not in owner)
        self.key = key if callable(key) else remembered(Template(key, names=names), policy.ttl)
        self.awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @functools.cached_property
    def policy(self) -> Policy:
        """The settings, with the classes that the annotations name: those of the result and of the arguments that are kept.

        It is made at the first call, because an annotation may name a class that is defined below the function.
        """
        returned = (*self.settings.types, *annotated_classes(self.function, "return"))
        for kind in returned:
            if not can_be_returned(kind, self.settings.types):
                raise ConfigurationError(
                    f"{self.name} returns a {kind.__qualname__}, which cannot be stored and replayed: return built-in types, "
                    "dataclasses, attrs classes, msgspec structs, pydantic models, named tuples or enums; or name the "
                    "subclasses that it returns by types="
                )
        kept = annotated_classes(self.function, *self.compared) if self.settings.effect == "steps" else ()
        return dataclasses.replace(self.settings, types=(*returned, *kept))

    def types(self) -> tuple[type, ...]:
        """Return the classes that results and kept arguments may be of."""
        return self.policy.types

    def operation(self, *args: P.args, **kwargs: P.kwargs) -> Operation:
        """Return the operation of a call with these arguments, to look it up in the ledger."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if isinstance(self.key, Template):
            name = self.key.render(arguments=arguments, now=self.guard.clock.time())
        else:
            name = check_name(self.key(*args, **kwargs), "The result of the key function")
        compared = {each: arguments[each] for each in self.compared}
        request = (lambda: compared) if self.settings.effect == "steps" else None  # kept, to finish it after a crash
        fingerprint = fingerprint_of(list(compared.values()))
        return Operation(f"once:{self.name}", name, fingerprint, self.name, request=request)

    def drive(self, operation: Operation, request: Mapping[str, Any]) -> Plan[Answer]:
        """Return the plan that finishes an operation of this function, from the arguments that were kept.

        Raises a ConfigurationError unless the function can be called with these arguments and defaults for the others.
        """
        instead = "give the completer a function of the operation and the kept arguments instead"
        for name, parameter in self.signature.parameters.items():
            if name not in request and parameter.default is parameter.empty and parameter.kind not in VARIADIC:
                raise ConfigurationError(f"{self.name} cannot be finished, because {name!r} is not kept: {instead}")
        for name in request.keys() - self.signature.parameters.keys():
            raise ConfigurationError(
                f"{self.name} cannot be finished, because it takes no {name!r} any more: {instead}"
            )
        bound = self.signature.bind_partial()
        bound.arguments.update(request)
        plan = self.guard.guarded(operation, self._performer(*bound.args, **bound.kwargs), self.policy)
        if self.awaited:
            return (yield from plan)
        # It blocks: if an event loop drives this plan, the function and its steps run on a thread.
        answer: Answer = yield Do(partial(run, plan), None)
        return answer

    def _performer(self, *args: Any, **kwargs: Any) -> Callable[[Op], Any]:
        """Return a function that calls the guarded one, with the operation as the current one."""
        function = cast("Callable[..., Any]", self.function)

        async def aperform(op: Op) -> Any:
            with running(op):
                return await function(*args, **kwargs)

        def perform(op: Op) -> Any:
            with running(op):
                return function(*args, **kwargs)

        return aperform if self.awaited else perform

    def wrapped(self) -> Callable[P, T]:
        """Return the function to call instead."""

        @functools.wraps(self.function)
        async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
            operation = self.operation(*args, **kwargs)
            plan = self.guard.guarded(operation, self._performer(*args, **kwargs), self.policy)
            return self._result(operation, await arun(plan))

        @functools.wraps(self.function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            operation = self.operation(*args, **kwargs)
            plan = self.guard.guarded(operation, self._performer(*args, **kwargs), self.policy)
            return self._result(operation, run(plan))

        guarded: Any = acall if self.awaited else call
        guarded.operation, guarded.drive, guarded.types = self.operation, self.drive, self.types
        return cast("Callable[P, T]", guarded)

    def _result(self, operation: Operation, answer: Answer) -> Any:
        if isinstance(answer.value, self.policy.errors):
            raise answer.value
        if answer.value is not None:
            return answer.value
        try:  # not performed just now, or the result was None, which reads back as itself
            return replayed(answer.outcome, self.policy.errors, self.policy.types)
        except CorruptRecord as error:
            self.guard.emit("failed", operation, code=error.code, detail=error.detail)
            raise


def check_function(function: Callable[..., Any]) -> None:
    """Raise a ConfigurationError if the function cannot be guarded."""
    if isinstance(function, staticmethod | classmethod):
        raise ConfigurationError(f"Write @once below @{type(function).__name__}, next to the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function!r} is a generator, and the values that it yields cannot be replayed: return a list"
        )


def own_name(function: Callable[..., Any]) -> str:
    """Return the name that owns the function's keys; raises a ConfigurationError if it has none that tells it from others."""
    name = getattr(function, "__qualname__", "")
    if not name or name.endswith("<lambda>"):
        raise ConfigurationError(f"{function!r} has no name of its own to keep its keys under: give it one by name=")
    return f"{module_of(function)}.{name}"
