"""An aiohttp connector that refuses private and reserved addresses, however they are spelled or resolved.

    session = aiohttp.ClientSession(connector=SafeConnector())
    await session.post(url_of_a_customer, data=body, allow_redirects=False)

Each name is resolved once per connection, every address that it has is checked, and the connection goes to one of the
checked addresses.  There is no second lookup that a hostile name server could answer differently (DNS rebinding).  The
URL is not changed, so the Host header and the TLS handshake use the URL's host.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable
from typing import Any

from aiohttp import ClientRequest, ClientTimeout, TCPConnector, ThreadedResolver
from aiohttp.abc import AbstractResolver, ResolveResult
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from ..errors import ConfigurationError, UnsafeTarget
from .targets import Network, Targets

AddrInfo = tuple[int, int, int, str, tuple[Any, ...]]  # an item of the list from `socket.getaddrinfo`


class SafeConnector(TCPConnector):
    """Connects to public addresses only, and raises UnsafeTarget for all others.

    A redirect is a request of its own, and is checked as well; whether to follow it is up to the caller.

    Args:
        allow: Networks that are allowed although they are private, such as `"10.1.0.0/16"`.
        allow_http: Whether plain HTTP is allowed.
        ports: The only ports that are allowed; by default all.
        resolver: Resolves names; by default the operating system does.
        options: Options of `aiohttp.TCPConnector`, except `socket_factory`.
    """

    def __init__(
        self,
        *,
        allow: Iterable[str | Network] = (),
        allow_http: bool = False,
        ports: Collection[int] | None = None,
        resolver: AbstractResolver | None = None,
        **options: Any,
    ) -> None:
        if "socket_factory" in options:
            raise ConfigurationError("SafeConnector makes its sockets itself, to check addresses: omit socket_factory")
        self.targets = Targets(allow=allow, allow_http=allow_http, ports=ports)
        checked = CheckedResolver(resolver or ThreadedResolver(), self.targets)
        super().__init__(resolver=checked, socket_factory=self._socket, **options)

    async def connect(self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout) -> Connection:
        """Return a connection for the request, or raise UnsafeTarget."""
        if req.proxy is not None:
            raise UnsafeTarget(
                f"The request would go through the proxy {req.proxy.host}, which resolves the name itself: "
                "SafeConnector cannot check the address; send it without a proxy"
            )
        self.targets.check(req.url.scheme, req.url.raw_host or "", req.url.port or 0)
        return await super().connect(req, traces, timeout)

    def _socket(self, info: AddrInfo) -> socket.socket:
        """Check an address for the last time before the connection, and make its socket.

        `CheckedResolver` has checked the addresses of a name before, and `connect` an address in the URL.
        """
        family, kind, protocol, _, address = info
        self.targets.check_address(address[0])
        return socket.socket(family, kind, protocol)


class CheckedResolver(AbstractResolver):
    """Resolves names with *resolver*, and refuses a name if any of its addresses is refused."""

    def __init__(self, resolver: AbstractResolver, targets: Targets) -> None:
        self._resolver = resolver
        self._targets = targets

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await self._resolver.resolve(host, port, family)
        for each in found:
            try:
                self._targets.check_address(each["host"])
            except UnsafeTarget as error:
                raise UnsafeTarget(f"{host} cannot be called: {error.detail}") from None
        return found

    async def close(self) -> None:
        await self._resolver.close()
