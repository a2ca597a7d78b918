"""A WSGI app that answers in all ways that PEP 3333 allows, and in some that it forbids, for the WSGI middleware's tests.

A path is `/{rule}/{act}`; `?case=` names the runs of a test, and `GET /told?case=` tells what happened in it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import parse_qs
from wsgiref.util import FileWrapper

from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.guard import Guard
from oncemore._ledger.model import Operation
from oncemore.web.wsgi import IdempotencyMiddleware, current_operation

Environ = dict[str, Any]
told: list[tuple[str, str]] = []


def tell(case: str, what: str) -> None:
    """Note that something happened, in a file if there are several processes."""
    told.append((case, what))
    if log := os.environ.get("LOG"):
        with open(log, "a") as file:
            file.write(f"{case} {what}\n")


class Closing:
    """An iterable that notes when it is closed."""

    def __init__(self, case: str, chunks: Iterable[bytes], *, badly: bool = False) -> None:
        self.case = case
        self.chunks = chunks
        self.badly = badly

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.chunks)

    def close(self) -> None:
        tell(self.case, "closed")
        if self.badly:
            raise RuntimeError("It cannot be closed")


def app(environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
    case = parse_qs(environ["QUERY_STRING"]).get("case", [""])[0]
    act = environ["PATH_INFO"].rstrip("/").rpartition("/")[2]
    if act == "told":
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps([what for name, what in told if name == case]).encode()]
    tell(case, "run")
    answer: Iterable[bytes] = ACTS[act](case, environ, start_response)
    return answer


def text(start_response: Callable[..., Any], status: str = "201 Created", length: int | None = None) -> Any:
    sized = [] if length is None else [("Content-Length", str(length))]
    return start_response(status, [("Content-Type", "text/plain"), *sized])


def whole(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response)
    return [b"one ", b"", b"two"]


def late(case: str, environ: Environ, start_response: Any) -> Iterator[bytes]:
    """Calls start_response as late as it may."""
    yield b""
    text(start_response, length=7)
    yield b"one "
    yield current_operation().key[:3].encode()


def stream(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response)
    return Closing(case, (chunk for chunk in (b"", b"one ", b"two")))


def slow_stream(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    def chunks() -> Iterator[bytes]:
        for _ in range(500):
            yield b"x" * 65536
            time.sleep(0.01)

    text(start_response)
    return Closing(case, chunks())


def trickle(case: str, environ: Environ, start_response: Any) -> Iterator[bytes]:
    text(start_response)
    for _ in range(8):
        yield b"x"
        time.sleep(0.1)


def broken_stream(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    def chunks() -> Iterator[bytes]:
        yield b"one "
        yield current_operation().key[:3].encode()
        raise RuntimeError("The stream breaks off")

    text(start_response)
    return Closing(case, chunks())


def writes(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response)(b"one two")
    return []


def writes_pieces(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    write = text(start_response, length=11)
    write(b"one ")
    write(b"two ")
    return [b"six"]


def writes_more(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    write = text(start_response)
    write(b"one ")
    write(b"two ")
    return [b"six"]


def fails(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    """Fails after start_response, and calls start_response again."""
    write = text(start_response)
    write(b"half of ")
    try:
        raise RuntimeError("The app fails")
    except RuntimeError:
        text_of_failure = [("Content-Type", "text/plain"), ("Content-Length", "6")]
        start_response("422 Unprocessable Content", text_of_failure, sys.exc_info())
    return [b"failed"]


def fails_late(case: str, environ: Environ, start_response: Any) -> Iterator[bytes]:
    """Fails in mid-stream, when another start_response comes too late."""
    text(start_response)
    yield b"one "
    try:
        raise RuntimeError("The app fails in mid-stream")
    except RuntimeError:
        start_response("500 Internal Server Error", [("Content-Type", "text/plain")], sys.exc_info())
    yield b"never sent"


def raises(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    raise RuntimeError("The app fails")


def raises_inside(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    def chunks() -> Iterator[bytes]:
        yield b"one "
        raise RuntimeError("The app fails in its iterable")

    text(start_response, length=7)
    return Closing(case, chunks())


def closes(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response, length=7)
    return Closing(case, [b"one ", b"two"])


def closes_badly(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response, length=7)
    return Closing(case, [b"one ", b"two"], badly=True)


def starts_twice(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response)
    text(start_response)
    return []


def never_starts(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    return []


def body_first(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    return [b"a body without a head"]


def empty(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    text(start_response)
    return []


def nothing(case: str, environ: Environ, start_response: Any) -> Iterator[bytes]:
    """A generator for a response without a body."""
    start_response("204 No Content", [])
    yield b""


def silent(case: str, environ: Environ, start_response: Any) -> Iterator[bytes]:
    """A generator that yields nothing."""
    text(start_response)
    yield from ()


def file(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    found = tempfile.TemporaryFile()  # noqa: SIM115 (the server closes it)
    found.write(b"x" * int(parse_qs(environ["QUERY_STRING"])["size"][0]))
    found.seek(0)
    text(start_response, "200 OK")
    wrapper = environ.get("wsgi.file_wrapper", FileWrapper)
    environ["wsgi.file_wrapper"] = wrapper  # Werkzeug's server has none
    return wrapper(found, 4096)  # type: ignore[no-any-return]


def reads(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    """Reads without a limit, which hangs on a development server unless the middleware has put the body back."""
    body = environ["wsgi.input"].read()
    text(start_response)
    return [b"%d of %b" % (len(body), environ["CONTENT_LENGTH"].encode())]


def moves(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    """Redirects to the path with a slash at its end, as routes of many frameworks do."""
    if environ["PATH_INFO"].endswith("/"):
        text(start_response)
        return [b"done"]
    start_response("308 Permanent Redirect", [("Location", f"/moves/?{environ['QUERY_STRING']}")])
    return []


def dies(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    os._exit(9)


def hangs(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    time.sleep(60)
    return []


def waits(case: str, environ: Environ, start_response: Any) -> Iterable[bytes]:
    time.sleep(0.5)
    text(start_response)
    return [b"%d" % os.getpid()]


ACTS: dict[str, Callable[..., Iterable[bytes]]] = {
    name.replace("_", "-"): act for name, act in list(globals().items()) if getattr(act, "__module__", "") == __name__
}

RULES = [
    Rule("POST /{act}"),
    Rule("POST /small/{act}", max_response=1000, max_request=1000),
    Rule("POST /buffered/{act}", streams="store"),
    Rule("POST /released/{act}", streams="release", lease="300ms", on_unknown="hold"),
    Rule("POST /brief/{act}", lease="300ms", on_unknown="hold"),
    Rule("POST /conflict/{act}", in_flight="conflict"),
]


def guarded(store: str) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(app, guard=Guard(store), contract=Contract(*RULES))


def make() -> IdempotencyMiddleware:
    """The app for a server's process; its guard is used before that is forked."""
    door = guarded(os.environ["STORE"])
    door.guard.run(Operation("tests", "before the fork"), lambda op: "used")
    return door
