"""The caller in a middleware's test: it has a case, a key and credentials that no other test uses."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self
from urllib.parse import urlencode

import httpx

from .raw_http import RawConnection

PATIENCE = 15.0
PAYLOAD: dict[str, Any] = {"amount": 100, "currency": "EUR"}


class Caller:
    """Asks the contract's app at *url*; each method that sends returns the response."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.renew()
        limits = httpx.Limits(
            max_connections=64, max_keepalive_connections=0
        )  # each request on a connection of its own
        self._client = httpx.Client(base_url=url, timeout=PATIENCE, limits=limits, verify=False)
        self._pool = ThreadPoolExecutor(24)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()  # nobody is left waiting, whatever the test did
        self._pool.shutdown()
        self._client.close()

    def renew(self) -> Self:
        """Take a new case, key and credentials."""
        self.case = self.key = uuid.uuid4().hex
        self.authorization = f"Bearer {uuid.uuid4().hex}"
        return self

    def ask(
        self,
        path: str = "/default/create",
        *,
        method: str = "POST",
        key: str | None = "",
        headers: Mapping[str, str] | None = None,
        payload: Any = PAYLOAD,
        content: bytes | None = None,
        **query: Any,
    ) -> httpx.Response:
        """Send *payload* as JSON, or *content* as it is, under this caller's key, or *key*, or without a key (None)."""
        fields = {"Authorization": self.authorization, "Content-Type": "application/json"}
        if key is not None:
            fields["Idempotency-Key"] = key or self.key
        body = json.dumps(payload).encode() if content is None else content
        return self._client.request(
            method, self.target(path, **query), headers={**fields, **(headers or {})}, content=body
        )

    def later(self, *args: Any, **options: Any) -> Future[httpx.Response]:
        """Do the same as `ask`, in another thread."""
        return self._pool.submit(self.ask, *args, **options)

    def running(self, path: str, **options: Any) -> Future[httpx.Response]:
        """Do the same as `later`, and return when the app has begun to perform it."""
        begun = self.runs
        answer = self.later(path, **options)
        self.until(lambda: self.runs > begun)
        return answer

    def look(self, url: str, *, authorization: str = "", key: str = "") -> httpx.Response:
        """Look up the status of an operation; the key is in the URL, or given as a header."""
        named = {"Idempotency-Key": key} if key else {}
        return self._client.get(url, headers={"Authorization": authorization or self.authorization, **named})

    def connection(self) -> RawConnection:
        """A connection to be used byte by byte."""
        return RawConnection(self.url)

    def fields(self, *more: tuple[str | bytes, str | bytes]) -> list[tuple[str | bytes, str | bytes]]:
        """The headers of a request byte by byte, *more* after them."""
        usual = [("Host", self.connection_host), ("Authorization", self.authorization)]
        return [*usual, ("Content-Type", "application/json"), *more]

    @property
    def connection_host(self) -> str:
        return httpx.URL(self.url).netloc.decode()

    def target(self, path: str, **query: Any) -> str:
        """The path and query of a request of this case."""
        return f"{path}?{urlencode({'case': self.case, **query})}"

    # What the app itself tells

    @property
    def runs(self) -> int:
        """Return how often the app was called: `h` in the cases."""
        return int(self._tell("/count"))

    @property
    def waiting(self) -> int:
        """Return how many requests under the case's own key have begun to wait for a running one."""
        return int(self._tell("/waiting"))

    def open(self) -> None:
        """Open the gate, for present and future callers."""
        self._tell("/open")

    def _tell(self, path: str) -> Any:
        return self._client.get(self.target(path)).json()

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until it is *true*."""
        ends = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < ends, "it did not come true"
            time.sleep(0.005)


def said(response: httpx.Response) -> str | None:
    """Return the response's own status: stored, replayed or unstored."""
    how: str | None = response.headers.get("idempotency-status")
    return how


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The problem document, after checking that the response is one."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem["error_code"] == code
    assert problem["status"] == status
    assert problem["type"].endswith(code)
    assert isinstance(problem["retryable"], bool)
    assert problem["title"]
    assert problem["detail"]
    return problem
