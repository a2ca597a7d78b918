"""The code that all HTTP middlewares share: hostile requests, and settings that are easily mistaken."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from typing import Any

import pytest

from oncemore import Guard, Outcome, Resolution
from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule
from oncemore._ledger.decisions import Answer, outcome_unknown
from oncemore._ledger.values import error_outcome, value_outcome
from oncemore._runtime.plan import arun, run
from oncemore.errors import InvalidKey, InvalidPayload, OncemoreError, PrincipalFailed, StoreUnavailable
from oncemore.testing.clock import Clock
from oncemore.web import asgi, aws_lambda, wsgi
from oncemore.web.door import Door, issued_at, wait_of
from oncemore.web.etag import matches
from oncemore.web.request import Request, principal_of, remembered_digest

SENT = "Repeatability-First-Sent"


def operation(door: Door, request: Request) -> Any:
    match = door.match(request.method, request.path, request.headers, request.native)
    assert match is not None
    return run(door.operation(match, request))[0]


def post(path: str, body: bytes = b"", *headers: tuple[str, str], key: str = "k") -> Request:
    return Request("POST", path, "", [("authorization", "alice"), ("idempotency-key", key), *headers], body)


def test_window_moves_with_the_clock_of_tests() -> None:
    guard = Guard("memory://")
    rule = Rule("POST /reports", key="template:{body.subject}:{window:1h}")
    door: Door = Door(guard=guard, contract=Contract(rule))
    report = post("/reports", b'{"subject": "troll"}', ("content-type", "application/json"))
    hours = []
    for _ in range(3):
        hours.append(operation(door, report).key)
        Clock(guard.store).advance(3600)
    assert len(set(hours)) == 3


# When a key was made


@pytest.fixture
def in_california(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "America/Los_Angeles")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_california")
@pytest.mark.parametrize(
    "date",
    [
        "Sun, 06 Nov 1994 08:49:37 GMT",
        "Sunday, 06-Nov-94 08:49:37 GMT",
        "Sun Nov  6 08:49:37 1994",
        "Sun, 06 Nov 1994 08:49:37 -0000",
    ],
)
def test_http_date_is_read_in_every_form_and_timezone(date: str) -> None:
    """One form has no time zone, and was once read in the server's own zone: eight hours too late here."""
    rule = Rule("POST /things", late="refuse", first_sent=SENT)
    assert issued_at(rule, [(SENT.lower(), date)], "k") == 784111777


def test_malformed_http_date_is_refused() -> None:
    rule = Rule("POST /things", late="refuse", first_sent=SENT)
    for date in ("yesterday", "Sun, 06 Nov 99999 08:49:37 GMT", "1 1 1 1 1 1", ","):
        with pytest.raises(InvalidKey, match="HTTP date"):
            issued_at(rule, [(SENT.lower(), date)], "k")


# What a name is made from


def test_unique_by_without_body_fields_does_not_parse_it() -> None:
    """A photo is not JSON, and need not be if `unique_by` uses only the path."""
    contract = Contract(
        Rule("POST /photos/{id}", key="template:{principal}:{path.id}:{header.x-place}"),
        Rule("POST /orders/{id}", unique_by="{path.id}"),
        Rule("POST /messages", key="body:/id"),
        Rule("POST /reports", key="template:{body.subject}"),
        Rule("POST /carts", unique_by="{body:/cart}"),
    )
    door = Door(None, guard=Guard("memory://"), contract=contract)
    jpeg = b"\xff\xd8\xff\xe0"
    assert operation(door, post("/photos/7", jpeg, ("x-place", "left"))).key.endswith(":7:left")
    assert operation(door, post("/orders/7", jpeg)).unique == "7"
    for path in ("/messages", "/reports", "/carts"):
        with pytest.raises(InvalidPayload, match="made from the body"):
            operation(door, post(path, jpeg))


def test_many_headers_are_read_quickly() -> None:
    """Servers accept ten thousand headers; a search through all headers for each one would take seconds."""
    contract = Contract(Rule("POST /photos/{id}", key="template:{principal}:{path.id}"))
    door = Door(None, guard=Guard("memory://"), contract=contract)
    request = post("/photos/7", b"", *((f"a{number}", "") for number in range(10_000)))
    began = time.process_time()
    operation(door, request)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize("text", ["9" * 60_000 + "x", "9" * 60_000, "1s" * 30_000, "1." * 30_000])
