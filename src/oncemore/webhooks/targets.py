"""The rules about URLs and addresses that may be called, against server-side request forgery (SSRF).

A customer who registers a webhook chooses the address that *your* server calls.  Without rules, that may be your own
database, or the cloud's metadata service.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from ..errors import ConfigurationError, UnsafeTarget

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# The special-purpose registries of IANA, and public addresses that a cloud uses for its own services.  The networks are
# written out because `ipaddress.is_global` is true for multicast, for NAT64 and for the former site-local addresses.
REFUSED_V4 = {
    "0.0.0.0/8": "an address of this host",
    "10.0.0.0/8": "a private address",
    "100.64.0.0/10": "a shared address of a provider's network",
    "127.0.0.0/8": "a loopback address",
    "168.63.129.16/32": "a metadata service",  # Azure
    "169.254.0.0/16": "a link-local address, where clouds have their metadata service",
    "172.16.0.0/12": "a private address",
    "192.0.0.0/24": "a reserved address",
    "192.0.2.0/24": "an address for documentation",
    "192.88.99.0/24": "a 6to4 relay",
    "192.168.0.0/16": "a private address",
    "198.18.0.0/15": "an address for benchmarks",
    "198.51.100.0/24": "an address for documentation",
    "203.0.113.0/24": "an address for documentation",
    "224.0.0.0/4": "a multicast address",
    "240.0.0.0/4": "a reserved address",
}
REFUSED_V6 = {
    "::1/128": "a loopback address",
    "::/128": "an address of this host",
    "::ffff:0:0/96": "an IPv4 address written as IPv6",
    "64:ff9b::/96": "an IPv4 address behind NAT64",
    "64:ff9b:1::/48": "an IPv4 address behind a local NAT64",
    "2001::/32": "a Teredo address, which contains an IPv4 address",
    "2001::/23": "a reserved address",
    "2001:db8::/32": "an address for documentation",
    "2002::/16": "a 6to4 address, which contains an IPv4 address",
    "3fff::/20": "an address for documentation",
    "fc00::/7": "a private address",
    "fe80::/10": "a link-local address",
    "fec0::/10": "a site-local address",
    "ff00::/8": "a multicast address",
}
REFUSED: list[tuple[Network, str]] = [
    (ip_network(network), reason) for network, reason in (REFUSED_V4 | REFUSED_V6).items()
]
GLOBAL_V6 = IPv6Network("2000::/3")  # all global unicast addresses; the rest of IPv6 is reserved
WITH_IPV4 = [IPv6Network("::ffff:0:0/96"), IPv6Network("64:ff9b::/96")]  # the IPv4 address is in the last four bytes

# The last label of a host name that browsers and resolvers read as a number: 2130706433, 127.1, 0x7f.1, 017700000001.
NUMERIC_LABEL = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
PORTS = {"https": 443, "http": 80}
NEVER_IN_URL = re.compile(r"[\x00-\x20\x7f\\\ud800-\udfff]")


class Targets:
    """Decides which URLs and addresses may be called.

    Args:
        allow: Networks that are allowed although they are private, such as `"10.1.0.0/16"`.
        allow_http: Whether plain HTTP is allowed.  Anybody on the way can then read and change the webhook.
        ports: The only ports that are allowed; by default all.
    """

    def __init__(
        self, *, allow: Iterable[str | Network] = (), allow_http: bool = False, ports: Collection[int] | None = None
    ) -> None:
        if isinstance(allow, str):
            raise ConfigurationError(f"allow = {allow!r} is not a list of networks: write [{allow!r}]")
        try:
            self.allow = tuple(ip_network(network) for network in allow)
        except ValueError as error:
            raise ConfigurationError(f"allow contains something that is no network: {error}") from error
        self.allow_http = allow_http
        self.ports = None if ports is None else frozenset(ports)
        # A cache, because a sender checks the same few addresses for every request.
        self._reason_for = lru_cache(1000)(lambda text: self._reason(ip_address(text.partition("%")[0])))

    def check_url(self, url: str) -> None:
        """Raise UnsafeTarget for a URL that must never be called.  Its name is not resolved here, but at each call."""
        if not isinstance(url, str):
            raise UnsafeTarget(f"{url!r} is not a URL: write a text, as in 'https://example.com/hook'")
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UnsafeTarget(f"{url!r} is not a URL: {error}") from error
        if NEVER_IN_URL.search(url):
            raise UnsafeTarget(
                f"{url!r} is not a URL: it has a blank, a control character, a backslash or half a character"
            )
        if parts.username is not None or parts.password is not None:
            raise UnsafeTarget("The URL has a user name or a password before its host; send them in a header instead")
        self.check(parts.scheme, host or "", port if port is not None else PORTS.get(parts.scheme, 0))

    def check(self, scheme: str, host: str, port: int) -> None:
        """Raise UnsafeTarget unless a connection to that *host*, a name or an address, may be tried."""
        if scheme not in PORTS:
            raise UnsafeTarget(f"{scheme!r} is not a scheme for webhooks: use https")
        if scheme == "http" and not self.allow_http:
            raise UnsafeTarget(f"http://{host} is not encrypted: use https, or say allow_http=True in a test")
        if self.ports is not None and port not in self.ports:
            raise UnsafeTarget(f"Port {port} is not allowed; allowed are {', '.join(map(str, sorted(self.ports)))}")
        name = host.removesuffix(".")
        if not name:
            raise UnsafeTarget("The URL has no host")
        if ":" in name or NUMERIC_LABEL.fullmatch(name.rpartition(".")[2]):
            self.check_address(name)

    def check_address(self, text: str) -> None:
        """Raise UnsafeTarget unless *text* is an address that may be connected to."""
        try:
            reason = self._reason_for(text)
        except ValueError:
            raise UnsafeTarget(
                f"{text!r} is an unusual spelling of an address: write it as 203.0.113.7, or give the host's name"
            ) from None
        if reason:
            raise UnsafeTarget(f"{text} is {reason}, and webhooks are sent to public addresses only")

    def _reason(self, address: Address) -> str:
        """Return why *address* is refused, or an empty text if it is not."""
        if any(address in network for network in self.allow):  # never true for a network of the other IP version
            inner = embedded(address)
            return self._reason(inner) if inner is not None else ""
        for network, reason in REFUSED:
            if address in network:
                return reason
        return "" if address.version == 4 or address in GLOBAL_V6 else "a reserved address"


def embedded(address: Address) -> IPv4Address | None:
    """Return the IPv4 address inside a mapped or translated IPv6 address, or None for any other address.

    A network that reaches IPv4 only through NAT64 has to allow `64:ff9b::/96`; private addresses behind it stay refused.
    """
    if any(address in network for network in WITH_IPV4):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None
