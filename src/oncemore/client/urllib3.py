"""Retries for urllib3: `RetryPoolManager` in place of its PoolManager."""

from __future__ import annotations

from collections.abc import MutableMapping
from functools import partial
from typing import Any

import urllib3
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    LocationValueError,
    NewConnectionError,
    ProxyError,
    SSLError,
    UnrewindableBodyError,
)
from urllib3.exceptions import TimeoutError as Urllib3Timeout
from urllib3.util import Timeout

from .._runtime.plan import Call, Effect, Plan, run
from .bodies import SentBody, manner_by, position
from .continuing import Continuing
from .deadline import Allowance, is_distrust
from .engine import Engine
from .errors import OutcomeUnknown, RetriesExhausted
from .exchange import Errors
from .keyring import KeyringPlace
from .keyring.entry import Entry, Resumed, host_of
from .retry import Retry
from .urllib3_bounds import BoundedHTTPPool, BoundedHTTPSPool
from .verdict import Fault, Reply


class PoolExhausted(RetriesExhausted, HTTPError):
    """Every attempt failed; the last one without an answer."""


class PoolTimedOut(RetriesExhausted, Urllib3Timeout):
    """Every attempt failed; the last one ran out of time."""


class PoolUnknown(OutcomeUnknown, HTTPError):
    """It may have been performed, and asking again is no longer safe."""


ERRORS = Errors(PoolExhausted, PoolTimedOut, PoolUnknown)

# The first that fits; "sent" is said of everything after the connection stood.
FAULTS: list[tuple[type[BaseException], Fault]] = [
    (NewConnectionError, Fault("connection", sent=False)),  # which urllib3 derives from the timeout
    (ConnectTimeoutError, Fault("timeout", sent=False)),
    (ProxyError, Fault("connection", sent=False)),
    (Urllib3Timeout, Fault("timeout")),
    (TimeoutError, Fault("timeout")),
    (LocationValueError, Fault("error", sent=False, fatal=True)),
    (UnrewindableBodyError, Fault("error", sent=False, fatal=True)),
    (SSLError, Fault("connection")),
    (HTTPError, Fault("connection")),
    (OSError, Fault("connection")),
]


def fault_of(error: BaseException) -> Fault:
    """What an error of urllib3 (or of the socket below) means."""
    name = type(error).__name__
    for kind, fault in FAULTS:
        if isinstance(error, kind):
            return Fault(fault.name, fault.sent, fault.fatal or is_distrust(error), name)
    return Fault("error", fatal=True, note=name)


def limits(timeout: Any, limit: float) -> tuple[Allowance, Allowance]:
    """The caller's connect and read timeouts (in any form that requests or urllib3 take), within *limit* seconds."""
    if isinstance(timeout, Timeout):
        timeout = (timeout.connect_timeout, timeout.read_timeout)
    connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    steps = (step if isinstance(step, int | float) else None for step in (connect, read))
    first, second = (Allowance.within(limit, step) for step in steps)
    return first, second


class BlockingWire:
    """What the wires of urllib3 and requests have in common: one attempt is one call, and the body is rewound before it."""

    ready = False
    unrewindable: type[Exception] = UnrewindableBodyError
    _sent: SentBody

    def body(self) -> Plan[bytes | None]:
        content: bytes | None = yield Call(self._sent.data)
        return content

    def resendable(self) -> bool:
        return self._sent.resendable()

    def send(self, limit: float, keyed: bool) -> Effect[Reply]:
        return Call(self._attempt, limit)

    def drop(self, reply: Reply) -> Effect[None]:
        return Call(reply.response.close)

    def _rewind(self) -> None:
        """Back to the beginning of the body, also where it is to be sent to somewhere else."""
        if not self._sent.resendable():
            raise self.unrewindable(
                "the body is a generator, which is over, and cannot be sent to where it is redirected"
            )
        self._sent.rewind()

    def _attempt(self, limit: float) -> Reply:
        raise NotImplementedError


