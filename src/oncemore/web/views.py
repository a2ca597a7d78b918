"""Finds the rule that a decorator has attached to a view: a function, a class with a method for each verb, or an action."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from .._contract.paths import UNSAFE_METHODS
from .._contract.rule import Rule, rule_of


def rule_for(view: Any, method: str) -> Rule | None:
    """The rule for requests with *method*; what is said of a method or action counts before what is said of its class."""
    return next((rule for rule in map(rule_of, places(view, method)) if rule is not None), None)


def rules_for(view: Any, methods: Iterable[str]) -> list[tuple[Rule, list[str]]]:
    """Each rule that is attached to the view, with those of the *methods* that it is for."""
    found: dict[int, tuple[Rule, list[str]]] = {}
    for method in methods:
        rule = rule_for(view, method)
        if rule is not None:
            found.setdefault(id(rule), (rule, []))[1].append(method)
    return list(found.values())


def places(view: Any, method: str) -> Iterator[Any]:
    """Where a rule for *method* may be attached, the most specific first."""
    while isinstance(view, partial):
        view = view.func
    owner = owner_of(view)
    yield getattr(owner, actions_of(view).get(method.lower(), method.lower()), None)
    yield from functions_behind(view, method)
    yield view
    yield owner


def served_by(view: Any) -> list[str]:
    """The methods by which a view may have effects; a function does not tell, and so may serve them all."""
    owner, actions = owner_of(view), actions_of(view)
    if actions:
        return [method for method in UNSAFE_METHODS if method.lower() in actions]
    if owner is not None:
        return [method for method in UNSAFE_METHODS if hasattr(owner, method.lower())]
    return [method for method in UNSAFE_METHODS if operations(view) == [] or any(functions_behind(view, method))]


def owner_of(view: Any) -> Any:
    """The view itself where it is a class (Starlette), or the one whose `as_view` made it (Flask, Django, its REST framework)."""
    return view if isinstance(view, type) else getattr(view, "view_class", None) or getattr(view, "cls", None)


def actions_of(view: Any) -> dict[str, str]:
    """The actions of a view of the REST framework's ViewSet, by method in lower case."""
    return getattr(view, "actions", None) or {}


def functions_behind(view: Any, method: str) -> Iterator[Any]:
    """The functions that a Django Ninja view calls for *method*."""
    return (operation.view_func for operation in operations(view) if method in operation.methods)


def operations(view: Any) -> list[Any]:
    """The operations of a Django Ninja view, which keeps them in the object that made it."""
    names, cells = getattr(getattr(view, "__code__", None), "co_freevars", ()), getattr(view, "__closure__", None) or ()
    maker = dict(zip(names, cells, strict=False)).get("self")
    found = getattr(getattr(maker, "cell_contents", None), "operations", None)
    return found if isinstance(found, list) else []
