"""Retries for requests: `session.mount("https://", RetryAdapter(...))`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import ProxyManager
from urllib3.exceptions import HTTPError, MaxRetryError

from .._runtime.plan import run
from .bodies import MAX_BODY, SentBody, manner_by
from .continuing import Continuing
from .engine import Engine
from .errors import OutcomeUnknown, RetriesExhausted
from .exchange import Errors
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed, host_of
from .retry import Retry
from .urllib3 import BlockingWire, fault_of, limits
from .urllib3_bounds import BOUNDED_POOLS
from .verdict import Fault, Reply


class RequestExhausted(RetriesExhausted, requests.ConnectionError):
    """Every attempt failed; the last one without an answer."""


class RequestTimedOut(RetriesExhausted, requests.Timeout):
    """Every attempt failed; the last one ran out of time."""


class RequestUnknown(OutcomeUnknown, requests.RequestException):
    """It may have been performed, and asking again is no longer safe."""


ERRORS = Errors(RequestExhausted, RequestTimedOut, RequestUnknown)

FATAL = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
    requests.exceptions.InvalidHeader,
    requests.exceptions.UnrewindableBodyError,
)


class RequestsWire(BlockingWire):
    """One prepared request of a session."""

    errors = ERRORS
    unrewindable = requests.exceptions.UnrewindableBodyError

    def __init__(self, adapter: RetryAdapter, request: requests.PreparedRequest, options: dict[str, Any]) -> None:
        self.adapter = adapter
        self.request = request
        self.method = request.method or "GET"
        self.url = request.url or ""
        parts = urlsplit(self.url)
        self.host = host_of(parts.scheme, parts.hostname or "", parts.port)
        self.headers: Any = request.headers
        for name, value in self.headers.items():
            if isinstance(value, bytes):  # requests allows both
                self.headers[name] = value.decode("latin-1")
        self._options = options
        self._sent = SentBody(request.body)

    def _attempt(self, limit: float) -> Reply:
        self._rewind()
        request = self.request
        if request.body is not self._sent.value:  # a copy, for requests itself rewinds what it has, at a redirect
            request = request.copy()
            request.body = self._sent.value
        connect, read = limits(self._options.get("timeout"), limit)
        response = self.adapter.send_once(request, **{**self._options, "timeout": (connect, read)})
        if manner_by(response.status_code, response.headers) == "endless":
            read.lift()
        body = response.content if self._is_part(response) else b""
        return Reply(response.status_code, response.headers, body, response)

    def _is_part(self, response: requests.Response) -> bool:
        """Whether reading the body belongs to the attempt: the caller asked for all of it, or it is a short complaint."""
        length = response.headers.get("Content-Length", "")
        short = response.status_code >= 400 and length.isdigit() and int(length) <= MAX_BODY
        return short or not self._options.get("stream")

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, FATAL):
            return Fault("error", sent=False, fatal=True, note=type(error).__name__)
        if isinstance(error, requests.RequestException):
            return fault_of(_root(error))
        return fault_of(error)


def _root(error: BaseException) -> BaseException:
    """The error of urllib3 or of the socket that requests has wrapped."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        return _root(error.reason)
    inner = error.args[0] if error.args else None
    wrapped = isinstance(error, requests.RequestException) and isinstance(inner, HTTPError | OSError)
    return _root(inner) if wrapped and inner is not None else error


class RetryAdapter(Continuing, HTTPAdapter):
    """An adapter that asks once more, under one key; `response.oncemore` is the story.  *pool* is for HTTPAdapter."""

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        pool: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.engine = Engine(retry, keyring, **options)
        super().__init__(**(pool or {}))

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self.poolmanager.pool_classes_by_scheme = BOUNDED_POOLS

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **options)
        if type(manager) is ProxyManager:  # one for SOCKS has connections of its own kind
            manager.pool_classes_by_scheme = BOUNDED_POOLS
        return manager

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        options.update(zip(("stream", "timeout", "verify", "cert", "proxies"), arguments, strict=False))
        exchange = self.engine.exchange(RequestsWire(self, request, options))
        reply = run(self.engine.perform(exchange))
        response: Any = reply.response
        response.oncemore = exchange.story
        return response  # type: ignore[no-any-return]

    def send_once(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """One attempt, as requests itself makes it."""
        return super().send(request, **options)

    def resume(self, session: requests.Session, *, opened: bool = False) -> list[Resumed]:
        """What came of the operations that a dead process left behind; *session* adds the credentials, kept nowhere."""

        def send(entry: Entry) -> requests.Response:
            params = dict.fromkeys(session.params or ())  # None, so that they are not added again: the URL has them
            return session.request(entry.method, entry.url, params, data=entry.body, headers=entry.kept_headers)

        return self._resume(send, opened)

    def close(self) -> None:
        super().close()
        self.engine.close()
