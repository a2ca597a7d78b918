"""Attempts: the signed requests to endpoints, and their results."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult
from multidict import CIMultiDict

from .._runtime.clock import SYSTEM
from ..client.verdict import retry_after
from ..errors import UnsafeTarget
from .claims import Claimed
from .connector import SafeConnector
from .signature import Signing
from .webhooks import Webhooks

RESPONSE = 16 * 1024  # the most bytes of a response that are read
SHOWN = 4096  # the most characters of a response that are kept
LONGEST_ERROR = 500  # characters
LOOKUPS = 100  # names that are looked up at a time, so that a name server that hangs does not hold up others
# The response is kept as it comes, so it should not be compressed.
USUAL_HEADERS = {"user-agent": "oncemore", "accept-encoding": "identity"}
KEEP_ALIVE = 30.0  # seconds for which an idle connection is kept


class Result(msgspec.Struct):
    """The result of an attempt.  A *permanent* failure is not tried again.  If not *tried*, it does not count."""

    status: int | None = None
    response: str = ""
    error: str = ""
    duration: float = 0.0
    retry_after: float | None = None
    permanent: bool = False
    tried: bool = True

    @property
    def is_success(self) -> bool:
        return self.status is not None and 200 <= self.status < 300 and not self.error


class Requests:
    """Sends the requests of one sender, on the running event loop."""

    def __init__(self, webhooks: Webhooks, timeout: aiohttp.ClientTimeout) -> None:
        self.webhooks = webhooks
        self.timeout = timeout
        targets = webhooks.targets
        self._threads = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="oncemore-lookup")
        connector = SafeConnector(
            allow=targets.allow,
            allow_http=targets.allow_http,
            ports=targets.ports,
            resolver=PooledResolver(self._threads),
            limit=0,  # the sender has limits of its own
            keepalive_timeout=KEEP_ALIVE,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few compressed bytes may be gigabytes
            trust_env=False,  # a proxy would resolve the names itself
        )

    async def aclose(self) -> None:
        await self._session.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def attempt(self, claimed: Claimed) -> Result:
        """Send one request and return its result.  Raises only CancelledError."""
        began = SYSTEM.monotonic()
        result = Result()
        try:
            await self._send(claimed, result)
        except aiohttp.ConnectionTimeoutError:
            result.error = f"no connection within {self.timeout.connect:g} s"
        except TimeoutError:
            result.error = f"no complete response within {self.timeout.total:g} s"
        except UnsafeTarget as error:
            result.permanent = True
            result.error = f"refused: {error.detail}"
        except Exception as error:  # from the network, the response, or a function that makes the body
            result.error = f"{type(error).__name__}: {error}"
        result.error = plain(result.error, LONGEST_ERROR)
        result.duration = SYSTEM.monotonic() - began
        return result

    async def _send(self, claimed: Claimed, result: Result) -> None:
        body, headers = self._make(claimed)
        url = claimed.registered.endpoint.url
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            result.status = response.status
            if not 200 <= response.status < 300:
                result.error = f"status {response.status}"
                result.retry_after = retry_after(response.headers, SYSTEM.time())
            if 300 <= response.status < 400:
                location = response.headers.get("location", "?")
                result.error = f"redirects are not followed: update the endpoint's URL to {location}"
            content = bytearray()
            try:
                await read_start(response, content)
            finally:
                result.response = plain(content.decode("utf-8", "replace"), SHOWN)

    def _make(self, claimed: Claimed) -> tuple[bytes, CIMultiDict[str]]:
        """Return the body and the headers.  Each attempt has the same id, but a new time and so a new signature."""
        registered, message = claimed.registered, claimed.message
        body, media_type = self.webhooks.body(message)
        signed = signing_with(tuple(registered.signing(claimed.now))).sign(body, id=message.id)
        until = SYSTEM.time() + claimed.first_at - claimed.now + self.webhooks.schedule.span
        headers = CIMultiDict(USUAL_HEADERS)
        headers.update(registered.endpoint.headers)
        headers.update(signed)
        headers["content-type"] = media_type
        headers["webhook-attempt"] = str(claimed.attempts)
        headers["webhook-retry-until"] = str(int(until))
        if claimed.sequence is not None:
            headers["webhook-sequence"] = str(claimed.sequence)
        return body, headers


@lru_cache(1000)
def signing_with(secrets: tuple[str, ...]) -> Signing:
    """Return the signing with *secrets*, from a cache because reading secrets costs more than a signature."""
    return Signing(*secrets)


class PooledResolver(AbstractResolver):
    """Resolves names with the operating system, on threads of its own.

    The event loop has few threads, and one name server that hangs could keep all of them busy.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()

        def look_up() -> list[tuple[Any, ...]]:
            return socket.getaddrinfo(host, port, family, socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)

        found = await loop.run_in_executor(self._threads, look_up)
        return [
            ResolveResult(
                hostname=host, host=str(address[0]), port=port, family=of, proto=protocol, flags=socket.AI_NUMERICHOST
            )
            for of, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        """Do nothing, because `Requests.aclose` ends the threads."""


async def read_start(response: aiohttp.ClientResponse, content: bytearray) -> None:
    """Read the first bytes of the body.  If there may be more, close the connection instead of reading it all."""
    while len(content) < RESPONSE:
        chunk = await response.content.read(RESPONSE - len(content))
        if not chunk:
            return
        content += chunk
    response.close()


def plain(text: str, most: int) -> str:
    """Return the first characters of the text, with those replaced that a database cannot store."""
    if not text:
        return ""
    return text[:most].encode("utf-8", "replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")
