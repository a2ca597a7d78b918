"""The Lambda middleware: API Gateway in both payload formats and load balancers, in the forms that AWS sends and expects."""

from __future__ import annotations

import base64
import itertools
import json
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from oncemore import Guard
from oncemore._contract.contract import Contract
from oncemore._contract.policy import Policy
from oncemore._contract.rule import Rule
from oncemore.errors import ConfigurationError, StoreUnavailable
from oncemore.testing.crashes import FaultyStore
from oncemore.web.aws_lambda import IdempotencyMiddleware, current_operation, guarded, idempotent
from oncemore.web.aws_lambda.events import GRACE, HttpApi, longest_wait, time_left, within

from .lambda_shapes import Context, Event, http_api, load_balancer, load_balancer_multi, rest_api

Shape = Callable[..., Event]
SHAPES = [rest_api, http_api, load_balancer, load_balancer_multi]
every_source = pytest.mark.parametrize("shape", SHAPES)
CONTEXT = Context()
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["memory", "sqlite"])
def guard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guard]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path}/once.db"
    with closing(Guard(url)) as guard:
        yield guard


class Function:
    """A Lambda function that counts its effects."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer or {
            "statusCode": 201,
            "headers": {"Content-Type": "application/json"},
            "body": '{"id": 1}',
        }
        self.events: list[Event] = []

    def __call__(self, event: Event, context: Any) -> Any:
        self.events.append(event)
        answer = self.answer(event) if callable(self.answer) else self.answer
        if isinstance(answer, Exception):
            raise answer
        return answer


def header(answer: Event, name: str) -> list[str]:
    """Return all values of a header, in either form of the answer."""
    many = {key.lower(): list(values) for key, values in (answer.get("multiValueHeaders") or {}).items()}
    single = {key.lower(): [value] for key, value in (answer.get("headers") or {}).items()}
    return (many | {key: value for key, value in single.items() if key not in many}).get(name, [])


def content(answer: Event) -> bytes:
    body = answer["body"]
    return base64.b64decode(body) if answer.get("isBase64Encoded") else body.encode()


class TestEverySource:
    @every_source
    def test_repeated_request_is_replayed(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard)
        first, second = (door(shape(idempotency_key="k1"), CONTEXT) for _ in range(2))
        assert len(function.events) == 1
        assert (first["statusCode"], second["statusCode"]) == (201, 201)
        assert content(first) == content(second) == b'{"id": 1}'
        assert [header(each, "idempotency-status") for each in (first, second)] == [["stored"], ["replayed"]]
        assert header(second, "content-type") == ["application/json"]
        assert header(second, "idempotency-expires")

    @every_source
    def test_a_changed_body_is_refused(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard)
        door(shape(body='{"amount": 100.0}', idempotency_key="k1"), CONTEXT)
        same = door(shape(body=b'{ "amount": 1e2 }', idempotency_key="k1"), CONTEXT)
        other = door(shape(body='{"amount": 101}', idempotency_key="k1"), CONTEXT)
        assert header(same, "idempotency-status") == ["replayed"]
        assert (other["statusCode"], header(other, "content-type")) == (409, ["application/problem+json"])
        assert json.loads(other["body"])["error_code"] == "CONFLICT.idempotency.payload_mismatch"
        assert len(function.events) == 1

    @every_source
    @pytest.mark.parametrize("answer", [{"statusCode": 502, "body": "upstream"}, TimeoutError("read")])
    def test_answer_in_doubt_is_not_repeated(self, guard: Guard, shape: Shape, answer: Any) -> None:
        function = Function(answer)
        contract = Contract(Rule("POST /refunds", doubt=(502, TimeoutError)))
        door = IdempotencyMiddleware(function, guard=guard, contract=contract)
        try:
            first = door(shape(idempotency_key="k1"), CONTEXT)
            assert (first["statusCode"], header(first, "idempotency-status")) == (502, ["unstored"])
        except TimeoutError:
            assert answer.args == ("read",)
        second = door(shape(idempotency_key="k1"), CONTEXT)
        assert (second["statusCode"], len(function.events)) == (409, 1)
        assert json.loads(second["body"])["error_code"] == "CONFLICT.idempotency.outcome_unknown"

    @every_source
    def test_a_required_key_is_asked_for(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard, contract=Contract(Rule("POST /refunds", key="required")))
        for headers in ({}, {"idempotency_key": ""}, {"idempotency_key": "k" * 256}):
            assert door(shape(**headers), CONTEXT)["statusCode"] == 400
        assert function.events == []

    @every_source
    def test_reads_and_requests_without_a_key_pass_untouched(self, guard: Guard, shape: Shape) -> None:
        function = Function({"statusCode": 200, "body": "as it is"})
        door = IdempotencyMiddleware(function, guard=guard)
        for event in (shape("GET", idempotency_key="k1"), shape("GET", idempotency_key="k1"), shape()):
            assert door(event, CONTEXT) == {"statusCode": 200, "body": "as it is"}
        assert len(function.events) == 3

    @every_source
    def test_an_optional_key_in_the_body_may_be_missing(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        rule = Rule("POST /refunds", key={"at": "/id", "required": False})
        door = IdempotencyMiddleware(function, guard=guard, contract=Contract(rule))
        for body in ('{"id": "k"}', '{"id": "k"}', "{}", "{}"):
            door(shape(body=body), CONTEXT)
        assert len(function.events) == 3

    @every_source
    def test_query_and_path_count(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard)
        asked = [("/t/1", "a=1&b=2"), ("/t/2", "a=1&b=2"), ("/t/1", "a=1&b=2"), ("/t/1", "a=2&b=2"), ("/t/é x", "")]
        answers = [door(shape(path=path, query=query, idempotency_key="k"), CONTEXT) for path, query in asked]
        assert [each["statusCode"] for each in answers] == [201, 201, 201, 409, 201]
        assert len(function.events) == 3

    @every_source
    def test_binary_bodies_and_repeated_headers_replay_exactly(self, guard: Guard, shape: Shape) -> None:
        data = bytes(range(256))
        answer: Event = {
            "statusCode": 200,
            "headers": {"ETag": '"1"', "Set-Cookie": "secret=1"},
            "body": base64.b64encode(data).decode(),
            "isBase64Encoded": True,
        }
        if shape in (rest_api, load_balancer_multi):
            answer["multiValueHeaders"] = {"Link": ["<a>", "<b>"]}
        else:
            answer["headers"]["Link"] = "<a>, <b>"
        door = IdempotencyMiddleware(Function(answer), guard=guard)
        first, second = (door(shape(body=data, idempotency_key="k"), CONTEXT) for _ in range(2))
        assert content(first) == content(second) == data
        assert ", ".join(header(second, "link")) == "<a>, <b>"
        assert header(second, "etag") == ['"1"']
        assert (header(first, "set-cookie"), header(second, "set-cookie")) == (["secret=1"], [])

    @every_source
    def test_a_failure_is_tried_again(self, guard: Guard, shape: Shape) -> None:
        answers = iter([RuntimeError("the gateway timed out"), {"statusCode": 503, "body": ""}, {"statusCode": 204}])
        function = Function(lambda event: next(answers))
        door = IdempotencyMiddleware(function, guard=guard)
        with pytest.raises(RuntimeError):
            door(shape(idempotency_key="k"), CONTEXT)
        assert header(door(shape(idempotency_key="k"), CONTEXT), "idempotency-status") == ["unstored"]
        found = [door(shape(idempotency_key="k"), CONTEXT) for _ in range(2)]
        assert [each["statusCode"] for each in found] == [204, 204]
        assert len(function.events) == 3

    @every_source
    def test_two_callers_have_two_operations(self, guard: Guard, shape: Shape) -> None:
        numbers = itertools.count(1)
        function = Function(lambda event: {"statusCode": 200, "body": str(next(numbers))})
        door = IdempotencyMiddleware(function, guard=guard)
        bodies = [
            door(shape(idempotency_key="k", authorization=who), CONTEXT)["body"] for who in ("alice", "bob", "alice")
        ]
        assert bodies == ["1", "2", "1"]

    @every_source
    def test_two_key_headers_are_refused(self, guard: Guard, shape: Shape) -> None:
        """A load balancer without multi-value headers passes only the last one on."""
        function = Function()
        answer = IdempotencyMiddleware(function, guard=guard)(shape(idempotency_key=["k1", "k2"]), CONTEXT)
        assert answer["statusCode"] == (201 if shape is load_balancer else 400)

    @every_source
    def test_a_status_lookup_performs_nothing(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard, contract=Contract(Rule("POST /refunds", name="refund")))
        door(shape(idempotency_key="k"), CONTEXT)
        lookup = {"method": "GET", "path": "/idempotency", "body": None, "query": "operation=refund&key=k"}
        mine, others = (door(shape(**lookup, authorization=who), CONTEXT) for who in ("Bearer alice", "bob"))
        assert json.loads(mine["body"])["response"]["status"] == 201
        assert (others["statusCode"], len(function.events)) == (404, 1)

    def test_the_status_url_has_the_stage(self, guard: Guard) -> None:
        """The same request comes again while the first is served."""
        contract, found = Contract(Rule("POST /refunds", in_flight="accepted")), []
        event = http_api(path="/prod/refunds", idempotency_key="k")
        event["requestContext"]["stage"] = "prod"

        def answer(event: Event) -> Event:
            found.append(door(event, CONTEXT))
            return {"statusCode": 201}

        door = IdempotencyMiddleware(Function(answer), guard=guard, contract=contract)
        door(event, CONTEXT)
        assert (found[0]["statusCode"], len(found)) == (202, 1)
        assert found[0]["headers"]["location"].startswith("/prod/idempotency?")

    @every_source
    def test_a_stale_etag_is_refused(self, guard: Guard, shape: Shape) -> None:
        """If-Match: the function's own GET returns the resource's present ETag."""

        def answer(event: Event) -> Event:
            asked = event.get("httpMethod") or event["requestContext"]["http"]["method"]
            return {"statusCode": 200, "headers": {"ETag": '"7"'}, "body": asked}

        contract = Contract(Rule("PUT /refunds", if_match=True))
        door = IdempotencyMiddleware(Function(answer), guard=guard, contract=contract)
        found = [
            door(shape("PUT", idempotency_key=f"k{n}", **headers), CONTEXT)["statusCode"]
            for n, headers in enumerate(({}, {"if_match": '"6"'}, {"if_match": '"7"'}))
        ]
        assert found == [428, 412, 200]

    @every_source
    @pytest.mark.parametrize("header", ["if_none_match", "if_modified_since", "range"])
    def test_other_conditional_headers_are_not_sent_with_the_get(self, guard: Guard, shape: Shape, header: str) -> None:
        """The GET would get 304 or a part, and the ETag would not be found."""

        def answer(event: Event) -> Event:
            asked = event.get("httpMethod") or event["requestContext"]["http"]["method"]
            told = {name.lower() for form in ("headers", "multiValueHeaders") for name in event.get(form) or {}}
            in_part = asked == "GET" and header.replace("_", "-") in told
            return {"statusCode": 304 if in_part else 200, "headers": {"ETag": '"7"'}, "body": ""}

        contract = Contract(Rule("PUT /refunds", if_match=True))
        door = IdempotencyMiddleware(Function(answer), guard=guard, contract=contract)
        event = shape("PUT", idempotency_key="k", if_match='"7"', **{header: '"7"'})
        assert door(event, CONTEXT)["statusCode"] == 200

    @every_source
    @pytest.mark.parametrize("effect", ["lease", "transaction"])
    def test_inner_middleware_leaves_the_operation_to_the_outer(
        self, tmp_path: Path, shape: Shape, effect: Any
    ) -> None:
        """The inner middleware would wait for the outer one, which waits for the inner."""
        function, contract = Function(), Contract(Rule("POST /refunds", effect=effect, wait="1s"))
        with closing(Guard(f"sqlite:///{tmp_path}/once.db")) as guard:
            door = function
            for _ in range(2):
                door = IdempotencyMiddleware(door, guard=guard, contract=contract)  # type: ignore[assignment]
            answers = [door(shape(idempotency_key="k"), CONTEXT) for _ in range(2)]
        assert [answer["statusCode"] for answer in answers] == [201, 201]
        assert len(function.events) == 1

    @every_source
    def test_inner_middleware_with_another_key_guards_too(self, guard: Guard, shape: Shape) -> None:
        """One order under two keys: only the inner middleware knows that it is the same."""
        function, by_order = Function(), Contract(Rule("POST /refunds", key="body:/order"))
        inner = IdempotencyMiddleware(function, guard=guard, contract=by_order)
        door = IdempotencyMiddleware(inner, guard=guard)
        answers = [door(shape(body='{"order": "A-1"}', idempotency_key=key), CONTEXT) for key in ("k1", "k2")]
        assert [answer["statusCode"] for answer in answers] == [201, 201]
        assert len(function.events) == 1

    def test_functions_own_request_with_the_same_key_is_in_progress(self, guard: Guard) -> None:
        """It is not taken for the running request, although it has the same key, and does not run beside it."""
        found: list[Any] = []

        def answer(event: Event) -> Event:
            found.append(door(rest_api(idempotency_key="k"), CONTEXT)["statusCode"])
            return {"statusCode": 201}

        door = IdempotencyMiddleware(
            Function(answer), guard=guard, contract=Contract(Rule("POST /refunds", wait="10ms"))
        )
        assert (door(rest_api(idempotency_key="k"), CONTEXT)["statusCode"], found) == (201, [409])

    @every_source
    @pytest.mark.parametrize("answer", ["text", {"body": 1, "statusCode": 200}, {"statusCode": "x"}, ["list"]])
    def test_unreadable_answer_is_passed_on_and_not_kept(self, guard: Guard, shape: Shape, answer: Any) -> None:
        """It is passed on unchanged, and not kept; payload format 2.0 reads a value without a statusCode as the body."""
        function = Function(answer)
        door = IdempotencyMiddleware(function, guard=guard)
        first, second = (door(shape(idempotency_key="k"), CONTEXT) for _ in range(2))
        if shape is http_api and not (isinstance(answer, dict) and "statusCode" in answer):
            assert (first["statusCode"], len(function.events)) == (200, 1)
        else:
            assert (first, second, len(function.events)) == (answer, answer, 2)

    @every_source
    def test_a_body_that_is_not_base64_is_refused(self, guard: Guard, shape: Shape) -> None:
        function = Function()
        event = shape(idempotency_key="k") | {"body": "not base64!", "isBase64Encoded": True}
        assert IdempotencyMiddleware(function, guard=guard)(event, CONTEXT)["statusCode"] == 400
        assert function.events == []


class TestForms:
    """The differences between the forms of events."""

    @pytest.mark.parametrize("value", [None, [], {}, "text", {"id": 1}, 7, False])
    def test_format_2_takes_a_bare_value_for_the_body(self, guard: Guard, value: Any) -> None:
        """This holds for falsy values, too."""
        function = Function(lambda event: value)
        door = IdempotencyMiddleware(function, guard=guard)
        first, second = (door(http_api(idempotency_key="k"), CONTEXT) for _ in range(2))
        assert first["body"] == second["body"] == (value if isinstance(value, str) else json.dumps(value))
        assert header(second, "content-type") == ["application/json"]
        assert len(function.events) == 1

    def test_format_2_has_cookies_of_its_own(self, guard: Guard) -> None:
        answer = {"statusCode": 200, "body": "", "cookies": ["a=1", "b=2"]}
        door = IdempotencyMiddleware(Function(answer), guard=guard)
        first, second = (door(http_api(idempotency_key="k"), CONTEXT) for _ in range(2))
        assert first["cookies"] == ["a=1", "b=2"]
        assert "cookies" not in second
        assert header(second, "set-cookie") == []

    @pytest.mark.parametrize("multi", [False, True])
    def test_load_balancer_gets_headers_in_its_own_form(self, guard: Guard, multi: bool) -> None:
        door = IdempotencyMiddleware(Function(), guard=guard, contract=Contract(Rule("POST /refunds", key="required")))
        refused, first, second = (
            door(load_balancer(multi=multi, **headers), CONTEXT)
            for headers in ({}, {"idempotency_key": "k"}, {"idempotency_key": "k"})
        )
        form = "multiValueHeaders" if multi else "headers"
        assert "idempotency-status" in first[form]
        assert [set(each) & {"headers", "multiValueHeaders"} for each in (refused, second)] == [{form}, {form}]
        assert (refused["statusDescription"], second["statusDescription"]) == ("400 Bad Request", "201 Created")

    def test_unknown_status_has_a_description(self, guard: Guard) -> None:
        door = IdempotencyMiddleware(Function({"statusCode": 299, "body": ""}), guard=guard)
        answers = [door(load_balancer(idempotency_key="k"), CONTEXT) for _ in range(2)]
        assert answers[1]["statusDescription"] == "299 Unknown"

    @pytest.mark.parametrize(
        "event",
        [
            http_api(path="/refunds/1", stage="prod"),
            rest_api(path="/v9/refunds/1", resource="/{proxy+}"),
            rest_api(path="/refunds/1"),
        ],
    )
    def test_rule_matches_without_stage_or_base_path(self, guard: Guard, event: Event) -> None:
        contract = Contract(Rule("POST /refunds/{id}", key="required"), undeclared="pass")
        function = Function()
        assert IdempotencyMiddleware(function, guard=guard, contract=contract)(event, CONTEXT)["statusCode"] == 400

    @pytest.mark.parametrize(
        ("path", "inner"), [("/prod", "/"), ("/prod/x", "/x"), ("/production/x", "/production/x"), ("/x", "/x")]
    )
    def test_a_stage_is_taken_away_as_a_whole_segment(self, path: str, inner: str) -> None:
        event = http_api(stage="prod") | {"rawPath": path}
        assert HttpApi().inner_path(event) == inner

    @pytest.mark.parametrize("event", [{"source": "aws.events"}, {"Records": []}, "text", None, {"version": "2.0"}])
    def test_other_events_pass_untouched(self, guard: Guard, event: Any) -> None:
        assert IdempotencyMiddleware(lambda event, context: (event, context), guard=guard)(event, 7) == (event, 7)


class TestCaller:
    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({"authorizer": {"principalId": "a"}}, {"authorizer": {"principalId": "b"}}),
            ({"authorizer": {"claims": {"sub": "a"}}}, {"authorizer": {"claims": {"sub": "b"}}}),
            ({"identity": {"userArn": "arn:a"}}, {"identity": {"userArn": "arn:b"}}),
            ({"identity": {"cognitoIdentityId": "a"}}, {"identity": {"cognitoIdentityId": "b"}}),
        ],
    )
    def test_gateway_identity_is_the_principal(self, guard: Guard, one: Event, other: Event) -> None:
        """A signed request has another Authorization header on every attempt, but the same caller."""
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard)
        asked = [(one, "AWS4-HMAC-SHA256 1"), (one, "AWS4-HMAC-SHA256 2"), (other, "AWS4-HMAC-SHA256 2")]
        for who, signature in asked:
            door(rest_api(idempotency_key="k", authorization=signature, **who), CONTEXT)
        assert len(function.events) == 2

    @pytest.mark.parametrize(
        "authorizer",
        [
            {"jwt": {"claims": {"sub": "a"}, "scopes": None}},
            {"iam": {"userArn": "arn:a", "cognitoIdentity": None}},
            {"iam": {"cognitoIdentity": {"identityId": "a"}}},
            {"lambda": {"principalId": "a"}},
        ],
    )
    def test_gateway_identity_in_format_2_is_the_principal(self, guard: Guard, authorizer: Event) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard)
        for token, who in (("t1", authorizer), ("t2", authorizer), ("t2", None)):
            door(http_api(idempotency_key="k", authorization=token, authorizer=who), CONTEXT)
        assert len(function.events) == 2

    def test_principal_function_overrides_the_gateway(self, guard: Guard) -> None:
        function = Function()
        door = IdempotencyMiddleware(function, guard=guard, principal=lambda event: event["headers"]["x-account"])
        for token in ("t1", "t2"):
            door(http_api(idempotency_key="k", authorization=token, x_account="7"), CONTEXT)
        assert len(function.events) == 1


class TestDeclared:
    def test_a_decorator_makes_the_door(self, guard: Guard) -> None:
        @guarded(guard=guard, contract=Contract(Rule("POST /refunds", key="required")))
        def handler(event: Event, context: Any) -> Event:
            op = current_operation()
            return {"statusCode": 200, "body": f"{op.key} {op.attempt}"}

        assert handler(http_api(), CONTEXT)["statusCode"] == 400
        assert handler(http_api(idempotency_key="k"), CONTEXT)["body"] == "k 1"

    def test_a_rule_on_the_function_is_for_all_its_requests(self, guard: Guard) -> None:
        @guarded(guard=guard)
        @idempotent(key="required")
        def handler(event: Event, context: Any) -> Event:
            return {"statusCode": 200, "body": ""}

        found = [handler(http_api(method, path="/any"), CONTEXT)["statusCode"] for method in ("POST", "DELETE", "GET")]
        assert found == [400, 400, 200]

    def test_a_rule_that_names_its_requests_is_for_those(self, guard: Guard) -> None:
        @guarded(guard=guard, contract=Contract(undeclared="pass"))
        @idempotent("POST /refunds", key="required")
        def handler(event: Event, context: Any) -> Event:
            return {"statusCode": 200, "body": ""}

        assert [handler(http_api(path=path), CONTEXT)["statusCode"] for path in ("/refunds", "/any")] == [400, 200]


class TestTime:
    def test_the_lease_ends_soon_after_the_function(self) -> None:
        policy = Policy(lease=30)
        assert within(policy, 5.0).lease == 5.0 + GRACE
        assert within(policy, 900.0) is policy
        assert within(policy, None) is policy
        assert within(policy, 0.0).lease == GRACE

    def test_waiting_leaves_time_to_perform(self) -> None:
        assert longest_wait(None) is None
        assert longest_wait(6.0) == 3.0

    def test_lease_is_not_shortened_without_a_context(self) -> None:
        assert time_left(None) is None
        assert time_left(Context(-1)) == 0.0

    def test_record_has_the_shortened_lease(self, guard: Guard) -> None:
        """The lease is the remaining time, rather than the rule's."""
        seen: list[float] = []

        def handler(event: Event, context: Any) -> Event:
            record = guard.find(current_operation().operation.scope, "k")
            assert record is not None
            seen.append(record.lease_until - record.now)
            return {"statusCode": 200, "body": ""}

        IdempotencyMiddleware(handler, guard=guard)(http_api(idempotency_key="k"), Context(5))
        assert 5 <= seen[0] <= 5 + GRACE

    def test_a_duplicate_waits_no_longer_than_its_own_time(self, guard: Guard) -> None:
        go, inside = threading.Event(), threading.Event()

        def slow(event: Event, context: Any) -> Event:
            inside.set()
            assert go.wait(20)
            return {"statusCode": 200, "body": "first"}

        door = IdempotencyMiddleware(slow, guard=guard)
        with ThreadPoolExecutor() as pool:
            first = pool.submit(door, http_api(idempotency_key="k"), Context(30))
            assert inside.wait(20)
            began = time.monotonic()
            second = door(http_api(idempotency_key="k"), Context(0.6))
            waited = time.monotonic() - began
            third = pool.submit(door, http_api(idempotency_key="k"), Context(30))
            go.set()
            assert (first.result()["body"], third.result()["body"]) == ("first", "first")
        assert (second["statusCode"], header(second, "retry-after")) == (409, ["1"])
        assert 0.25 <= waited < 10

    @pytest.mark.chaos
    def test_a_function_that_was_killed_leaves_an_unknown_outcome(self, tmp_path: Path) -> None:
        """A retry gets `in_progress` during its lease, and `outcome_unknown` after it."""
        store = f"sqlite:///{tmp_path}/once.db"
        killed = subprocess.run([sys.executable, "-m", "tests.doors.lambda_killed", store, "5"], cwd=ROOT)
        assert killed.returncode == 9
        with closing(Guard(store)) as guard:
            door = IdempotencyMiddleware(Function(), guard=guard, contract=Contract(in_flight="conflict"))
            during = door(http_api(idempotency_key="k"), CONTEXT)
            guard.store.shift = 5.0 + GRACE
            after = door(http_api(idempotency_key="k"), CONTEXT)
        assert json.loads(during["body"])["error_code"] == "CONFLICT.idempotency.in_progress"
        assert json.loads(after["body"])["error_code"] == "CONFLICT.idempotency.outcome_unknown"


