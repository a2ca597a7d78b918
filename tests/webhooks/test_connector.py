"""The rules against server-side request forgery: addresses, spellings, DNS rebinding, redirects and TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st

from oncemore.errors import ConfigurationError, UnsafeTarget
from oncemore.webhooks import SafeConnector
from oncemore.webhooks.targets import Targets

LOOPBACK = ["127.0.0.0/8"]
PUBLIC = "93.184.216.34"

REFUSED = """
0.0.0.0 0.1.2.3 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1
239.255.255.250 240.0.0.1 255.255.255.255
:: ::1 ::2 ::7f00:1 ::ffff:127.0.0.1 ::ffff:93.184.216.34 ::ffff:0:127.0.0.1 64:ff9b::7f00:1 64:ff9b::5db8:d822
64:ff9b:1::7f00:1 64:ff9b:1:ffff::1 100::1 2001::1 2001:0:7f00:1::1 2001:10::1 2001:db8::1 2002:7f00:1::1
2002:5db8:d822::1 3fff::1 4000::1 5f00::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0 fec0::1 ff02::1
""".split()  # noqa: SIM905
ALLOWED = [
    "8.8.8.8", "93.184.216.34", "1.1.1.1", "223.255.255.255", "2606:2800:220:1:248:1893:25c8:1946", "2001:4860:4860::8888",
]  # fmt: skip
SPELLINGS = """
2130706433 127.1 127.0.1 0177.0.0.1 0x7f.1 0x7f000001 0x7f.0.0.1 017700000001 127.0.0.1. 127.1. [::ffff:127.0.0.1]
[::ffff:7f00:1] [::1] [::] [0:0:0:0:0:0:0:1] [64:ff9b::127.0.0.1] 127.0.0.01 00000127.0.0.1 1.1 4294967295 0 0x
１２７.０.０.１ ①②⑦.⓪.⓪.① 127。0。0。1 ⑫⑦.0.0.1 localhost localhost. LOCALHOST
""".split()  # noqa: SIM905


@pytest.mark.parametrize("address", REFUSED)
def test_reserved_address_is_refused(address: str) -> None:
    with pytest.raises(UnsafeTarget, match="public addresses only"):
        Targets().check_address(address)


@pytest.mark.parametrize("address", ALLOWED)
def test_public_address_is_allowed(address: str) -> None:
    Targets().check_address(address)


@given(st.ip_addresses(v=4))
def test_ipv4_inside_ipv6_is_never_allowed(address: Any) -> None:
    for text in (f"::ffff:{address}", f"64:ff9b::{address}", f"::{address}", f"2002:{int(address) >> 16:x}::1"):
        with pytest.raises(UnsafeTarget):
            Targets().check_address(text)


@given(st.ip_addresses())
def test_allowed_addresses_are_global_by_python_too(address: Any) -> None:
    try:
        Targets().check_address(str(address))
    except UnsafeTarget:
        return
    assert address.is_global
    assert not address.is_multicast


def test_allowed_network_is_an_exception_for_that_network_only() -> None:
    targets = Targets(allow=["10.1.0.0/16", "64:ff9b::/96"])
    targets.check_address("10.1.2.3")
    targets.check_address("64:ff9b::5db8:d822")
    for address in ("10.2.0.1", "127.0.0.1", "64:ff9b::7f00:1", "::ffff:10.1.2.3"):
        with pytest.raises(UnsafeTarget):
            targets.check_address(address)


@pytest.mark.parametrize(
    ("url", "reason"),
    [("http://example.com/", "not encrypted"), ("ftp://example.com/", "use https"), ("//example.com", "use https"),
     ("https://", "no host"), ("https://./", "no host"), ("https://10.0.0.1/", "private"), ("https://[::1]:443/", "loopback"),
     ("https://2130706433/", "unusual spelling"), ("https://0x7f.1/", "unusual spelling"), ("https://[::1/", "not a URL"),
     ("https://a:99999/", "not a URL"), ("https://a\\@127.0.0.1/", "backslash"), ("https://a b/", "blank"),
     ("https://example.com\n/", "control"), ("https://a/\ud800", "half a character"),
     ("https://user:pw@example.com/", "user name"), ("https://a:8080/", "8080")],
)  # fmt: skip
def test_url_that_will_never_be_called_is_refused(url: str, reason: str) -> None:
    with pytest.raises(UnsafeTarget, match=reason):
        Targets(ports=[443]).check_url(url)
    Targets(ports=[443]).check_url("https://example.com/hook?a=b")
    Targets(allow_http=True).check_url("http://example.com:8080/hook")


@pytest.mark.parametrize("allow", ["10.0.0.0/8", ["10.0.0.1/8"], ["nowhere"]])
def test_malformed_network_is_refused(allow: Any) -> None:
    with pytest.raises(ConfigurationError, match="allow"):
        Targets(allow=allow)


# On sockets


class Names(AbstractResolver):
    """A name server: each lookup gets the next of the answers, and the last answer is repeated."""

    def __init__(self, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked.append(host)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [
            ResolveResult(hostname=host, host=each, port=port, family=socket.AF_INET, proto=0, flags=0)
            for each in found
        ]

    async def close(self) -> None:
        pass


class Hits(list[str]):
    """A server on the loopback address, which notes the Host header of each request."""

    port: int


@pytest.fixture
async def server() -> AsyncIterator[Hits]:
    hits = Hits()

    async def answer(request: web.Request) -> web.StreamResponse:
        hits.append(request.headers["Host"])
        if request.path == "/redirect":
            raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{hits.port}/")
        return web.Response(text="here")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    hits.port = runner.addresses[0][1]
    yield hits
    await runner.cleanup()


async def refusal_of(url: str, **options: Any) -> str:
    async with aiohttp.ClientSession(connector=SafeConnector(**options)) as session:
        with pytest.raises(UnsafeTarget) as caught:
            await session.get(url, timeout=aiohttp.ClientTimeout(10))
    return caught.value.detail


@pytest.mark.parametrize("host", SPELLINGS)
async def test_odd_spelling_of_loopback_is_never_connected(server: Hits, host: str) -> None:
    async with aiohttp.ClientSession(connector=SafeConnector(allow_http=True)) as session:
        with pytest.raises((UnsafeTarget, aiohttp.InvalidURL, aiohttp.ClientConnectorDNSError)):
            await session.get(f"http://{host}:{server.port}/", timeout=aiohttp.ClientTimeout(10))
    assert server == []


async def test_plain_http_and_other_ports_are_refused(server: Hits) -> None:
    assert "not encrypted" in await refusal_of(f"http://127.0.0.1:{server.port}/", allow=LOOPBACK)
    assert "allowed are 443" in await refusal_of(
        f"http://127.0.0.1:{server.port}/", allow=LOOPBACK, allow_http=True, ports=[443]
    )
    assert server == []


async def test_allowed_network_is_reached_under_the_name_in_the_url(server: Hits) -> None:
    connector = SafeConnector(allow=LOOPBACK, allow_http=True, resolver=Names(["127.0.0.1"]))
    async with aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"http://hooks.example.com:{server.port}/") as response:
            assert await response.text() == "here"
    assert server == [f"hooks.example.com:{server.port}"]


async def test_name_that_leads_to_loopback_is_refused(server: Hits) -> None:
    detail = await refusal_of(
        f"http://hooks.example.com:{server.port}/", allow_http=True, resolver=Names(["127.0.0.1"])
    )
    assert detail.startswith("hooks.example.com cannot be called: 127.0.0.1 is a loopback")
    assert server == []


@pytest.mark.parametrize("answers", [[PUBLIC, "127.0.0.1"], ["127.0.0.1", PUBLIC], [PUBLIC, "10.0.0.1", PUBLIC]])
async def test_name_with_one_private_address_is_refused_whole(server: Hits, answers: list[str]) -> None:
    """Otherwise aiohttp would try the private address if the public one does not answer."""
    await refusal_of(f"http://hooks.example.com:{server.port}/", allow_http=True, resolver=Names(answers))
    assert server == []


async def test_rebinding_name_is_connected_to_the_checked_address(
    server: Hits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is public, and every later one is loopback.  Nothing may be looked up a second time."""
    connected: list[Any] = []
    loop = asyncio.get_running_loop()

    async def sock_connect(sock: socket.socket, address: Any) -> None:
        connected.append(address[0])
        raise ConnectionRefusedError(111, "no route to the world in a test")

    monkeypatch.setattr(loop, "sock_connect", sock_connect)
    names = Names([PUBLIC], ["127.0.0.1"])
    connector = SafeConnector(allow_http=True, resolver=names, use_dns_cache=False)
    url = f"http://hooks.example.com:{server.port}/"
    async with aiohttp.ClientSession(connector=connector) as session:
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url)
        assert (names.asked, connected) == (["hooks.example.com"], [PUBLIC])
        with pytest.raises(UnsafeTarget):  # the next connection asks again, and is refused
            await session.get(url)
    assert connected == [PUBLIC]
    assert server == []


