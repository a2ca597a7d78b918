"""The contract in an OpenAPI document: the document stays valid and keeps its own parts, and all rules are shown."""

from __future__ import annotations

import copy
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV30SpecValidator, OpenAPIV31SpecValidator

from oncemore._contract.contract import Contract
from oncemore._contract.profiles import PROFILES
from oncemore._contract.rule import Rule
from oncemore.errors import ConfigurationError, OncemoreError
from oncemore.web.openapi import enrich, resolved
from oncemore.web.openapi.parts import REFUSALS, in_words

PLAIN: dict[str, Any] = {
    "openapi": "3.1.0",
    "info": {"title": "Payments", "version": "1"},
    "paths": {
        "/refunds": {
            "get": {"responses": {"200": {"description": "All of them"}}},
            "post": {"responses": {"201": {"description": "Made", "content": {"application/json": {"schema": {}}}}}},
        },
        "/matches/{id}/messages": {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "post": {"description": "Sends.", "responses": {"200": {"description": "Sent"}}},
        },
    },
}
CUSTOM = {"scope": len, "keep": bool, "on_unknown": "resolve", "resolver": len}
RULES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "required": {"key": "required", "ttl": "30d", "retry": "user_facing", "name": "refunds.create"},
    "formats": {"key": {"format": "uuid4", "max_length": 36, "name": "X-Request-Id"}},
    "regex": {"key": {"format": "regex:[a-z]+", "required": True}},
    "body": {"key": "body:/order/id", "retry": "background_job"},
    "template": {"key": "template:{principal}:{body.subjectId}:{window:1h}", "on_duplicate": "reject"},
    "unguarded": {"idempotent": False, "retry": "never"},
    "no key": {"key": "none"},
    "accepted": {"in_flight": "accepted"},
    "no-op": {"on_duplicate": "ok"},
    "two hundred": {"replay_status": 200},
    "defended": {"unique_by": "{body.order}", "suspect": "reject", "late": "refuse", "rate": "5/1m"},
    "conditional": {"if_match": True},
    "unfingerprinted": {"fingerprint": "none", "effect": "lease", "on_unknown": "retry"},
    "excluded": {"fingerprint": {"exclude": ["timestamp"]}, "status_header": ""},
    "open": {"store_down": "run"},
    "own functions": CUSTOM,
}


def enriched(rule: dict[str, Any], document: dict[str, Any] = PLAIN, **options: Any) -> dict[str, Any]:
    return enrich(document, Contract(Rule("POST /refunds", **rule), undeclared="pass"), **options)


