"""Private parts of Django and Django Ninja, touched here only.

Known for Django 4.2 to 5.2 and Django Ninja 1.0 to 1.7.  tests/doors/test_django_compat.py has one test for each function.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import Any

from django.contrib.admindocs import utils as admindocs  # type: ignore[import-untyped]

# Values that Django computes once from a request, and stores in it.
COMPUTED = ("_body", "_post", "_files", "headers")
PARAMETER = re.compile(r"<(?:(?P<converter>\w+):)?(?P<name>\w+)>")


def has_body(request: Any) -> bool:
    """Whether `request.body` has been read, and can be read again."""
    return hasattr(request, "_body")


def is_consumed(request: Any) -> bool:
    """Whether the body was read as a stream, and cannot be read again."""
    return bool(request._read_started)


def set_body(request: Any, body: bytes) -> None:
    """Let the view read *body* as if nobody had read the request; Django's own limits still apply."""
    request._stream, request._read_started = BytesIO(body), False


def copy_as_get(request: Any, meta: dict[str, Any]) -> Any:
    """Return a copy of the request, with its user and session, as a GET without a body, with *meta* as its headers."""
    inner: Any = object.__new__(type(request))
    inner.__dict__.update({name: value for name, value in vars(request).items() if name not in COMPUTED})
    inner.META = {**meta, "REQUEST_METHOD": "GET"}
    inner.method, inner.content_type, inner.content_params, inner.resolver_match = "GET", "", {}, None
    set_body(inner, b"")
    return inner


def path_of(route: str) -> str:
    """Return a route such as `^api/` + `orders/<int:id>/` as the contract writes it: `/api/orders/{id}/`."""
    path = admindocs.replace_named_groups(admindocs.remove_non_capturing_groups(route))
    path = admindocs.replace_metacharacters(admindocs.replace_unnamed_groups(path)).replace("\\", "")
    path = "/" + path.lstrip("/")
    return PARAMETER.sub(lambda found: f"{{{found['name']}{':path' * (found['converter'] == 'path')}}}", path)


def ninja_operations(view: Any) -> list[Any]:
    """Return the operations of a Django Ninja view, each with `methods` and `view_func`; an empty list for other views.

    Ninja puts a closure into the URL configuration, and the operations are in its `self`.
    """
    names, cells = getattr(getattr(view, "__code__", None), "co_freevars", ()), getattr(view, "__closure__", None) or ()
    owner = dict(zip(names, cells, strict=False)).get("self")
    found = getattr(getattr(owner, "cell_contents", None), "operations", None)
    return found if isinstance(found, list) else []
