"""Rules: their settings, the policies made from them, and errors that name the fix."""

from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oncemore._contract.keys import MAX_LENGTH
from oncemore._contract.rule import Rule, idempotent, rule_of
from oncemore._contract.settings import SETTINGS, FingerprintSettings, Rate, StatusHeader
from oncemore._contract.templates import Template
from oncemore.errors import ConfigurationError, InvalidKey, InvalidPrincipal, MissingKey

V4 = "8e03978e-40d5-43e8-bc93-6894a57f9324"
OWNERS = st.text(min_size=1, max_size=12)


def did_it_happen(operation: object) -> None:
    """A resolver for the tests."""


class Judge:
    """A function in the form of an object."""

    def __call__(self, outcome: object) -> bool:
        return True


# ── The key ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("short", "table", "shown"),
    [
        ("required", {"from": "header", "required": True}, "header Idempotency-Key"),
        ("optional", {"required": False}, "optional header Idempotency-Key"),
        ("body:/clientMessageId", {"at": "/clientMessageId"}, "body /clientMessageId"),
        (
            "template:{principal}:{window:1h}",
            {"template": "{principal}:{window:1h}"},
            "template {principal}:{window:1h}",
        ),
        ("none", {"from": "none"}, "none"),
    ],
)
def test_short_and_long_forms_of_a_key_mean_the_same(short, table, shown):
    assert Rule("POST /x", key=short).key == Rule("POST /x", key=table).key
    assert str(Rule("POST /x", key=short).key) == shown


def test_optional_key_may_be_missing_and_required_one_not():
    assert Rule().key.read([]) is None
    with pytest.raises(MissingKey, match="Idempotency-Key"):
        Rule(key="required").key.read([])


@pytest.mark.parametrize("key", ["optional", "required"])
def test_empty_key_is_not_a_missing_one(key):
    with pytest.raises(InvalidKey):
        Rule(key=key).key.read([""])


def test_custom_header_replaces_the_default_one():
    key = Rule(key={"name": "X-Request-Id", "required": True}).key
    assert key.name == "X-Request-Id"
    with pytest.raises(MissingKey, match="X-Request-Id"):
        key.read([])


@pytest.mark.parametrize(
    ("document", "expected"),
    [({"id": "m1"}, "m1"), ({"id": 42}, "42"), ({"id": None}, None), ({}, None), ([], None), (None, None)],
)
def test_key_from_the_body_may_be_optional(document, expected):
    assert Rule(key={"at": "/id", "required": False}).key.read(body=document) == expected


def test_key_from_the_body_is_required_unless_said_otherwise():
    with pytest.raises(MissingKey, match="/clientMessageId"):
        Rule(key="body:/clientMessageId").key.read(body={})


@pytest.mark.parametrize("value", ["", True, {}, ["m1"], "a\x00b", "k" * 256])
def test_bad_key_in_the_body_is_refused(value):
    with pytest.raises(InvalidKey):
        Rule(key="body:/id").key.read(body={"id": value})


def test_key_from_the_body_has_a_format():
    key = Rule(key={"from": "body", "at": "/id", "format": "uuid4"}).key
    assert key.read(body={"id": V4.upper()}) == V4
    assert str(key) == "body /id (uuid4)"
    with pytest.raises(InvalidKey, match="version 4"):
        key.read(body={"id": "m1"})


def test_key_from_a_template_is_made_from_the_request():
    key = Rule("POST /x/{id}", key="template:{principal}:{path.id}").key
    assert key.read(["ignored"], principal="alice", path={"id": "7"}) == "alice:7"