class Urllib3Wire(BlockingWire):
    """One request of a pool; *send* is the pool's own urlopen."""

    errors = ERRORS

    def __init__(self, pool: Any, method: str, url: str, headers: MutableMapping[str, str], send: Any, options: Any):
        self.method = method
        self.host = host_of(pool.scheme, pool.host, pool.port)
        self.url = url if "://" in url else f"{pool.scheme}://{self.host}{url}"
        self.headers = headers
        self._send = send
        self._options = options
        self._sent = SentBody(options.pop("body", None))

    def _attempt(self, limit: float) -> Reply:
        self._rewind()
        connect, read = limits(self._options.get("timeout"), limit)
        options = {**self._options, "retries": False, "timeout": Timeout(connect=connect, read=read)}
        response = self._send(body=self._sent.value, headers=self.headers, **options)
        if manner_by(response.status, response.headers) == "endless":
            read.lift()
        body = response.data if self._options.get("preload_content", True) else b""
        return Reply(response.status, response.headers, body, response)

    def fault(self, error: Exception) -> Fault:
        return fault_of(error)


class _Retrying:
    """A pool that asks once more."""

    def __init__(self, *arguments: Any, engine: Engine, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._engine = engine

    def urlopen(
        self,
        method: str,
        url: str,
        body: Any = None,
        headers: Any = None,
        *,
        body_pos: int | None = None,
        **options: Any,
    ) -> Any:
        if body_pos is not None:
            body.seek(body_pos)
        fields = urllib3.HTTPHeaderDict(self.headers if headers is None else headers)  # type: ignore[attr-defined]
        send = partial(super().urlopen, method, url)  # type: ignore[misc]
        wire = Urllib3Wire(self, method, url, fields, send, {"body": body, **options})
        exchange = self._engine.exchange(wire)
        reply = run(self._engine.perform(exchange))
        reply.response.oncemore = exchange.story
        reply.response.retries = options.get("retries")  # for the redirects, which are the manager's
        return reply.response


class RetryHTTPPool(_Retrying, BoundedHTTPPool):  # type: ignore[misc]
    """A pool of plain connections that asks once more."""


class RetryHTTPSPool(_Retrying, BoundedHTTPSPool):  # type: ignore[misc]
    """A pool of TLS connections that asks once more."""


class RetryPoolManager(Continuing, urllib3.PoolManager):
    """A PoolManager that asks once more, under one key; `response.oncemore` is the story.  *pool* is for PoolManager."""

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        pool: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**(pool or {}))
        self.engine = Engine(retry, keyring, **options)
        pools: dict[str, Any] = {
            "http": partial(RetryHTTPPool, engine=self.engine),
            "https": partial(RetryHTTPSPool, engine=self.engine),
        }
        self.pool_classes_by_scheme = pools

    def urlopen(self, method: str, url: str, redirect: bool = True, **options: Any) -> Any:  # type: ignore[override]
        # The key is put on here, above the redirects, so that all of them carry the same one.
        given = options.pop("headers", None)
        headers = urllib3.HTTPHeaderDict(self.headers if given is None else given)  # none left is not none given
        self.engine.name(method, headers)
        if options.get("body_pos") is None:  # and from there is sent whatever else the redirects lead to
            options["body_pos"] = position(options.get("body"))
        return super().urlopen(method, url, redirect, headers=headers, **options)

    def resume(self, *, opened: bool = False, headers: dict[str, str] | None = None) -> list[Resumed]:
        """What came of the operations that a dead process left behind; *headers* are the credentials, kept nowhere."""

        def send(entry: Entry) -> Any:
            fields = {**entry.kept_headers, **(headers or {})}
            return self.request(entry.method, entry.url, body=entry.body, headers=fields)

        return self._resume(send, opened)

    def close(self) -> None:
        """Close the connections, and let go of the keyring."""
        self.clear()
        self.engine.close()
