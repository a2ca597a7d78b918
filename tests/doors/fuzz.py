"""Makes valid, nearly valid and invalid HTTP requests from a seed, byte by byte."""

from __future__ import annotations

import json
import random

from .raw_http import chunked, head
from .requests import ODD

PRINCIPALS = ["alice", "bob", "carol", "dave"]
V4 = "8e03978e-40d5-43e8-bc93-6894a57f93{:02d}"
PATHS = ["/payments", "/refunds", "/accounts/{}", "/messages", "/reports", "/things", "/idempotency", "/payments/"]
ODD_PATHS = [
    "/payments/../refunds",
    "//payments",
    "/accounts/%00",
    "/accounts/%ff%fe",
    "/accounts/%2F%2e%2e",
    "/accounts/" + "9" * 3000,
    "/accounts/%E2%82%AC",
    "/payments;a=b",
    "*",
    "http://elsewhere/payments",
    "/payments#fragment",
    "/\xff",
]
ODD_QUERIES = [
    "",
    "a=1",
    "a=1&a=2",
    "%00=%ff",
    "a=%zz",
    "&&&=",
    "key=k&operation=payments",
    "operation=POST%20/payments&key=%00",
]
ODD_KEYS: list[bytes] = [
    b"",
    b'""',
    b'"',
    b'"a',
    b'"a\\',
    b"a,b",
    b"\x7f",
    b"\x80\xff",
    "ž".encode(),
    b"k" * 255,
    b"k" * 256,
    b"k" * 5000,
    b'"k";a=1;b="c"',
    b'"k";',
    b"a\tb",
    b"%00",
    b"{principal}",
    b"' OR 1=1 --",
    b"../../etc/passwd",
]
TYPES = [
    "application/json",
    "application/json; charset=utf-16",
    "application/merge-patch+json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
    "multipart/form-data",
    "text/plain",
    "\xff/\xfe",
    "",
    "a" * 2000,
]
ODD_FIELDS: list[tuple[str, str]] = [
    ("X-Request-Timeout", "0"),
    ("X-Request-Timeout", "nan"),
    ("X-Request-Timeout", "-1"),
    ("X-Request-Timeout", "1e999"),
    ("X-Request-Timeout", "5" * 400),
    ("If-Match", '"x"'),
    ("If-Match", ","),
    ("Repeatability-First-Sent", "yesterday"),
    ("Repeatability-First-Sent", "Tue, 15 Nov 1994 08:12:31 GMT"),
    ("Expect", "100-continue"),
    ("Cookie", "a=b; \xff"),
    ("Content-Encoding", "gzip"),
    ("X-Odd", "\xff" * 50),
    ("Authorization", "Bearer another"),
]
ODD_FRAMES = [
    b"GARBAGE\r\n\r\n",
    b"POST /payments HTTP/9.9\r\n\r\n",
    b"POST /payments HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    b"POST /payments HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    b"POST /payments HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    b"POST /payments HTTP/1.1\r\nHost: x\r\nIdempotency-Key\r\n\r\n",
    b"POST /payments HTTP/1.1\r\nHost: x\r\nIdempotency-Key : a\r\nContent-Length: 0\r\n\r\n",
    b"POST /payments HTTP/1.1\r\nHost: x\r\n Idempotency-Key: a\r\nContent-Length: 0\r\n\r\n",
    b"\x00\x01\x02\x03",
    b"\r\n\r\n\r\n",
]


class Request:
    """Bytes to send, their caller, and whether the server will answer and keep the connection open."""

    def __init__(self, data: bytes, principal: str, *, cut: bool = False, odd: bool = False) -> None:
        self.data = data
        self.principal = principal
        self.cut = cut  # the client leaves before it is whole
        self.odd = odd  # the server may close the connection after it, or instead


def requests(seed: int, count: int) -> list[Request]:
    """Yield *count* requests, the same for the same seed."""
    source = random.Random(seed)
    return [request(source) for _ in range(count)]


def request(source: random.Random) -> Request:
    principal = source.choice(PRINCIPALS)
    if source.random() < 0.02:
        return Request(source.choice(ODD_FRAMES), principal, odd=True)
    method, content = source.choice(METHODS), body(source)
    fields: list[tuple[str | bytes, str | bytes]] = [
        ("Host", "test"),
        ("Authorization", f"Bearer {principal}"),
        *keys(source),
    ]
    if source.random() < 0.95:
        fields.append(("Content-Type", TYPES[0] if source.random() < 0.7 else source.choice(TYPES)))
    if source.random() < 0.15:
        fields.append(source.choice(ODD_FIELDS[:-1]))
    as_chunks = source.random() < 0.15
    fields.append(("Transfer-Encoding", "chunked") if as_chunks else ("Content-Length", str(len(content))))
    source.shuffle(fields)
    sent = chunked(*pieces(source, content)) if as_chunks else content
    data = head(method, target(source), fields)
    if sent and source.random() < 0.03:
        return Request(data + sent[: source.randrange(len(sent))], principal, cut=True)
    return Request(data + sent, principal)


METHODS = ["POST"] * 12 + ["PATCH", "PUT", "DELETE", "GET", "HEAD", "OPTIONS", "post", "BREW"]


def target(source: random.Random) -> str:
    path = source.choice(PATHS).format(source.randrange(3)) if source.random() < 0.9 else source.choice(ODD_PATHS)
    query = source.choice(ODD_QUERIES) if source.random() < 0.15 else ""
    return f"{path}?{query}" if query else path


def keys(source: random.Random) -> list[tuple[str | bytes, str | bytes]]:
    """Mostly one of a few keys, so that repeats are frequent."""
    chance = source.random()
    if chance < 0.1:
        return []
    if chance < 0.25:
        return [("Idempotency-Key", source.choice(ODD_KEYS))]
    if chance < 0.3:
        return [("Idempotency-Key", "one"), ("idempotency-key", "two")]
    return [("Idempotency-Key", V4.format(source.randrange(60)))]


def body(source: random.Random) -> bytes:
    chance = source.random()
    if chance < 0.7:
        amount = source.choice([1, 1, 1, 1.0, 2, -1, "1", None])
        return json.dumps(
            {"amount": amount, "id": f"m{source.randrange(40)}", "subject": source.randrange(20)}
        ).encode()
    if chance < 0.85:
        return source.choice(list(ODD.values()))
    if chance < 0.95:
        return source.randbytes(source.randrange(200))
    return b"x" * source.choice([10_000, 70_000])


def pieces(source: random.Random, content: bytes) -> list[bytes]:
    """Return the content, cut at random into chunks that are not empty: an empty chunk would end the body."""
    cuts = sorted(source.randrange(len(content) + 1) for _ in range(source.randrange(4)))
    parts = [content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    return [part for part in parts if part]