def test_key_is_not_read_if_the_rule_wants_none():
    assert Rule(key="none").key.read(["8e03"], body={"id": 1}) is None


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("requierd", "did you mean 'required'"),
        ("body", "write required"),
        ("header:X", "write required"),
        (7, "is not a key"),
        ({"from": "heder"}, "did you mean 'header'"),
        ({"from": "header", "at": "/x"}, "'at' has no meaning for a key from header"),
        ({"from": "body"}, "begin it with '/'"),
        ({"at": "x"}, "begin it with '/'"),
        ({"at": "/x", "strict": True}, "'strict' has no meaning"),
        ({"from": "template"}, "must not be empty"),
        ({"template": "{path.x}"}, "parameters are {path.id}"),
        ({"template": "{principal}", "required": False}, "'required' has no meaning"),
        ({"template": "{principal}", "max_length": 20}, "65 or more"),
        ({"from": "none", "required": True}, "'required' has no meaning"),
        ({"fromat": "uuid"}, "did you mean 'format'"),
        ({"name": "a b"}, "not a header's name"),
        ({"required": "yes"}, "not true or false"),
        ({"format": "regex:["}, "regular expression"),
        ({"max_length": 0}, "from 1 to"),
        ({"max_length": True}, "from 1 to"),
        ({"max_length": 5000, "name": ""}, "header's name.*from 1 to"),
    ],
)
def test_key_that_cannot_be_meant_is_refused(key, hint):
    with pytest.raises(ConfigurationError, match=hint):
        Rule("POST /x/{id}", key=key)


# ── The other settings ────────────────────────────────────────────────────────────────────────────────────────────────


def test_rule_holds_given_settings_and_defaults_for_the_rest():
    rule = Rule("post /refunds/", name="refunds.create", key="required", ttl="30d", effect="transaction", keep=Judge())
    assert (rule.match, rule.name) == ("POST /refunds", "refunds.create")
    assert (rule.policy.ttl, rule.policy.effect, rule.policy.in_flight) == (2592000.0, "transaction", "wait")
    assert rule.given["ttl"] == "30d"
    assert "wait" not in rule.given


def test_rule_is_named_after_its_pattern():
    assert Rule("post|patch /users/{id}").name == "POST|PATCH /users/{id}"


def test_rules_are_values():
    one, other = Rule("POST /x", ttl="1h", key="required"), Rule("POST /x/", ttl=3600, key={"required": True})
    assert one == other
    assert hash(one) == hash(other)
    assert one != Rule("POST /x", ttl="2h", key="required")
    with pytest.raises(AttributeError):
        one.name = "another"
    with pytest.raises(TypeError):
        one.given["ttl"] = "2h"


def test_repr_of_a_rule_shows_its_settings():
    assert repr(Rule("POST /x", ttl="1h")) == "Rule('POST /x', ttl='1h')"
    assert repr(Rule()) == "Rule('POST|PATCH *')"


@pytest.mark.parametrize(
    ("settings", "attribute", "value"),
    [
        ({"fingerprint": "raw"}, "fingerprint", FingerprintSettings("raw")),
        ({"fingerprint": {"exclude": ["timestamp"]}}, "fingerprint", FingerprintSettings(exclude=("timestamp",))),
        ({"fingerprint": {"include": ["/order/id"]}}, "fingerprint", FingerprintSettings(include=("/order/id",))),
        ({"rate": "100/1m"}, "rate", Rate(100, 60.0)),
        ({"unique_by": "{body.orderId}"}, "unique_by", Template("{body.orderId}")),
        ({"status_header": ""}, "status_header", StatusHeader()),
        ({"status_header": "X-Replay"}, "status_header", StatusHeader("X-Replay", "stored", "replayed", "unstored")),
        ({"status_header": {"name": "R", "replayed": "yes"}}, "status_header", StatusHeader("R", replayed="yes")),
        ({"max_request": 5}, "max_request", 5),
        ({"max_request": "2KiB"}, "max_request", 2048),
        ({"max_response": "3 MB"}, "max_response", 3_000_000),
        ({"retry_after": "3s"}, "retry_after", 3.0),
        ({"replay_status": 200}, "replay_status", 200),
        ({"first_sent": "X-First"}, "first_sent", "X-First"),
        ({"retry": "background_job"}, "retry", "background_job"),
        ({"if_match": True}, "if_match", True),
        ({"scope": did_it_happen}, "scope", did_it_happen),
        ({"scope": "json:dumps"}, "scope", json.dumps),
        ({"scope": "json:JSONDecoder.decode"}, "scope", json.JSONDecoder.decode),
    ],
)
def test_settings_are_parsed(settings, attribute, value):
    assert getattr(Rule(**settings), attribute) == value


