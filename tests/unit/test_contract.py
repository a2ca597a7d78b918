"""The contract: from TOML, Python and decorators; layered, matched, and checked as a whole."""

from __future__ import annotations

import threading

import pytest

from oncemore._contract.contract import Contract
from oncemore._contract.rule import Rule, idempotent, rule_of
from oncemore.errors import ConfigurationError

WRITTEN = """
[defaults]
ttl = "48h"
in_flight = "wait"

[[rule]]
match = "POST /refunds"
name = "refunds.create"
reverses = "payments.create"
key = { from = "header", required = true }
ttl = "30d"
effect = "transaction"

[[rule]]
match = "POST /payments"
name = "payments.create"

[[rule]]
match = "POST /matches/{id}/messages"
key = { from = "body", at = "/clientMessageId", format = "uuid" }

[[rule]]
match = "POST /safety/report"
key = { from = "template", template = "{principal}:{body.subjectId}:{body.category}:{window:1h}" }
on_duplicate = "reject"

[[rule]]
match = "POST /auth/refresh"
idempotent = false
"""

FAULTY = """
[defaults]
ttl = "24x"
profle = "ietf"
name = "x"
undeclared = "wrn"

[rules]
x = 1

[[rule]]
match = "POST /refunds"
name = "refunds.create"
tll = "3d"
key = "requird"

[[rule]]
match = "POST /a/{id}"
key = "template:{path.ix}"

[[rule]]
ttl = "1h"

[[rule]]
match = "POST /b/{id}"

[[rule]]
match = "POST /b/{other}"
reverses = "refunds.create"

[[rule]]
match = "POST /c"
name = "c"
reverses = "refund.create"
"""


def faults_of(written: str) -> list[str]:
    with pytest.raises(ConfigurationError) as failure:
        Contract.parse(written, "oncemore.toml")
    return failure.value.detail.splitlines()


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_contract_is_loaded_from_a_file(tmp_path):
    path = tmp_path / "oncemore.toml"
    path.write_text(WRITTEN, encoding="utf-8")
    contract = Contract.load(path)
    assert [rule.name for rule in contract.rules][:2] == ["refunds.create", "payments.create"]
    assert contract.rule("refunds.create").policy.effect == "transaction"
    assert contract.match("POST", "/auth/refresh").rule.idempotent is False


def test_toml_and_python_say_the_same():
    in_python = Contract(
        Rule(
            "POST /refunds",
            name="refunds.create",
            reverses="payments.create",
            key="required",
            ttl="30d",
            effect="transaction",
        ),
        Rule("POST /payments", name="payments.create"),
        Rule("POST /matches/{id}/messages", key={"at": "/clientMessageId", "format": "uuid"}),
        Rule(
            "POST /safety/report",
            key="template:{principal}:{body.subjectId}:{body.category}:{window:1h}",
            on_duplicate="reject",
        ),
        Rule("POST /auth/refresh", idempotent=False),
        ttl="48h",
        in_flight="wait",
    )
    in_toml = Contract.parse(WRITTEN)
    assert in_python.rules == in_toml.rules
    assert in_python.default == in_toml.default
    assert in_python.table() == in_toml.table()


@pytest.mark.parametrize(
    ("written", "ttl", "strict", "required"),
    [
        ("", 86400, False, False),
        ("[defaults]\nprofile = 'ietf'", 86400, True, False),
        ("[defaults]\nprofile = 'ietf'\nttl = '2h'", 7200, True, False),
        ("[defaults]\nprofile = 'ietf'\nkey = 'required'", 86400, True, True),
    ],
)
def test_rule_beats_the_defaults_which_beat_the_profile(written, ttl, strict, required):
    """Each rule keeps its own settings."""
    contract = Contract.parse(written + "\n[[rule]]\nmatch = 'POST /a'\nttl = '1m'\n[[rule]]\nmatch = 'POST /b'\n")
    own, other = contract.rules
    assert own.policy.ttl == 60
    assert other.policy.ttl == contract.default.policy.ttl == ttl
    assert own.key == other.key == contract.default.key
    assert (own.key.strict, own.key.required) == (strict, required)


def test_key_from_another_source_does_not_inherit_header_settings():
    contract = Contract(Rule("POST /m", key="body:/id"), Rule("POST /n", key="optional"), profile="matchmaking")
    messages, others = contract.rules
    assert (messages.key.format, messages.key.required) == ("any", True)
    assert (others.key.format, others.key.required) == ("uuid4", False)