def test_long_request_timeout_header_is_read_quickly(text: str) -> None:
    """Parsing a header of 16 KB would block all other requests for 13 seconds."""
    began = time.process_time()
    assert wait_of([("x-request-timeout", text)]) is None
    assert wait_of([("x-request-timeout", text)], 3.0) == 3.0
    assert time.process_time() - began < 0.1


def test_wait_is_the_shorter_of_the_callers_and_the_longest() -> None:
    assert [wait_of([("x-request-timeout", text)], 3.0) for text in ("1", "8s")] == [1.0, 3.0]
    assert (wait_of([]), wait_of([], 3.0)) == (None, 3.0)


def test_long_paths_and_credentials_are_not_remembered() -> None:
    """Four thousand paths or credentials of 64 KB each would fill a quarter of a gigabyte."""
    door = Door(None, guard=Guard("memory://"))
    before = remembered_digest.cache_info().currsize
    path, bearer = "/" + "p" * 60_000, "b" * 60_000
    found = operation(door, Request("POST", path, "", [("authorization", bearer), ("idempotency-key", "k")]))
    again = operation(door, Request("POST", path, "", [("authorization", bearer), ("idempotency-key", "k")]))
    assert (found.scope, len(found.scope)) == (again.scope, 255)
    assert remembered_digest.cache_info().currsize == before
    assert door._scopes == {}


# Who is calling


class Named:
    """A user whose `str()` is its name."""

    def __str__(self) -> str:
        return "alice"

    def get_id(self) -> str:
        return "7"


class Wrapped:
    """An object like Django's lazy ones: its `str()` is the `str()` of the object in it."""

    def __init__(self, inner: object) -> None:
        self.inner = inner

    def __str__(self) -> str:
        return str(self.inner)


async def later() -> str:
    return "alice"


@pytest.mark.parametrize(
    "found", [lambda: Named().get_id, object, lambda: (1, object()), lambda: Wrapped(object()), lambda: later]
)
def test_a_principal_whose_text_is_an_address_is_refused(found: Any) -> None:
    """A method that was not called has another address in the next request, so a retry would run again."""
    with pytest.raises(PrincipalFailed, match="return a text or a number"):
        run(principal_of(lambda native: found(), post("/things")))


async def test_principal_that_gives_a_coroutine_is_awaited_where_possible() -> None:
    assert await arun(principal_of(lambda native: later(), post("/things"))) == "user:alice"
    with pytest.raises(PrincipalFailed, match="could not be determined"):
        run(principal_of(lambda native: later(), post("/things")))


@pytest.mark.parametrize("found", ["alice", 7, Named(), Wrapped(7), ("tenant", 7), "Meet me at 0x7f"])
def test_principal_with_a_name_is_called_by_it(found: Any) -> None:
    assert run(principal_of(lambda native: found, post("/things"))) == f"user:{found}"


def test_principal_is_not_an_uncalled_method() -> None:
    """Its address is different in the next request."""

    class User:
        is_authenticated = True
        username = "alice"

        def id(self) -> str:
            return "7"

    request = Request("POST", "/things", "", [], b"", {"user": User()})
    assert run(principal_of(None, request)) == "user:alice"


# What is kept


@pytest.mark.parametrize(
    ("rule", "status", "redacted"),
    [
        (Rule("POST /x"), 201, True),
        (Rule("POST /x"), 422, True),
        (Rule("POST /x"), 500, False),
        (Rule("POST /x"), 401, False),
        (Rule("POST /x", keep="all"), 500, True),
        (Rule("POST /x", keep="success"), 422, False),
        (Rule("POST /x", keep="success", unique_by="{body.order}"), 422, True),
        (Rule("POST /x", keep="all", effect="transaction", doubt=(502,)), 502, True),
    ],
)
def test_only_an_outcome_that_is_kept_is_redacted(rule: Rule, status: int, redacted: bool) -> None:
    """A redaction that expects the fields of a success would fail on every error page."""
    asked: list[int] = []

    def redact(outcome: Outcome) -> Outcome:
        asked.append(outcome.status)
        return Outcome("response", outcome.status, (), b"redacted")

    door = Door(None, guard=Guard("memory://"), redact=redact)
    outcome = door.outcome(rule, status, (), b"card 4242")
    assert (outcome.body, asked) == ((b"redacted", [status]) if redacted else (b"card 4242", []))


