"""The decorator `once`: a sync or async function runs once per key."""

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
from ..errors import ConfigurationError
from .classes import annotated_classes, can_be_returned, module_of
from .context import CURRENT, Op
from .decisions import Answer
from .guard import ATTEMPTS, Guard, check_guard
from .model import Operation
from .steps import VARIADIC
from .transactions import Do

P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")


def once(
    guard: Guard,
    *,
    key: str | Callable[..., str],
    name: str = "",
    ignore: Sequence[str] = (),
    **settings: Any,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function runs once per *key*, and each later call gets the result of the first.

    A later call returns an equal value of the same type.  It may consist of built-in types, and of the classes that the
    function's return annotation or `types=(Order,)` names.  Its arguments must be the same as those of the first call.

    Args:
        guard: The guard with the ledger that records the operations.
        key: A template over the function's parameters (`"invoice:{invoice_id}"`), or a function of the same arguments.  The
            key of a method must tell its objects apart (`"{self.id}:{order}"`), unless *ignore* has `"self"`.
        name: Owns the keys; by default the function's module and name.
        ignore: The parameters that are not compared, such as a session or a logger.
        settings: Those of `Policy`, such as `ttl="7d"` or `errors=(...)`; the guard's policy gives the others.
    """
    policy = check_guard(guard).policy.but(**settings)

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        return Once(guard, function, key, name, ignore, policy).wrapped()

    return decorate


class Once(Generic[P, T]):
    """A guarded function.  *decorator* is the decorator's name in error messages; *prefix* begins the scope."""

    decorator = "once"
    prefix = "once:"

    def __init__(
        self,
        guard: Guard,
        function: Callable[P, T],
        key: str | Callable[..., str],
        name: str,
        ignore: Sequence[str],
        policy: Policy,
    ) -> None:
        check_function(function, self.decorator)
        self.guard = guard
        self.function = function
        self.settings = policy
        self.keeps_request = policy.effect == "steps"  # so that a completer can finish it after a crash
        self.name = name or own_name(function)
        self.signature = inspect.signature(function)
        names = tuple(self.signature.parameters)
        ignore = (ignore,) if isinstance(ignore, str) else ignore
        for unknown in sorted(set(ignore) - set(names)):
            raise ConfigurationError(f"ignore names {unknown!r}, which {self.name} does not take")
        owner = {"self", "cls"}.intersection(names[:1])
        # An object or class has no fingerprint; if it matters, the key names it, as in "{self.id}".
        self.compared = tuple(each for each in names if each not in ignore and each not in owner)
        self.key = key if callable(key) else remembered(Template(key, names=names), policy.ttl)
        if "self" in owner and "self" not in ignore and isinstance(self.key, Template) and not self.key.reads("self"):
            raise ConfigurationError(
                f"{self.name} is a method, and key {key!r} does not name self: another object's call would get this one's "
                "result. Name what tells objects apart, as in key='{self.id}:...', or write ignore=('self',) if it does not "
                "matter"
            )
        self.awaited = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @functools.cached_property
    def policy(self) -> Policy:
        """The settings, with the classes in the annotations of the result and of the stored arguments.

        Made at the first call, because an annotation may name a class that is defined below the function.
        """
        returned = (*self.settings.types, *annotated_classes(self.function, "return"))
        for kind in returned:
            if not can_be_returned(kind, self.settings.types):
                raise ConfigurationError(
                    f"{self.name} returns a {kind.__qualname__}, which cannot be stored and replayed: return built-in types, "
                    "dataclasses, attrs classes, msgspec structs, pydantic models, named tuples or enums; or name the "
                    "subclasses that it returns by types="
                )
        kept = annotated_classes(self.function, *self.compared) if self.keeps_request else ()
        return dataclasses.replace(self.settings, types=(*returned, *kept))

    def types(self) -> tuple[type, ...]:
        """Return the classes that results and stored arguments may have."""
        return self.policy.types

    def operation(self, *args: P.args, **kwargs: P.kwargs) -> Operation:
        """Return the operation of a call with these arguments, to look it up in the ledger."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        if isinstance(self.key, Template):
            name = self.key.render(arguments=arguments, now=self.guard.clock.time() + self.guard.store.shift)
        else:
            name = check_name(self.key(*args, **kwargs), "The result of the key function")
        return self.named(name, arguments)

    def named(self, key: str, arguments: Mapping[str, Any]) -> Operation:
        """Return the operation with this key, for a call with these arguments."""
        compared = {each: arguments[each] for each in self.compared}
        request = (lambda: compared) if self.keeps_request else None
        try:
            fingerprint = fingerprint_of(list(compared.values()))
        except ConfigurationError as error:
            unnamed = next(each for each, value in compared.items() if not is_comparable(value))
            raise ConfigurationError(
                f"{self.name} cannot compare its argument {unnamed!r}. {error.detail}; or leave the argument out of the "
                f"comparison by ignore=({unnamed!r},)"
            ) from None
        return Operation(f"{self.prefix}{self.name}", key, fingerprint, self.name, request=request)

    def guarded(self, operation: Operation, perform: Callable[[Op], Any]) -> Plan[Answer]:
        """Return the plan that performs the operation, or finds its answer."""
        return ATTEMPTS[self.policy.effect](self.guard, operation, self.policy).perform(perform)

    def drive(self, operation: Operation, request: Mapping[str, Any]) -> Plan[Answer]:
        """Return the plan that finishes an operation of this function, from the stored arguments."""
        bound = self.bound_again(request)
        return (yield from self.driven(self.guarded(operation, self.performer(*bound.args, **bound.kwargs))))

    def bound_again(self, request: Mapping[str, Any]) -> inspect.BoundArguments:
        """Return the stored arguments, bound to the parameters.

        Raises ConfigurationError if the function cannot be called with them.
        """
        instead = "give the completer a function of the operation and the stored arguments instead"
        for name, parameter in self.signature.parameters.items():
            if name not in request and parameter.default is parameter.empty and parameter.kind not in VARIADIC:
                raise ConfigurationError(f"{self.name} cannot be finished, because {name!r} is not stored: {instead}")
        for name in request.keys() - self.signature.parameters.keys():
            raise ConfigurationError(
                f"{self.name} cannot be finished, because it takes no {name!r} any more: {instead}"
            )
        bound = self.signature.bind_partial()
        bound.arguments.update(request)
        return bound

    def driven(self, plan: Plan[R]) -> Plan[R]:
        """Return the plan.  If the function is sync, an event loop runs the plan on a thread, because the function blocks."""
        if self.awaited:
            return (yield from plan)
        result: R = yield Do(partial(run, plan), None)
        return result

    def performer(self, *args: Any, **kwargs: Any) -> Callable[[Op], Any]:
        """Return a performer: it makes the operation the current one, and calls the function with these arguments."""
        function = cast("Callable[..., Any]", self.function)

        async def aperform(op: Op) -> Any:
            token = CURRENT.set(op)
            try:
                return await function(*args, **kwargs)
            finally:
                CURRENT.reset(token)

        def perform(op: Op) -> Any:
            token = CURRENT.set(op)
            try:
                return function(*args, **kwargs)
            finally:
                CURRENT.reset(token)

        return aperform if self.awaited else perform

    def wrapped(self) -> Callable[P, T]:
        """Return the guarded function, which replaces the decorated one."""

        @functools.wraps(self.function)
        async def acall(*args: P.args, **kwargs: P.kwargs) -> Any:
            operation = self.operation(*args, **kwargs)
            return self.result(operation, await arun(self.guarded(operation, self.performer(*args, **kwargs))))

        @functools.wraps(self.function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            operation = self.operation(*args, **kwargs)
            return self.result(operation, run(self.guarded(operation, self.performer(*args, **kwargs))))

        guarded: Any = acall if self.awaited else call
        guarded.operation, guarded.drive, guarded.types = self.operation, self.drive, self.types
        return cast("Callable[P, T]", guarded)

    def result(self, operation: Operation, answer: Answer) -> Any:
        """Return the function's value, or raise the error that is its outcome."""
        value = answer.value
        if value is None:  # a replay, or the function returned None
            value = self.guard.valued(operation, self.policy, answer).value
        if isinstance(value, self.policy.errors):
            raise value
        return value


def is_comparable(value: object) -> bool:
    """Whether the argument has a fingerprint."""
    try:
        fingerprint_of(value)
    except ConfigurationError:
        return False
    return True


def check_function(function: Callable[..., Any], decorator: str) -> None:
    """Raise a ConfigurationError if the function cannot be guarded."""
    if isinstance(function, staticmethod | classmethod):
        raise ConfigurationError(f"Write @{decorator} below @{type(function).__name__}, next to the function")
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigurationError(
            f"{function!r} is a generator, and the values that it yields cannot be replayed: return a list"
        )


def own_name(function: Callable[..., Any]) -> str:
    """Return the module and name of the function, or raise ConfigurationError if it has no name of its own."""
    name = getattr(function, "__qualname__", "")
    if not name or name.endswith("<lambda>"):
        raise ConfigurationError(f"{function!r} has no name of its own, which its keys need: give it one by name=")
    return f"{module_of(function)}.{name}"
