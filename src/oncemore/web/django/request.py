"""Reads a Django request in the form that all middlewares share, its ETag, and the exception behind an error page."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from django.core.signals import got_request_exception  # type: ignore[import-untyped]
from django.http import HttpRequest  # type: ignore[import-untyped]

from ..._contract.rule import Rule
from ..._runtime.plan import Call, Plan
from ...errors import ConfigurationError
from ..etag import VARIABLES_OF_CHANGE, Etag
from ..request import Request, check_length
from ..wsgi.environ import can_be_observed, headers_of, put_back, read_body
from ._compat import copy_as_get, has_body, is_consumed, set_body

GetResponse = Callable[[HttpRequest], Any]  # returns a response, or a coroutine of one

ERROR = "_oncemore_error"  # the attribute of a request that has the exception behind Django's error page


def request_of(request: HttpRequest) -> Request:
    meta = request.META
    return Request(request.method, request.path, meta.get("QUERY_STRING", ""), headers_of(meta), b"", request)


def body_of(request: HttpRequest, rule: Rule) -> bytes:
    """Return the whole body.  The view can still read it, and Django's own limits still apply."""
    if has_body(request):
        check_length(rule, len(request.body))
        return request.body  # type: ignore[no-any-return]
    if is_consumed(request):
        raise ConfigurationError(
            "Another middleware has read the request's body before IdempotencyMiddleware could: move it after this one"
        )
    if hasattr(request, "environ"):  # WSGI: Django itself ignores chunked bodies
        body = read_body(request.environ, rule)
        put_back(request.environ, body)
    else:
        body = request.read(rule.max_request + 1)
        check_length(rule, len(body))
    set_body(request, body)
    return body


def can_be_read(request: HttpRequest, rule: Rule) -> bool:
    """Whether reading the body makes no difference to the view: it was read before, or is known not to be too long."""
    version = getattr(request, "scope", {}).get("http_version", "1.1")
    is_sized = version.startswith("1.") or "CONTENT_LENGTH" in request.META  # HTTP/2 bodies may have no length
    return has_body(request) or (is_sized and can_be_observed(request.META, rule))


def current_etag(get_response: GetResponse, request: HttpRequest) -> Plan[Etag]:
    """Return the status and ETag of the view's answer to a GET of the request's URL."""
    meta = {name: value for name, value in request.META.items() if name not in VARIABLES_OF_CHANGE}
    response = yield Call(get_response, copy_as_get(request, meta))
    if response.streaming:  # other responses stay open, because `close` tells Django that the request is over
        response.close()
    return response.status_code, str(response.headers.get("ETag", ""))


def note_error(request: HttpRequest | None = None, **_: Any) -> None:
    if request is not None:
        setattr(request, ERROR, sys.exc_info()[1])


# Django answers an exception with an error page; only its signal gives access to the exception.
got_request_exception.connect(note_error, dispatch_uid="oncemore")