@pytest.mark.parametrize("given", [None, b"redacted", {"status": 200}])
def test_redaction_without_an_outcome_keeps_only_the_tombstone(given: Any) -> None:
    """Without its `return`, the function would make every replay a response without a status."""
    door = Door(None, guard=Guard("memory://"), redact=lambda outcome: given)
    assert door.outcome(Rule("POST /things"), 201, [], b"secret") == Outcome("tombstone", 201)


# Conditional updates


@pytest.mark.parametrize(
    ("wanted", "etag", "status", "held"),
    [
        ('"1"', '"1"', 200, True),
        ('"0", "1"', '"1"', 200, True),
        ('"0","1"', '"1"', 200, True),
        ('"1,2"', '"1,2"', 200, True),
        ('"a", "1,2"', '"1,2"', 200, True),
        ('"1,2"', '"1"', 200, False),
        ('"1,2"', "2", 200, False),
        ('W/"1"', '"1"', 200, False),
        ("abc", "abc", 200, True),
        ("*", "", 200, True),
        (" * ", '"1"', 204, True),
        ("*", "", 404, False),
        ('"1"', "", 200, False),
        ('"1"', '"1"', 304, False),
        ('"1', '"1"', 200, False),
        ("", "", 200, False),
    ],
)
def test_if_match_holds_if_it_names_the_etag(wanted: str, etag: str, status: int, held: bool) -> None:
    """A comma within the quotes is part of the tag; otherwise such a resource could never be updated."""
    assert matches(wanted, status, etag) is held


# What is shown again


def test_resolvers_value_is_sent_as_json() -> None:
    """The value is not a response, and has no status of its own."""
    door, rule = Door(None, guard=Guard("memory://")), Rule("POST /things")

    def shown(outcome: Outcome | None) -> tuple[int, bytes]:
        assert outcome is not None
        response = door.replay(Answer(outcome, "replayed"), rule)
        return response.status, response.body

    assert shown(Resolution.settled({"id": 7}).outcome) == (200, b'{"id":7}')
    assert shown(Resolution.settled(None).outcome) == (200, b"")
    for kept in (Outcome("tombstone", 201), error_outcome(ValueError("no")), value_outcome({(1, 2): 3})):
        status, body = shown(kept)
        assert (status, b"CONFLICT.idempotency.outcome_not_kept" in body) == (409, True)
    assert shown(Outcome("value", body=b"\xc1"))[0] == 503


# Options


@pytest.mark.parametrize(
    "kind", [asgi.IdempotencyMiddleware, wsgi.IdempotencyMiddleware, aws_lambda.IdempotencyMiddleware]
)
def test_middleware_options_are_shown_with_their_meaning(kind: type) -> None:
    """`help()`, editors and type checkers read the parameters themselves."""
    parameters = inspect.signature(kind).parameters
    assert {"guard", "contract", "profile", "principal", "redact", "rates"} <= parameters.keys()
    meaning = inspect.getdoc(kind.__init__) or ""
    assert [name for name in parameters if f"\n    {name}: " not in meaning] == []


def test_lambda_decorator_takes_the_options_of_its_middleware() -> None:
    options = list(inspect.signature(aws_lambda.IdempotencyMiddleware).parameters)[1:]
    assert list(inspect.signature(aws_lambda.guarded).parameters) == options


@pytest.mark.parametrize(
    "error",
    [
        outcome_unknown("k", " (psycopg.OperationalError at db-1.internal)"),
        PrincipalFailed("The principal function returned a Session: return a text or a number"),
        StoreUnavailable("connection to 10.0.0.7 refused"),
    ],
)
def test_refusal_tells_clients_nothing_internal(error: OncemoreError) -> None:
    """Hosts, functions, notes of crashed attempts and commands are only for the log and the operator."""
    door: Door[None] = Door(None, guard=Guard("memory://"))
    body = door.refusal(error).body.decode()
    assert error.detail not in body
    for internal in ("db-1", "10.0.0.7", "function", "oncemore keys"):
        assert internal not in body