class TestStoreDown:
    @pytest.mark.parametrize(("store_down", "status"), [("refuse", 503), ("run", 201)])
    def test_at_the_claim(self, store_down: Any, status: int) -> None:
        function, rule = Function(), Rule("POST /refunds", name="down.claim", store_down=store_down)
        with closing(Guard(FaultyStore.around(Guard("memory://").store))) as guard:
            door = IdempotencyMiddleware(function, guard=guard, contract=Contract(rule))
            answer = door(http_api(idempotency_key="k"), CONTEXT)
        assert answer["statusCode"] == status
        assert (header(answer, "retry-after"), len(function.events)) == ((["1"], 0) if status == 503 else ([], 1))

    def test_at_the_settling(self) -> None:
        function = Function()
        with closing(Guard(FaultyStore.around(Guard("memory://").store))) as guard:
            contract = Contract(Rule("POST /refunds", name="down.settle", in_flight="conflict"))
            door = IdempotencyMiddleware(function, guard=guard, contract=contract)
            first, second = (door(http_api(idempotency_key="k"), CONTEXT) for _ in range(2))
        assert (first["statusCode"], header(first, "idempotency-status")) == (201, ["unstored"])
        assert (second["statusCode"], len(function.events)) == (409, 1)

    def test_functions_own_error_is_not_a_store_error(self, guard: Guard) -> None:
        door = IdempotencyMiddleware(Function(StoreUnavailable("another store")), guard=guard)
        with pytest.raises(StoreUnavailable, match="another store"):
            door(http_api(idempotency_key="k"), CONTEXT)

    def test_late_owner_answers_with_its_successors_outcome(self, guard: Guard) -> None:
        """It was frozen until after its lease, and another attempt has settled."""
        contract = Contract(Rule("POST /refunds", on_unknown="retry"))

        def frozen(event: Event, context: Any) -> Event:
            if not took_over.events:
                guard.store.shift = 1000.0
                other(http_api(idempotency_key="k"), CONTEXT)
            return {"statusCode": 200, "body": "late"}

        took_over = Function({"statusCode": 200, "body": "in time"})
        door = IdempotencyMiddleware(frozen, guard=guard, contract=contract)
        other = IdempotencyMiddleware(took_over, guard=guard, contract=contract)
        answer = door(http_api(idempotency_key="k"), CONTEXT)
        assert (answer["body"], header(answer, "idempotency-status")) == ("in time", ["replayed"])

    def test_late_owner_without_a_successor_is_refused(self, guard: Guard) -> None:

        def deleted(event: Event, context: Any) -> Event:
            guard.store.shift = 1000.0
            guard.delete(current_operation().operation.scope, "k")
            return {"statusCode": 200, "body": "late"}

        answer = IdempotencyMiddleware(deleted, guard=guard)(http_api(idempotency_key="k"), CONTEXT)
        assert (answer["statusCode"], json.loads(answer["body"])["retryable"]) == (409, True)


