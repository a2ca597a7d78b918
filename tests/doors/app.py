"""The small app that every middleware serves for the `DoorContract`: it does no I/O, so any framework can send its replies.

A path is `/{rule}/{act}`.  The first part chooses the rule (see `door_rules`), the second what the app does:

| act | the reply |
|---|---|
| `create` | 201 with the number of the run and its key in the body, `Location` and `ETag` |
| `slow` | the same, once the gate is open |
| `status` | `?status=500,201`: the first run gets the first status, and so on; the last one stays |
| `raise`, `refuse` | an exception on the first run, then as `create`; `refuse` raises an OncemoreError |
| `time-out`, `doubt` | a NoAnswer, or an UnknownOutcome, on every run |
| `echo` | the request: method, path, query, headers, body |
| `headers` | two `Link` headers, and headers of one client or one moment: cookie, date, challenge, rate limits |
| `binary`, `empty`, `nothing`, `redirect` | all 256 bytes; 200 without a body; 204; 303 with a `Location` |
| `pieces` | three chunks with a Content-Length |
| `stream` | a chunk, another when the gate is open, and no Content-Length; with `?status=502`, an error page in pieces |
| `big` | a body of `?size=2000` bytes |
| `thing` | a resource: GET sends its ETag, every other method changes it |
| anything else | as `create` |

Every request has `?case=...`: the name under which its runs are counted and its gate is kept.  `GET /count?case=...`,
`GET /open?case=...` and `GET /waiting?case=...` are for the tests.  All of it must be served by one process with at least
sixteen threads or tasks:

    app = ContractApp("sqlite:///once.db")
    door = IdempotencyMiddleware(my_framework_app, guard=app.guard, contract=app.contract)

where each request is answered by `run(app.perform(method, path, query, headers, body))`, or `await arun(...)`.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

from oncemore._contract.contract import Contract
from oncemore._ledger.connect import connect
from oncemore._ledger.context import CURRENT
from oncemore._ledger.events import Event
from oncemore._ledger.guard import Guard
from oncemore._ledger.store import Store
from oncemore._runtime.plan import Plan, Sleep, arun, run
from oncemore.errors import Duplicate, UnknownOutcome
from oncemore.testing.crashes import FaultyStore

from .rules import RULES, NoAnswer

PATIENCE = 15.0  # seconds until a gate that nobody opens is an error, rather than a test that hangs
JSON = ("content-type", "application/json")
Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Reply:
    """A reply of the app: *body* as a whole, or if it is *streamed*, chunk by chunk from `chunks` or `achunks`.

    Render *headers* as they are, and add no Content-Length to what is streamed: where there is one, it is among them.
    """

    status: int
    headers: Headers
    body: bytes = b""
    pieces: tuple[bytes, ...] = ()
    gate: Gate | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.pieces)

    def chunks(self) -> Iterator[bytes]:
        for number, piece in enumerate(self.pieces):
            if number and self.gate is not None:
                run(self.gate.passed())
            yield piece

    async def achunks(self) -> AsyncIterator[bytes]:
        for number, piece in enumerate(self.pieces):
            if number and self.gate is not None:
                await arun(self.gate.passed())
            yield piece


class Gate:
    """Blocks all callers until it is opened."""

    def __init__(self) -> None:
        self.open = False

    def passed(self) -> Plan[None]:
        """Wait until the gate is open."""
        for _ in range(int(PATIENCE / 0.005)):
            if self.open:
                return
            yield Sleep(0.005)
        raise TimeoutError("Nobody opened the gate")


@dataclass
class Case:
    """The state of the app for one test."""

    runs: int = 0
    version: int = 0
    gate: Gate = field(default_factory=Gate)


class ContractApp:
    """The app, with the guard and the contract for its middleware.  *store* is a URL or a store."""

    def __init__(self, store: str | Store) -> None:
        self.guard = Guard(FaultyStore.around(connect(store) if isinstance(store, str) else store), observers=[self])
        self.contract = Contract(*RULES)
        self._lock = threading.Lock()
        self._cases: dict[str, Case] = defaultdict(Case)
        self._waiting: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        """Count the requests that have begun to wait for a running operation, by its key."""
        if event.kind == "waiting":
            self._waiting[event.operation.key] += 1

    def perform(self, method: str, path: str, query: str, headers: Headers, body: bytes) -> Plan[Reply]:
        """Return the reply to a request."""
        asked = {name: values[0] for name, values in parse_qs(query).items()}
        case = self._case(asked.get("case", ""))
        told = self._told(path, case, asked)
        if told is not None:
            return Reply(200, [JSON], json.dumps(told).encode())
        act = path.rstrip("/").rpartition("/")[2]
        if act == "thing":
            return self._thing(method, case)
        with self._lock:
            case.runs += 1
            number = case.runs
        if act == "slow":
            yield from case.gate.passed()
        if act == "raise" and number == 1:
            raise RuntimeError("The app fails, as it was asked to")
        if act == "refuse" and number == 1:
            raise Duplicate("What the app itself has asked another guard for is refused")
        if act == "time-out":
            raise NoAnswer("The bank has not answered, and may have paid")
        if act == "doubt":
            raise UnknownOutcome("The bank cannot tell whether it has paid")
        if act == "echo":
            return echoed(method, path, query, headers, body)
        return reply(act, number, case, asked)

    def _case(self, name: str) -> Case:
        with self._lock:
            return self._cases[name]

    def _told(self, path: str, case: Case, asked: dict[str, str]) -> object | None:
        """Return the reply to a question of a test."""
        if path == "/open":
            case.gate.open = True
            return True
        return {"/count": case.runs, "/waiting": self._waiting[asked.get("case", "")]}.get(path)

    def _thing(self, method: str, case: Case) -> Reply:
        if method not in ("GET", "HEAD"):
            with self._lock:
                case.runs += 1
                case.version += 1
        return Reply(200, [JSON, ("etag", f'"v{case.version}"')], b'{"version": %d}' % case.version)


def echoed(method: str, path: str, query: str, headers: Headers, body: bytes) -> Reply:
    seen: dict[str, Any] = {"method": method, "path": path, "query": query, "body": body.hex()}
    seen["headers"] = [[name.lower(), value] for name, value in headers]
    return Reply(200, [JSON], json.dumps(seen).encode())


def reply(act: str, number: int, case: Case, asked: dict[str, str]) -> Reply:
    """Return the reply of an act that needs only the number of its run."""
    match act:
        case "headers":
            return Reply(201, [JSON, *HEADERS], b"{}")
        case "binary":
            return Reply(200, [("content-type", "application/octet-stream")], bytes(range(256)))
        case "empty":
            return Reply(200, [])
        case "nothing":
            return Reply(204, [])
        case "redirect":
            return Reply(303, [("location", f"/things/{number}")])
        case "pieces":
            return Reply(200, [("content-length", "11"), PLAIN], pieces=(b"one ", b"two ", b"six"))
        case "stream":
            return Reply(int(asked.get("status", 200)), [PLAIN], pieces=(b"first", b"second"), gate=case.gate)
        case "big":
            return Reply(200, [PLAIN], b"x" * int(asked["size"]))
    statuses = asked.get("status", "201").split(",")
    return created(int(statuses[min(number, len(statuses)) - 1]), number)


def created(status: int, number: int) -> Reply:
    op = CURRENT.get(None)
    body = {"run": number, "key": op.key if op else None, "attempt": op.attempt if op else None}
    return Reply(status, [JSON, ("location", f"/things/{number}"), ("etag", f'"{number}"')], json.dumps(body).encode())


PLAIN = ("content-type", "text/plain; charset=utf-8")
KEPT = [
    ("location", "/things/1"),
    ("etag", 'W/"1"'),
    ("link", '</things?page=2>; rel="next"'),
    ("link", '</things?page=9>; rel="last"'),
    ("x-note", "kept"),
]
# Of the first client, or of that moment: a replay must not repeat them.
OWN = [
    ("set-cookie", "session=secret; HttpOnly"),
    ("set-cookie", "theme=dark"),
    ("www-authenticate", "Bearer"),
    ("ratelimit-remaining", "7"),
    ("x-ratelimit-remaining", "7"),
    ("retry-after", "7"),
    ("via", "1.1 inner"),
]
DATE = ("date", "Tue, 15 Nov 1994 08:12:31 GMT")
HEADERS = [*KEPT, *OWN, DATE]