def test_suspicion_is_a_word_or_a_table():
    assert Rule(suspect="flag").policy.suspect == "flag"
    policy = Rule(suspect={"action": "reject", "window": "2m"}).policy
    assert (policy.suspect, policy.suspect_window) == ("reject", 120.0)
    assert Rule(suspect={"window": "2m"}).policy.suspect == "log"


def test_functions_may_be_given_by_their_place():
    policy = Rule(on_unknown="resolve", resolver="json:loads", keep="json:dumps").policy
    assert (policy.resolver, policy.keep) == (json.loads, json.dumps)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"tll": "1h"}, "tll: there is no such setting .did you mean 'ttl'"),
        ({"zzz": 1}, "zzz: there is no such setting$"),
        ({"ttl": "1 fortnight"}, "ttl: .* is not a duration"),
        ({"ttl": 0}, "ttl: 0 is not longer than 0 s"),
        ({"ttl": "999999w"}, "longer than a century"),
        ({"ttl": "9" * 400 + "d"}, "is not a duration"),
        ({"lease": "0s"}, "lease: '0s' is not longer than 0 s"),
        ({"wait": -1}, "wait: -1 is not a duration"),
        ({"in_flight": "conflcit"}, "did you mean 'conflict'"),
        ({"on_mismatch": "409"}, r"did you mean 409\?"),
        ({"on_mismatch": 409.0}, "409.0 is unknown"),
        ({"on_mismatch": [409]}, "is unknown"),
        ({"keep": "finale"}, "did you mean 'final'.*or a function"),
        ({"keep": 7}, "7 is not a function"),
        ({"keep": "not a place:x"}, "is not a function: write it as 'module:name'"),
        ({"resolver": "no_such_module:x"}, "cannot be imported: No module named 'no_such_module'"),
        ({"resolver": "json:no_such_name"}, "cannot be imported: .*no_such_name"),
        ({"resolver": "json:__name__"}, "not a function but 'str'"),
        ({"scope": "principle"}, "did you mean 'principal'"),
        ({"scope": None}, "None is not a function"),
        ({"name": ""}, "name: '' is not a line of text"),
        ({"name": "a\nb"}, "is not a line of text"),
        ({"idempotent": "no"}, "not true or false"),
        ({"if_match": 1}, "not true or false"),
        ({"fingerprint": "canonicl"}, "choose one of 'canonical', 'unordered', 'raw', 'none'"),
        ({"fingerprint": 7}, "7 is not a fingerprint"),
        ({"fingerprint": {"includes": ["a"]}}, "did you mean 'include'"),
        ({"fingerprint": {"include": "a"}}, "not a list of fields"),
        ({"fingerprint": {"mode": "raw", "exclude": ["a"]}}, "compares no fields"),
        ({"suspect": {"acton": "log"}}, "did you mean 'action'"),
        ({"suspect": {"window": 0}}, "not longer than 0 s"),
        ({"rate": "lots"}, "as in '100/1m'"),
        ({"rate": "0/1m"}, "as in '100/1m'"),
        ({"rate": 100}, "as in '100/1m'"),
        ({"rate": "5/0s"}, "not longer than 0 s"),
        ({"retry": "user-facing"}, "did you mean 'user_facing'"),
        ({"status_header": {"replayed": "yes"}}, "not a header's name"),
        ({"status_header": {"name": "R", "replayed": "a\r\nb"}}, "not a line of text"),
        ({"status_header": 7}, "not a status header"),
        ({"replay_status": 201}, "choose one of 'same', 200"),
        ({"max_request": "10 apples"}, "not a size"),
        ({"max_request": -1}, "not a size"),
        ({"max_request": True}, "not a size"),
        ({"first_sent": "a b"}, "not a header's name"),
        ({"unique_by": "{body.a}{body.b}"}, "unique_by: .*needs a ':'"),
        ({"unique_by": 5}, "unique_by: 5 is not a line of text"),
    ],
)
def test_setting_that_cannot_be_meant_is_refused(settings, hint):
    with pytest.raises(ConfigurationError, match=hint):
        Rule("POST /x", **settings)


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"key": "template:{window:2d}"}, "key: its time window is 172800 s, but ttl only 86400 s"),
        ({"key": "template:{date}", "ttl": "1h"}, "make ttl as long as the window"),
        ({"unique_by": "{window:1h}", "ttl": "5m"}, "unique_by: its time window"),
        ({"on_unknown": "resolve"}, "needs a resolver"),
        ({"resolver": did_it_happen}, "never called"),
        ({"in_flight": "conflict", "wait": "5s"}, "a duplicate does not wait"),
        (
            {"effect": "transaction", "streams": "release"},
            "streams: 'release' keeps no outcome, so a retry would repeat",
        ),
        ({"effect": "steps", "streams": "release"}, "finished steps would be undone in the end"),
        (
            {"effect": "transaction", "reruns": 1},
            "reruns: if the database refuses its transaction, a request is not run again",
        ),
        ({"on_refusal": "commit"}, "on_refusal: with effect = 'lease' there is no transaction"),
        ({"reruns": 1}, "reruns: if the database refuses its transaction, a request is not run again"),
        ({"effect": "steps", "if_match": True}, "the changes of its own steps"),
        ({"key": "none", "if_match": True}, "it would be ignored; give the rule a key"),
        ({"unique_by": "{body.orderId}", "if_match": True}, "unique_by would be ignored"),
        ({"on_unique": "reject"}, "needs unique_by"),
        ({"unique_by": "orderId"}, "unique_by: 'orderId' is the same for all requests, so only one of them would run"),
        ({"suspect": "log", "fingerprint": "none"}, "suspect: it compares fingerprints"),
        ({"across_routes": "conflict", "fingerprint": "none"}, "another route's outcome"),
        ({"scope": "global", "fingerprint": "none"}, "another route's outcome"),
        ({"idempotent": False, "key": "required", "ttl": "1h"}, "drop key, ttl"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, hint):
    with pytest.raises(ConfigurationError, match=hint):
        Rule("POST /x", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"key": "template:{window:1d}", "ttl": "1d"},
        {"idempotent": False, "name": "auth.refresh", "retry": "never"},
        {"on_unknown": "resolve", "resolver": did_it_happen},
        {"unique_by": "{body.orderId}", "on_unique": "reject"},
    ],
)
def test_settings_that_belong_together_are_accepted(settings):
    assert Rule("POST /x", **settings)