class Refused(Exception):
    """Raised by a driver when the database refuses a transaction because of another one."""

    sqlite_errorcode = 5


class TestTransaction:
    """The function's effect commits with its outcome; if the database refuses, the caller gets 503 and retries."""

    RULE = Rule("POST /refunds", key="required", effect="transaction")

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        with closing(sqlite3.connect(tmp_path / "shop.db")) as shop:
            shop.execute("CREATE TABLE refunds (id TEXT)")
            shop.commit()
        return tmp_path / "shop.db"

    def refunds(self, file: Path) -> list[str]:
        with closing(sqlite3.connect(file)) as shop:
            return [id for (id,) in shop.execute("SELECT id FROM refunds")]

    def ask(self, file: Path, refused: int, times: int = 1) -> tuple[list[Event], list[Any]]:
        """Return the middleware's answer, and the event of each run; the database refuses *refused* of them."""
        runs: list[Any] = []

        def function(event: Event, context: Any) -> Event:
            runs.append(event.pop("body"))
            current_operation().connection.execute("INSERT INTO refunds VALUES (?)", (f"run {len(runs)}",))
            if len(runs) <= refused:
                raise Refused
            return {"statusCode": 201, "body": f"run {len(runs)}"}

        with closing(Guard(f"sqlite:///{file}")) as guard:
            door = IdempotencyMiddleware(function, guard=guard, contract=Contract(self.RULE))
            return [door(http_api(body="{}", idempotency_key="k"), CONTEXT) for _ in range(times)], runs

    def test_refused_transaction_is_503_and_the_retry_runs(self, file: Path) -> None:
        (refused, stored, replayed), runs = self.ask(file, refused=1, times=3)
        assert (refused["statusCode"], refused["headers"]["retry-after"]) == (503, "1")
        assert (stored["statusCode"], stored["body"], replayed["body"]) == (201, "run 2", "run 2")
        assert len(runs) == 2
        assert self.refunds(file) == ["run 2"]


class TestMistakes:
    def test_an_async_function_is_refused_before_it_is_called(self, guard: Guard) -> None:
        async def function(event: Event, context: Any) -> Event:
            return {"statusCode": 201}

        with pytest.raises(ConfigurationError, match=r"asyncio\.run"):
            IdempotencyMiddleware(function, guard=guard)

    def test_answer_that_is_no_json_counts_as_502(self, guard: Guard) -> None:
        """The effect has happened, so a rule that keeps everything keeps this answer, too."""
        function = Function({"amount": object()})
        door = IdempotencyMiddleware(function, guard=guard, contract=Contract(Rule("POST /refunds", keep="all")))
        first, second = (door(http_api(idempotency_key="k"), CONTEXT) for _ in range(2))
        assert (first, second["statusCode"], len(function.events)) == (function.answer, 502, 1)