def test_one_error_lists_every_fault_with_its_place_and_fix():
    lines = faults_of(FAULTY)
    assert lines[0] == f"oncemore.toml: {len(lines) - 1} faults"
    expected = [
        "- [rules] means nothing here (did you mean 'rule'?)",
        "- [defaults] undeclared: 'wrn' is unknown (did you mean 'warn'?)",
        "- [defaults] name: it belongs to one rule",
        "- [defaults] profle: there is no such setting (did you mean 'profile'?)",
        "- [defaults] ttl: '24x' is not a duration",
        "- rule 1 'refunds.create' (line 11): tll: there is no such setting (did you mean 'ttl'?)",
        "- rule 1 'refunds.create' (line 11): key: 'requird' is unknown (did you mean 'required'?)",
        "- rule 2 'POST /a/{id}' (line 17): key: {path.ix} is not in the rule's path",
        "- rule 3 (line 21): match is missing",
        "- rules 'POST /b/{id}' (rule 4 ",
        "- rule 'c': reverses 'refund.create', which is no other rule (did you mean 'refunds.create'?)",
    ]
    for text in expected:
        assert any(line.strip().startswith(text) for line in lines), (text, lines)
    assert len(lines) == len(expected) + 1


def test_line_numbers_are_left_out_if_uncertain():
    lines = faults_of("rule = [{ match = 'POST /x', ttl = 'soon' }]")
    assert lines[0].startswith("oncemore.toml: rule 1 'POST /x': ttl: 'soon'")


@pytest.mark.parametrize(
    ("written", "hint"),
    [
        ("rule = 5", r"begin each rule with \[\[rule\]\]"),
        ("rule = [5]", r"begin each rule with \[\[rule\]\]"),
        ("[rule]\nmatch = 'POST /x'", r"begin each rule with \[\[rule\]\]"),
        ("defaults = 5", r"begin it with \[defaults\]"),
        ("[defaults]\nprofile = 'strpe'", "did you mean 'stripe'"),
        ("[defaults]\nprofile = 7", "profile: 7 is unknown"),
        ("[defaults]\nmatch = 'GET *'", r"\[defaults\] match 'GET \*' names GET"),
        ("[defaults]\nkey = 'requierd'", "did you mean 'required'"),
        ("[defaults]\nidempotent = false", "move it there"),
        ("[defaults]\non_unknown = 'resolve'", "needs a resolver"),
        ("[[rule]]\nmatch = 5", "match 5 is not a text"),
        ("[[rule]", "is not TOML"),
    ],
)
def test_file_that_cannot_be_meant_is_refused(written, hint):
    with pytest.raises(ConfigurationError, match=hint):
        Contract.parse(written)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_file_that_cannot_be_read_is_named(tmp_path, content):
    path = tmp_path / "oncemore.toml"
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"oncemore\.toml cannot be read"):
        Contract.load(str(path))


def test_file_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "oncemore.toml"
    path.write_bytes(b'\xef\xbb\xbf[[rule]]\nmatch = "POST /a"\n')
    assert [rule.match for rule in Contract.load(path).rules] == ["POST /a"]


@pytest.mark.parametrize("given", ["POST /a", "oncemore.toml", [Rule("POST /a")]])
def test_what_is_no_rule_is_refused(given):
    with pytest.raises(
        ConfigurationError, match=r"is not a rule: write Contract\(Rule\('POST /refunds'\), .*Contract\.load\(path\)"
    ):
        Contract(given)


def test_two_rules_of_one_name_are_refused():
    with pytest.raises(
        ConfigurationError, match=r"'POST /a' \(rule 1 'x'\) and 'POST /b' \(rule 2 'x'\) are both named 'x'"
    ):
        Contract(Rule("POST /a", name="x"), Rule("POST /b", name="x"))


def test_rule_cannot_reverse_itself():
    with pytest.raises(ConfigurationError, match="which is no other rule"):
        Contract(Rule("POST /a", name="x", reverses="x"))


def test_default_template_is_checked_against_path_of_each_rule():
    """Not against the defaults, which have no path."""
    key = "template:{principal}:{path.id}"
    assert Contract(Rule("POST /a/{id}"), key=key).rules[0].key.template
    with pytest.raises(ConfigurationError, match=r"rule 1 'POST /a': key: \{path\.id\}"):
        Contract(Rule("POST /a"), key=key)


def test_what_was_fine_alone_may_contradict_the_defaults():
    with pytest.raises(ConfigurationError, match="its time window"):
        Contract(Rule("POST /a", key="template:{window:1h}"), ttl="5m")


# ── Matching ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "TRACE", "get"])
@pytest.mark.parametrize("undeclared", ["guard if keyed", "warn", "refuse", "pass"])
def test_safe_methods_are_never_guarded(method, undeclared):
    assert Contract(Rule("* /a"), undeclared=undeclared).match(method, "/a") is None


def test_request_gets_its_rule_and_parameters():
    found = Contract.parse(WRITTEN).match("post", "/matches/m-1/messages/")
    assert found.params == {"id": "m-1"}
    assert found.declared
    assert found.rule.name == "POST /matches/{id}/messages"
    assert found.route == "POST /matches/m-1/messages"