async def test_redirect_to_loopback_is_refused(server: Hits) -> None:
    """The name's address is allowed, and the redirect's address is not."""
    connector = SafeConnector(allow=["127.0.0.2/32"], allow_http=True, resolver=Names(["127.0.0.2"]))
    listener = await asyncio.start_server(redirector(server.port), "127.0.0.2", 0)
    port = listener.sockets[0].getsockname()[1]
    async with listener, aiohttp.ClientSession(connector=connector) as session:
        with pytest.raises(UnsafeTarget, match=r"127\.0\.0\.1 is a loopback"):
            await session.get(f"http://hooks.example.com:{port}/")
    assert server == []


def redirector(port: int) -> Any:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        location = f"Location: http://127.0.0.1:{port}/\r\n"
        writer.write(f"HTTP/1.1 302 Found\r\n{location}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    return answer


async def test_proxy_is_refused(server: Hits) -> None:
    async with aiohttp.ClientSession(connector=SafeConnector(allow=LOOPBACK, allow_http=True)) as session:
        with pytest.raises(UnsafeTarget, match=r"proxy 127\.0\.0\.1"):
            await session.get("http://10.0.0.1/", proxy=f"http://127.0.0.1:{server.port}")
    assert server == []


def test_socket_factory_of_the_caller_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="sockets itself"):
        SafeConnector(socket_factory=lambda info: socket.socket())


