"""Reads headers, path, body and errors from a WSGI environ, or from Django's META, which has the same names."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from io import BytesIO
from typing import Any

from ..._contract.rule import Rule
from ...errors import InvalidPayload
from ..request import Request, check_length

FLASK_ERROR = "oncemore.error"  # the key in the environ of the exception behind Flask's error page
BLOCK = 64 * 1024
NON_ASCII = re.compile(rb"[\x80-\xff]")


def request_of(environ: Mapping[str, Any]) -> Request:
    path = decode_path(environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", ""))
    return Request(environ["REQUEST_METHOD"], path, environ.get("QUERY_STRING", ""), headers_of(environ), b"", environ)


def headers_of(environ: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the request's headers, with names in lower case.  Servers have joined the values of a repeated header."""
    found = [(name[5:].replace("_", "-").lower(), value) for name, value in environ.items() if name.startswith("HTTP_")]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            found.append((name.replace("_", "-").lower(), environ[name]))
    return found


def decode_path(text: str) -> str:
    """Return the decoded path: WSGI carries the bytes of its UTF-8 as latin-1.  Other bytes are percent-encoded again."""
    if text.isascii():
        return text
    data = text.encode("latin-1")
    try:
        return data.decode()
    except UnicodeDecodeError:
        return NON_ASCII.sub(lambda byte: b"%%%02X" % byte[0][0], data).decode()


def declared_length(environ: Mapping[str, Any]) -> int | None:
    """Return the Content-Length, or None if there is none.  Raise InvalidPayload if it is not a number."""
    text = str(environ.get("CONTENT_LENGTH") or "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidPayload("The Content-Length is not a number of bytes; nothing was done")
    return int(text)


def read_body(environ: dict[str, Any], rule: Rule) -> bytes:
    """Return the whole body.  Read no byte after its end, because some servers would wait for it for ever."""
    declared = declared_length(environ)
    chunked = bool(environ.get("HTTP_TRANSFER_ENCODING"))
    terminated = bool(environ.get("wsgi.input_terminated"))
    if chunked and not terminated:
        raise InvalidPayload("This server does not read chunked bodies; send a Content-Length")
    if declared is None or chunked:
        return read(environ, rule.max_request + 1, rule) if terminated else b""
    check_length(rule, declared)
    body = read(environ, declared, rule)
    if len(body) < declared:
        raise InvalidPayload(f"The body ended after {len(body)} of its {declared} bytes; nothing was done")
    return body


def read(environ: dict[str, Any], most: int, rule: Rule) -> bytes:
    """Return at most *most* bytes of the body."""
    chunks: list[bytes] = []
    length = 0
    while length < most:
        try:
            chunk = environ["wsgi.input"].read(min(BLOCK, most - length))
        except Exception as error:  # for a bad chunk, or a client that has left, each server raises another exception
            raise InvalidPayload("The body could not be read to its end; nothing was done") from error
        if not chunk:
            break
        chunks.append(chunk)
        length += len(chunk)
    check_length(rule, length)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def put_back(environ: dict[str, Any], body: bytes) -> None:
    """Let the app read the body as if nobody had read it; a chunked body gets a Content-Length."""
    environ["wsgi.input"] = BytesIO(body)
    environ["wsgi.input_terminated"] = True
    environ["CONTENT_LENGTH"] = str(len(body))
    environ.pop("HTTP_TRANSFER_ENCODING", None)


def can_be_observed(environ: Mapping[str, Any], rule: Rule) -> bool:
    """Whether reading the body makes no difference to the app: its length is known, and not too long."""
    try:
        return (declared_length(environ) or 0) <= rule.max_request and not environ.get("HTTP_TRANSFER_ENCODING")
    except InvalidPayload:
        return False


def read_to_observe(environ: dict[str, Any]) -> bytes:
    """Return the whole body.  The app can still read it, and the rest of the environ stays as it is."""
    length = declared_length(environ)
    if not length:
        return b""
    body: bytes = environ["wsgi.input"].read(length)
    environ["wsgi.input"] = BytesIO(body)
    return body


def note_flask_errors() -> None:
    """Have Flask write the exceptions of its views into the environ, because it answers them with an error page.

    Do nothing if Flask was not imported, because then the app is not a Flask app.
    """
    flask: Any = sys.modules.get("flask")
    if flask is not None:
        flask.got_request_exception.connect(note_flask_error)


def note_flask_error(sender: Any, exception: BaseException | None = None, **_: Any) -> None:
    sys.modules["flask"].request.environ[FLASK_ERROR] = exception