def refund(document: dict[str, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = document["paths"]["/refunds"]["post"]
    return operation


def codes(document: dict[str, Any], operation: dict[str, Any]) -> dict[str, list[str]]:
    """The documented problems, by status."""
    found = {}
    for status, response in operation["responses"].items():
        content = (resolved(document, response) or {}).get("content", {}).get("application/problem+json")
        if content:
            found[status] = content["schema"]["allOf"][1]["properties"]["error_code"]["enum"]
    return found


def documenting(error: type[OncemoreError]) -> tuple[dict[str, Any], str]:
    """The document of a rule under which the problem may occur, and its status there."""
    for rule in RULES.values():
        document = enriched(rule, problem_base="https://errors.example/")
        for status, found in codes(document, refund(document)).items():
            if error.code in found:
                return document, status
    raise AssertionError(f"no rule documents {error.code}")


class TestEveryRule:
    @pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
    @pytest.mark.parametrize("version", ["3.1.0", "3.0.3"])
    def test_the_document_stays_valid(self, rule: dict[str, Any], version: str) -> None:
        validator = OpenAPIV31SpecValidator if version == "3.1.0" else OpenAPIV30SpecValidator
        validator(enriched(rule, {**PLAIN, "openapi": version}, status_path="/idempotency")).validate()

    @pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
    def test_enriching_twice_equals_once_and_copies_the_document(self, rule: dict[str, Any]) -> None:
        before = copy.deepcopy(PLAIN)
        once = enriched(rule, status_path="/idempotency")
        assert enriched(rule, once, status_path="/idempotency") == once
        assert before == PLAIN

    @pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
    def test_enriched_documents_share_no_objects(self, rule: dict[str, Any]) -> None:
        before = enriched(rule)
        spoil(enriched(rule))
        assert enriched(rule) == before

    @pytest.mark.parametrize("profile", PROFILES)
    def test_every_profile_is_documented(self, profile: str) -> None:
        document = enrich(PLAIN, Contract(profile=profile), status_path="/status")
        OpenAPIV31SpecValidator(document).validate()
        told, rule = refund(document)["x-idempotency"], Contract(profile=profile).default
        assert (told["ttl"], told["in_flight"]) == (rule.policy.ttl, rule.policy.in_flight)
        assert str(rule.policy.on_mismatch) in codes(document, refund(document))

    @settings(max_examples=25)
    @given(st.lists(st.sampled_from(sorted(RULES)), min_size=2, max_size=2))
    def test_rules_side_by_side_keep_apart(self, names: list[str]) -> None:
        paths = ("/refunds", "/matches/{id}/messages")
        told = [{**RULES[name], "name": path} for name, path in zip(names, paths, strict=True)]
        rules = [Rule(f"POST {path}", **one) for path, one in zip(paths, told, strict=True)]
        both = enrich(PLAIN, Contract(*rules, undeclared="pass"))
        for path, rule in zip(paths, rules, strict=True):
            alone = enrich(PLAIN, Contract(rule, undeclared="pass"))
            here, there = both["paths"][path]["post"], alone["paths"][path]["post"]
            assert codes(both, here) == codes(alone, there)
            assert here["x-idempotency"] == there["x-idempotency"]


def spoil(value: Any) -> None:
    """Empty every table and list in the document."""
    children = list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
    for child in children:
        spoil(child)
    if isinstance(value, dict | list):
        value.clear()


class TestKey:
    def test_header_parameter_says_required_and_retention(self) -> None:
        (parameter,) = refund(enriched(RULES["required"]))["parameters"]
        assert (parameter["name"], parameter["in"], parameter["required"]) == ("Idempotency-Key", "header", True)
        assert "30 days" in parameter["description"]
        assert parameter["schema"] == {"type": "string", "minLength": 1, "maxLength": 255}

    def test_an_own_header_with_a_format(self) -> None:
        (parameter,) = refund(enriched(RULES["formats"]))["parameters"]
        assert (parameter["name"], parameter["required"]) == ("X-Request-Id", False)
        check = Draft202012Validator(parameter["schema"]).is_valid
        assert check(str(uuid.uuid4()))
        assert check(str(uuid.uuid4()).upper())
        assert not check(str(uuid.uuid1()))

    @pytest.mark.parametrize(("key", "valid"), [("abc", True), ("abc1", False), ("", False)])
    def test_pattern_matches_the_whole_key(self, key: str, valid: bool) -> None:
        (parameter,) = refund(enriched(RULES["regex"]))["parameters"]
        assert Draft202012Validator(parameter["schema"]).is_valid(key) is valid

    def test_a_strict_key_is_shown_in_its_quotes(self) -> None:
        (parameter,) = refund(enrich(PLAIN, Contract(profile="ietf")))["parameters"]
        check = Draft202012Validator(parameter["schema"]).is_valid
        assert (check('"8e03"'), check("8e03")) == (True, False)

    def test_key_in_body_is_in_description_and_extension(self) -> None:
        rule = Rule("POST /matches/{id}/messages", key={"at": "/clientMessageId", "format": "uuid"})
        document = enrich(PLAIN, Contract(rule, undeclared="pass"))
        operation = document["paths"]["/matches/{id}/messages"]["post"]
        assert operation["description"].startswith("Sends.\n\n")
        assert "`/clientMessageId`" in operation["description"]
        expected = {"from": "body", "at": "/clientMessageId", "format": "uuid", "required": True, "max_length": 255}
        assert operation["x-idempotency"]["key"] == expected
        assert "parameters" not in operation

    def test_key_made_by_a_template_is_described(self) -> None:
        operation = refund(enriched(RULES["template"]))
        assert "{window:1h}" in operation["description"]
        assert operation["x-idempotency"]["key"]["template"] == "{principal}:{body.subjectId}:{window:1h}"

    def test_a_header_that_the_operation_declares_itself_is_completed(self) -> None:
        document = copy.deepcopy(PLAIN)
        document["components"] = {
            "parameters": {"Key": {"name": "idempotency-key", "in": "header", "description": "Ours", "schema": {}}}
        }
        refund(document)["parameters"] = [
            {"name": "page", "in": "query", "schema": {}},
            {"$ref": "#/components/parameters/Key"},
        ]
        page, key = refund(enriched(RULES["required"], document))["parameters"]
        assert page == {"name": "page", "in": "query", "schema": {}}
        assert (key["name"], key["description"], key["required"]) == ("idempotency-key", "Ours", True)
        assert key["schema"]["maxLength"] == 255

    def test_other_headers_of_a_rule_are_documented(self) -> None:
        azure = refund(enrich(PLAIN, Contract(profile="azure")))["parameters"]
        assert [each["name"] for each in azure] == ["Repeatability-Request-ID", "Repeatability-First-Sent"]
        conditional = refund(enriched(RULES["conditional"]))["parameters"]
        assert [(each["name"], each["required"]) for each in conditional] == [
            ("Idempotency-Key", True),
            ("If-Match", True),
        ]


class TestResponses:
    def test_own_responses_have_the_status_and_expiry_headers(self) -> None:
        made = refund(enriched({}))["responses"]["201"]
        assert made["headers"]["Idempotency-Status"]["schema"]["enum"] == ["stored", "replayed", "unstored"]
        assert "Idempotency-Expires" in made["headers"]
        assert made["content"] == {"application/json": {"schema": {}}}

    def test_a_header_that_is_not_sent_is_not_documented(self) -> None:
        assert list(refund(enriched(RULES["excluded"]))["responses"]["201"]["headers"]) == ["Idempotency-Expires"]

    @pytest.mark.parametrize("error", [error for error, _ in REFUSALS], ids=lambda error: error.code)
    def test_every_refusal_is_documented_under_some_rule_with_its_problem(self, error: type[OncemoreError]) -> None:
        document, status = documenting(error)
        response = resolved(document, refund(document)["responses"][status])
        assert response is not None
        content = response["content"]["application/problem+json"]
        example = content["examples"][error.code]["value"]
        assert (example["status"], example["type"]) == (int(status), f"https://errors.example/{error.code}")
        assert "Retry-After" in response.get("headers", {}) or not error.retryable
        Draft202012Validator({**content["schema"], "components": document["components"]}).validate(example)

    def test_each_rule_has_its_own_refusals(self) -> None:
        plain, defended = enriched({}), enriched(RULES["defended"])
        assert "412" not in codes(plain, refund(plain))
        assert "429" not in codes(plain, refund(plain))
        assert codes(defended, refund(defended))["412"] == ["PRECONDITION.idempotency.key_expired"]
        assert codes(defended, refund(defended))["429"] == ["RATE_LIMIT.exceeded"]
        opened = enriched(RULES["open"])
        assert codes(opened, refund(opened))["503"] == ["TRANSIENT.idempotency.record_corrupt"]

    def test_a_mismatch_has_the_status_of_the_rule(self) -> None:
        document = enriched({"on_mismatch": 422})
        assert codes(document, refund(document))["422"] == ["CONFLICT.idempotency.payload_mismatch"]

    def test_duplicate_of_a_running_operation_is_documented(self) -> None:
        document = enriched(RULES["accepted"])
        assert set(refund(document)["responses"]["202"]["headers"]) == {"Location", "Retry-After"}
        assert "CONFLICT.idempotency.in_progress" not in codes(document, refund(document))["409"]

    def test_replay_with_status_200_is_documented(self) -> None:
        assert refund(enriched(RULES["no-op"]))["responses"]["200"]["description"] == "It was performed before."
        assert "application/json" in refund(enriched(RULES["two hundred"]))["responses"]["200"]["content"]

    def test_own_response_of_the_same_status_is_kept(self) -> None:
        own = {"description": "Sold out", "content": {"application/problem+json": {"schema": {"type": "object"}}}}
        document = copy.deepcopy(PLAIN)
        refund(document)["responses"] |= {
            "409": {"$ref": "#/components/responses/SoldOut"},
            413: {"description": "Big"},
        }
        document["components"] = {"responses": {"SoldOut": own}}
        made = enriched({}, document)
        conflict = refund(made)["responses"]["409"]
        assert conflict["description"] == "Sold out"
        first, second = conflict["content"]["application/problem+json"]["schema"]["anyOf"]
        assert first == {"type": "object"}
        assert "CONFLICT.idempotency.payload_mismatch" in second["allOf"][1]["properties"]["error_code"]["enum"]
        assert refund(made)["responses"]["413"]["description"] == "Big"
        assert made["components"]["responses"]["SoldOut"] == own
        OpenAPIV31SpecValidator(made).validate()

    def test_an_example_of_its_own_stays_the_only_one(self) -> None:
        """OpenAPI allows `example` or `examples`, never both."""
        document = copy.deepcopy(PLAIN)
        own = {"schema": {"type": "object"}, "example": {"sold": "out"}}
        refund(document)["responses"]["409"] = {"description": "", "content": {"application/problem+json": own}}
        made = enriched({}, document)
        content = refund(made)["responses"]["409"]["content"]["application/problem+json"]
        assert ("examples" in content, content["example"]) == (False, {"sold": "out"})
        OpenAPIV31SpecValidator(made).validate()

    @pytest.mark.parametrize("target", ["other.yaml#/x", "#/components/responses/None", "#/components/responses/Loop"])
    def test_a_reference_that_leads_elsewhere_is_left_alone(self, target: str) -> None:
        document = copy.deepcopy(PLAIN)
        refund(document)["responses"]["409"] = {"$ref": target}
        document["components"] = {"responses": {"Loop": {"$ref": "#/components/responses/Loop"}}}
        assert refund(enriched({}, document))["responses"]["409"] == {"$ref": target}

    def test_operations_share_equal_responses(self) -> None:
        one, two = (enrich(PLAIN, Contract(Rule(f"POST {path}"), undeclared="pass")) for path in PLAIN["paths"])
        both = enrich(PLAIN, Contract(*(Rule(f"POST {path}") for path in PLAIN["paths"])))
        assert both["components"]["responses"] == one["components"]["responses"] == two["components"]["responses"]


class TestExtension:
    def test_extension_has_the_settings_for_programs(self) -> None:
        operation = refund(enriched(RULES["required"]))
        told = operation["x-idempotency"]
        assert (told["name"], told["ttl"], told["scope"]) == ("refunds.create", 2592000, "principal")
        assert (told["in_flight"], told["wait"], told["on_mismatch"]) == ("wait", 10, 409)
        assert operation["x-retry"] == {"preset": "user_facing"}

    def test_operation_that_is_not_idempotent_is_marked(self) -> None:
        document = enriched(RULES["unguarded"])
        assert refund(document)["x-idempotency"] == {"name": "POST /refunds", "idempotent": False}
        assert list(refund(document)["responses"]) == ["201"]
        assert "components" not in document

    def test_functions_are_shown_as_custom(self) -> None:
        told = refund(enriched(RULES["own functions"]))["x-idempotency"]
        assert (told["scope"], told["keep"]) == ("custom", "custom")
        assert "builtins" not in repr(told)

    @pytest.mark.parametrize(
        ("seconds", "words"), [(86400, "1 day"), (5400, "90 minutes"), (7200, "2 hours"), (0.5, "0.5 seconds")]
    )
    def test_durations_are_spelt(self, seconds: float, words: str) -> None:
        assert in_words(seconds) == words


class TestMatching:
    def test_reads_are_never_touched(self) -> None:
        assert enriched({})["paths"]["/refunds"]["get"] == PLAIN["paths"]["/refunds"]["get"]

    def test_undeclared_operation_follows_the_setting(self) -> None:
        path = "/matches/{id}/messages"
        rule = Rule("POST /refunds")
        keyed = enrich(PLAIN, Contract(rule))["paths"][path]["post"]
        assert keyed["parameters"][0]["required"] is False
        for undeclared in ("pass", "refuse"):
            document = enrich(PLAIN, Contract(rule, undeclared=undeclared))
            assert document["paths"][path] == PLAIN["paths"][path]

    def test_a_prefix_stands_before_the_documents_paths(self) -> None:
        contract = Contract(Rule("POST /v1/refunds", key="required"), undeclared="pass")
        assert enrich(PLAIN, contract) == PLAIN
        assert refund(enrich(PLAIN, contract, prefix="/v1"))["parameters"][0]["required"]

    def test_status_lookup_is_documented_with_a_status_path(self) -> None:
        document = enriched({}, status_path="/idempotency")
        assert set(document["paths"]["/idempotency"]["get"]["responses"]) == {"200", "400", "401", "404", "503", "504"}
        assert "/idempotency" not in enriched(RULES["unguarded"], status_path="/idempotency")["paths"]

    @pytest.mark.parametrize("document", [{}, {"swagger": "2.0", "paths": {}}, {"openapi": "2.0"}])
    def test_other_version_than_openapi_3_is_refused(self, document: dict[str, Any]) -> None:
        with pytest.raises(ConfigurationError, match="OpenAPI 3"):
            enrich(document, Contract())