@pytest.mark.parametrize(
    ("undeclared", "method", "guarded"),
    [
        ("guard if keyed", "POST", True),
        ("guard if keyed", "DELETE", False),
        ("warn", "POST", True),
        ("warn", "DELETE", False),
        ("refuse", "POST", True),
        ("refuse", "DELETE", True),
        ("pass", "POST", False),
    ],
)
def test_setting_decides_whether_undeclared_requests_are_guarded(undeclared, method, guarded):
    contract = Contract(Rule("POST /a"), undeclared=undeclared)
    found = contract.match(method, "/other/")
    assert (found is not None) is guarded
    if found:
        assert not found.declared
        assert found.rule is contract.default
        assert found.route == f"{method} /other"


def test_undeclared_requests_on_different_routes_are_different_operations():
    contract = Contract()
    found = [contract.match("POST", path) for path in ("/t/1", "/t/2")]
    scopes = {match.rule.scope_of(principal="alice", route=match.route) for match in found}
    assert len(scopes) == 2


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, False),
        ({"fingerprint": "none"}, False),
        ({"key": "body:/id"}, False),
        ({"key": "template:{principal}"}, True),
    ],
)
def test_key_never_gets_the_outcome_of_another_path(settings, shared):
    """Another method or path is another operation, unless a template says that they are one."""
    contract = Contract(Rule("POST|PUT /t/{id}", **settings))
    requests = [("POST", "/t/1"), ("POST", "/t/2"), ("PUT", "/t/1")]
    routes = {contract.match(method, path).route for method, path in requests}
    assert len(routes) == (1 if shared else 3)


def test_defaults_may_say_which_undeclared_requests_are_guarded():
    contract = Contract(match="POST|PUT /api/{rest:path}")
    assert contract.match("PUT", "/api/x")
    assert contract.match("POST", "/admin") is None


def test_rule_name_that_is_unknown_is_refused_with_nearest():
    contract = Contract(Rule("POST /refunds", name="refunds.create"))
    assert contract.rule("refunds.create").match == "POST /refunds"
    with pytest.raises(ConfigurationError, match=r"did you mean 'refunds\.create'"):
        contract.rule("refund.create")


def test_contract_tells_which_rules_have_no_scope():
    assert Contract(Rule("POST /a")).unscoped == ()
    assert Contract(Rule("POST /a", scope="global"), Rule("POST /b")).unscoped == ("POST /a",)
    assert Contract(scope="global").unscoped == ("POST|PATCH *",)


# ── Adding ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_added_rule_has_the_defaults_of_the_contract():
    contract = Contract(ttl="48h")
    contract.add(Rule("POST /refunds", key="required"))
    added = contract.match("POST", "/refunds").rule
    assert (added.key.required, added.policy.ttl) == (True, 172800.0)


def test_same_rule_twice_is_added_once():
    contract = Contract(Rule("POST /a", ttl="1h"))
    contract.add(Rule("POST /a", ttl="1h"))
    assert len(contract.rules) == 1
    with pytest.raises(ConfigurationError, match="match the same requests"):
        contract.add(Rule("POST /a", ttl="2h"))


def test_rules_are_added_all_or_none():
    contract = Contract(Rule("POST /a"))
    with pytest.raises(ConfigurationError, match="match the same requests"):
        contract.add(Rule("POST /b"), Rule("POST /a", ttl="1h"))
    assert contract.match("POST", "/b").declared is False


def test_rule_may_reverse_a_rule_added_later():
    contract = Contract()
    contract.add(Rule("POST /refunds", name="refunds", reverses="payments"))
    with pytest.raises(ConfigurationError, match="reverses 'payments'"):
        contract.check()
    contract.add(Rule("POST /payments", name="payments"))
    contract.check()


def test_readers_see_whole_tables_while_rules_are_added():
    """Each match sees the rules of one moment: all earlier rules, and no rule that is half added."""
    contract = Contract(Rule("POST /0/{x}"))
    done, wrong = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            seen = len(contract.rules)
            if not all(contract.match("POST", f"/{number}/x").declared for number in range(seen)):
                wrong.append(seen)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 60):
        contract.add(Rule(f"POST /{number}/{{x}}"))
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert len(contract.rules) == 60


def test_writers_do_not_lose_each_other_s_rules():
    contract = Contract()
    writers = [
        threading.Thread(target=lambda n=n: [contract.add(Rule(f"POST /{n}/{m}")) for m in range(10)]) for n in range(6)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(contract.rules) == 60


def test_path_without_leading_slash_matches_its_rule() -> None:
    contract = Contract(Rule("POST /payments", key="required"))
    found = contract.match("POST", "payments")
    assert found is not None
    assert found.rule.name == contract.match("POST", "/payments").rule.name  # type: ignore[union-attr]


def test_decorator_and_file_for_one_route_names_both_places() -> None:
    """In a contract file and on a function: the error says where each is."""

    @idempotent("POST /pay", key="required")
    def pay() -> None: ...

    contract = Contract.parse('[[rule]]\nmatch = "POST /pay"\nttl = "1h"\n', "oncemore.toml")
    with pytest.raises(ConfigurationError) as caught:
        contract.add(rule_of(pay))
    assert "rule 1 'POST /pay' (line 1)" in caught.value.detail
    assert "@idempotent on tests.unit.test_contract.test_decorator_and_file" in caught.value.detail
