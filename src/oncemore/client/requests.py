"""Retries for requests: `session.mount("https://", RetryAdapter(...))`."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from urllib3 import ProxyManager
from urllib3.exceptions import HTTPError, MaxRetryError

from .._runtime.plan import run
from .bodies import MAX_BODY, SentBody, content_length, read_mode
from .engine import Engine, LibraryErrors, PendingOperations
from .errors import OutcomeUnknown, RetriesExhausted
from .hosts import name_in
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed
from .retry import Retry
from .urllib3 import BOUNDED_POOLS, FAULTS, BlockingRequest, deadlines
from .verdict import Fault, HttpReply, find_fault


class RequestExhausted(RetriesExhausted, requests.ConnectionError):
    """All attempts failed, the last one without an answer."""


class RequestTimedOut(RetriesExhausted, requests.Timeout):
    """All attempts failed, the last one because it took too long."""


class RequestUnknown(OutcomeUnknown, requests.RequestException):
    """The request may have been performed, and sending it again is no longer safe."""


ERRORS = LibraryErrors(RequestExhausted, RequestTimedOut, RequestUnknown)

FATAL = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.MissingSchema,
    requests.exceptions.InvalidHeader,
    requests.exceptions.UnrewindableBodyError,
)


class RetryAdapter(PendingOperations, HTTPAdapter):
    """An adapter that retries each request under one key.  `response.oncemore` is its story.

    Args:
        retry: the policy; `Retry()` by default.
        keyring: stores keys and requests; a URL such as `"sqlite:///keys.db"`.
        pool: arguments of requests' HTTPAdapter.
        options: arguments of `Engine`.
    """

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
        if type(manager) is ProxyManager:  # SOCKS has connections of its own kind
            manager.pool_classes_by_scheme = BOUNDED_POOLS
        return manager

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        options.update(zip(("stream", "timeout", "verify", "cert", "proxies"), arguments, strict=False))
        sent = RequestsRequest(self, request, options)
        self.engine.prepare(sent)
        response: Any = run(self.engine.send(sent)).response
        response.oncemore = sent.story
        return response  # type: ignore[no-any-return]

    def send_once(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        """Make one attempt, as requests itself does."""
        return super().send(request, **options)

    def resume(self, session: requests.Session, *, opened: bool = False) -> list[Resumed]:
        """Send each unfinished operation of a dead process again, under its own key, and return the results.

        *session* sends them, because the keyring stores no credentials.  With *opened*, operations in
        state `open` are sent again too: their callers know that the outcome is unknown.
        """

        def send(entry: Entry) -> requests.Response:
            params = dict.fromkeys(session.params or ())  # None removes them, because the URL has them already
            return session.request(entry.method, entry.url, params, data=entry.body, headers=entry.kept_headers)

        return self._resume(send, opened, lambda url: self._is_mounted(session, url))

    def _is_mounted(self, session: requests.Session, url: str) -> bool:
        try:
            return session.get_adapter(url) is self
        except requests.exceptions.InvalidSchema:
            return False

    def close(self) -> None:
        super().close()
        self.engine.close()


class RequestsRequest(BlockingRequest):
    """One prepared request of a session."""

    errors = ERRORS
    unrewindable = requests.exceptions.UnrewindableBodyError

    def __init__(self, adapter: RetryAdapter, request: requests.PreparedRequest, options: dict[str, Any]) -> None:
        self.adapter = adapter
        self.request = request
        self.method = request.method or "GET"
        self.url = request.url or ""
        self.name = name_in(urlsplit(self.url))
        self.headers: Any = request.headers
        for name, value in self.headers.items():
            if isinstance(value, bytes):  # requests allows both
                self.headers[name] = value.decode("latin-1")
        self._options = options
        self._sent = SentBody(request.body)

    def _attempt(self, timeout: float) -> HttpReply:
        self._rewind()
        request = self.request
        if request.body is not self._sent.value:  # a copy, because requests rewinds the original body at a redirect
            request = request.copy()
            request.body = self._sent.value
        connect, read = deadlines(self._options.get("timeout"), timeout)
        response = self.adapter.send_once(request, **{**self._options, "timeout": (connect, read)})
        if read_mode(response.status_code, response.headers) == "endless":
            read.lift()
        body = response.content if self._is_body_read(response) else b""
        return HttpReply(response.status_code, response.headers, body, response)

    def _is_body_read(self, response: requests.Response) -> bool:
        """Whether reading the body belongs to the attempt: the caller does not stream, or it is a short error."""
        length = content_length(response.headers)
        short = response.status_code >= 400 and length is not None and length <= MAX_BODY
        return short or not self._options.get("stream")

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, FATAL):
            return Fault("error", sent=False, fatal=True, note=type(error).__name__)
        return find_fault(_original_error(error) if isinstance(error, requests.RequestException) else error, FAULTS)


def _original_error(error: BaseException) -> BaseException:
    """Return the error of urllib3 or of the socket that an error of requests wraps."""
    if isinstance(error, MaxRetryError) and error.reason is not None:
        return _original_error(error.reason)
    inner = error.args[0] if error.args else None
    wrapped = isinstance(error, requests.RequestException) and isinstance(inner, HTTPError | OSError)
    return _original_error(inner) if wrapped and inner is not None else error