def test_one_error_lists_every_fault_of_a_rule():
    with pytest.raises(ConfigurationError) as failure:
        Rule("GET /x", ttl="soon", key="maybe", in_flight="later", colour="red")
    lines = failure.value.detail.splitlines()
    assert lines[0] == "Rule('GET /x'): 5 faults"
    assert len(lines) == 6
    assert {line.split()[1].rstrip(":") for line in lines[1:]} == {"colour", "ttl", "in_flight", "match", "key"}


def test_single_fault_is_one_line():
    with pytest.raises(ConfigurationError) as failure:
        Rule(ttl="soon")
    assert failure.value.detail.startswith("Rule(): ttl: 'soon' is not a duration")


# ── Scope ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("settings", "owners", "scope"),
    [
        ({}, {"principal": "alice"}, "POST /x:principal:alice"),
        ({}, {"principal": "alice", "tenant": "acme"}, "POST /x:principal:acme:alice"),
        ({}, {"principal": "alice", "route": "POST /y"}, "POST /y:principal:alice"),
        ({"scope": "tenant"}, {"principal": "alice", "tenant": "acme"}, "POST /x:tenant:acme"),
        ({"scope": "resource", "name": "pay"}, {"principal": "alice"}, "pay:resource:*"),
        ({"scope": "global"}, {"principal": "alice"}, "*:global:*"),
        ({"scope": did_it_happen}, {"custom": "shop-7"}, "POST /x:custom:shop-7"),
        ({"across_routes": "conflict"}, {"principal": "alice"}, "*:principal:alice"),
    ],
)
def test_key_belongs_to_its_owner_and_route(settings, owners, scope):
    assert Rule("POST /x", **settings).scope_of(**owners) == scope


