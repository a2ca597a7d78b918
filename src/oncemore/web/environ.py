"""A WSGI environ, or Django's META, which is made like one: its headers, its path and its body."""

from __future__ import annotations

import re
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from .._contract.contract import Contract, Match
from .._contract.rule import Rule
from ..errors import InvalidPayload
from .door import Door

BLOCK = 64 * 1024
NON_ASCII = re.compile(rb"[\x80-\xff]")


def headers_of(environ: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The request's headers, names in lower case.  Servers have joined the lines of one name with commas."""
    found = [(name[5:].replace("_", "-").lower(), value) for name, value in environ.items() if name.startswith("HTTP_")]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            found.append((name.replace("_", "-").lower(), environ[name]))
    return found


def decoded(text: str) -> str:
    """A path as the client meant it: WSGI carries the bytes of its UTF-8 as latin-1.  Other bytes stay percent-encoded."""
    if text.isascii():
        return text
    data = text.encode("latin-1")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return NON_ASCII.sub(lambda byte: b"%%%02X" % byte[0][0], data).decode()


def declared_length(environ: Mapping[str, Any]) -> int | None:
    """What the Content-Length says, None without one; refused where it is not a length."""
    text = str(environ.get("CONTENT_LENGTH") or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidPayload("The Content-Length is not a number of bytes; nothing was done")
    return int(text)


def matched(contract: Contract, method: str, path: str, inner: str) -> Match | None:
    """The rule for a request to *path*, which an app mounted below a prefix sees as *inner*; rules may name either."""
    found = contract.match(method, path)
    if path == inner or (found is not None and found.declared):
        return found
    within = contract.match(method, inner)
    return within if within is not None and within.declared else found


def mount_of(path: str, inner: str) -> str:
    """The prefix that an app is mounted at, which sees *path* as *inner*."""
    return path.removesuffix(inner) if path.endswith(inner) else ""


def read_body(environ: dict[str, Any], rule: Rule, door: Door) -> bytes:
    """The whole body, and not a byte more: a server that cannot tell where it ends would wait for ever."""
    declared = declared_length(environ)
    chunked = bool(environ.get("HTTP_TRANSFER_ENCODING"))
    terminated = bool(environ.get("wsgi.input_terminated"))
    if chunked and not terminated:
        raise InvalidPayload("This server does not read chunked bodies; send a Content-Length")
    if declared is None or chunked:
        return read(environ, rule.max_request + 1, rule, door) if terminated else b""
    door.check_length(rule, declared)
    body = read(environ, declared, rule, door)
    if len(body) < declared:
        raise InvalidPayload(f"The body ended after {len(body)} of its {declared} bytes; nothing was done")
    return body


def read(environ: dict[str, Any], most: int, rule: Rule, door: Door) -> bytes:
    """At most so many bytes of what the client sends."""
    chunks: list[bytes] = []
    length = 0
    while length < most:
        try:
            chunk = environ["wsgi.input"].read(min(BLOCK, most - length))
        except Exception as error:  # each server has its own for a chunk that is malformed, or a client that has gone
            raise InvalidPayload("The body could not be read to its end; nothing was done") from error
        if not chunk:
            break
        chunks.append(chunk)
        length += len(chunk)
    door.check_length(rule, length)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def put_back(environ: dict[str, Any], body: bytes) -> None:
    """Let the app read the body as if nobody had: with its length, however it came."""
    environ["wsgi.input"] = BytesIO(body)
    environ["wsgi.input_terminated"] = True
    environ["CONTENT_LENGTH"] = str(len(body))
    environ.pop("HTTP_TRANSFER_ENCODING", None)