async def test_address_is_checked_at_the_socket_too(server: Hits) -> None:
    """If a later version of aiohttp bypassed the other checks, the socket would still not be made."""
    connector = SafeConnector()
    with pytest.raises(UnsafeTarget):
        connector._socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", server.port)))
    with pytest.raises(UnsafeTarget):
        connector._socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.1", server.port)))
    await connector.close()


# TLS


def certificate_for(name: str, folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain, private = folder / "cert.pem", folder / "key.pem"
    chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, private


async def test_tls_handshake_has_the_name_and_checks_the_certificate(tmp_path: Path) -> None:
    chain, private = certificate_for("hooks.example.com", tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, private)
    names: list[str | None] = []
    context.sni_callback = lambda sock, name, context: names.append(name)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nConnection: close\r\n\r\nhere")
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    trusted = ssl.create_default_context(cafile=str(chain))
    connector = SafeConnector(allow=LOOPBACK, resolver=Names(["127.0.0.1"]), ssl=trusted)
    async with listener, aiohttp.ClientSession(connector=connector) as session:
        async with session.get(f"https://hooks.example.com:{port}/") as response:
            assert await response.text() == "here"
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await session.get(f"https://other.example.com:{port}/")
    assert names == ["hooks.example.com", "other.example.com"]