@pytest.mark.parametrize("scope", ["principal", "tenant", did_it_happen])
def test_owner_without_a_name_is_refused(scope):
    with pytest.raises(InvalidPrincipal, match="is empty"):
        Rule(scope=scope).scope_of()


@given(st.tuples(OWNERS, OWNERS), st.tuples(OWNERS, OWNERS))
def test_two_owners_never_share_a_scope(one, other):
    scopes = [Rule("POST /x").scope_of(tenant=tenant, principal=principal) for tenant, principal in (one, other)]
    assert (scopes[0] == scopes[1]) == (one == other)


def test_scope_is_bounded_however_long_its_owner():
    assert len(Rule().scope_of(principal="Bearer " + "x" * 10_000)) == MAX_LENGTH


@pytest.mark.parametrize(
    ("scope", "unscoped"),
    [("principal", False), ("tenant", False), (did_it_happen, False), ("resource", True), ("global", True)],
)
def test_rule_tells_when_principals_share_keys(scope, unscoped):
    assert Rule(scope=scope).unscoped is unscoped


# ── Tables and marks ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_row_has_every_setting_in_plain_values():
    rule = Rule(
        "POST /x",
        key="required",
        rate="5/1s",
        unique_by="{body.id}",
        on_unknown="resolve",
        resolver=did_it_happen,
        keep=Judge(),
    )
    row = rule.row()
    assert list(row) == ["match", *SETTINGS]
    assert (row["key"], row["unique_by"], row["rate"]) == (
        "header Idempotency-Key",
        "{body.id}",
        {"count": 5, "window": 1.0},
    )
    assert row["resolver"].endswith("test_rule:did_it_happen")
    assert row["keep"].endswith("test_rule:Judge")
    json.dumps(row)


def test_mark_travels_with_the_function_and_changes_nothing_else():
    @idempotent(ttl="7d", key="template:{path.id}")
    def refund() -> str:
        return "refunded"

    @functools.wraps(refund)
    def wrapped() -> str:
        return refund()

    assert refund() == "refunded"
    assert rule_of(wrapped) is rule_of(refund)
    assert rule_of(refund).at("POST /refunds/{id}").policy.ttl == 604800.0
    assert rule_of(print) is None


def test_decorator_is_checked_when_made_and_when_bound():
    with pytest.raises(ConfigurationError, match="did you mean 'ttl'"):
        idempotent(tll="7d")
    with pytest.raises(ConfigurationError, match="parameters are none"):
        Rule(key="template:{path.id}").at("POST /refunds")


def test_mark_without_its_parentheses_is_told():
    with pytest.raises(ConfigurationError, match=r"write @idempotent\(\)"):
        idempotent(print)


def test_requests_of_all_kinds_may_take_turns():
    """With "serialize" operations only take turns, so one name for all of them is no mistake."""
    assert Rule("POST /x", unique_by="the till", on_unique="serialize").unique_by.text == "the till"
