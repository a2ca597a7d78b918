"""Matching: the most specific pattern wins, whatever the order in which patterns were added."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from oncemore._contract.paths import Matcher, Pattern
from oncemore.errors import ConfigurationError


def matcher_of(*texts: str) -> Matcher[str]:
    matcher: Matcher[str] = Matcher()
    for text in texts:
        assert matcher.add(Pattern(text), text) is None
    return matcher


@pytest.mark.parametrize(
    ("text", "canonical", "params"),
    [
        ("POST /refunds", "POST /refunds", ()),
        ("post /refunds/", "POST /refunds", ()),
        ("  POST   /refunds  ", "POST /refunds", ()),
        ("POST|PATCH /users/{id}", "POST|PATCH /users/{id}", ("id",)),
        ("POST | PATCH|POST /users/{id:int}", "POST|PATCH /users/{id:int}", ("id",)),
        ("* /files/{rest:path}", "* /files/{rest:path}", ("rest",)),
        ("/refunds", "* /refunds", ()),
        ("POST /v1/payments/{id}:cancel", "POST /v1/payments/{id}:cancel", ("id",)),
        ("POST /", "POST /", ()),
        ("POST *", "POST *", ("rest",)),
        ("*", "* *", ("rest",)),
        ("VERSION-CONTROL /x", "VERSION-CONTROL /x", ()),
    ],
)
def test_match_is_read_and_has_one_spelling(text, canonical, params):
    assert Pattern(text).text == canonical
    assert Pattern(text).params == params
    assert Pattern(Pattern(text).text) == Pattern(text)


REGISTERED = ["PROPPATCH", "MKCOL", "PURGE", "UPDATE", "LOCK", "VERSION-CONTROL"]


@pytest.mark.parametrize("method", REGISTERED)
def test_method_of_ones_own_is_accepted(method):
    assert Pattern(f"{method} /x").methods == (method,)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("POST", "has no path"),
        ("", "has no path"),
        ("POST refunds", "has no path"),
        (None, "not a text"),
        ("GET /x", "never guarded"),
        ("POST|HEAD /x", "never guarded"),
        ("P(ST /x", "names no method"),
        ("PSOT /x", "names the method PSOT, which HTTP does not have .did you mean 'POST'"),
        ("PUT|DELET /x", "did you mean 'DELETE'"),
        ("FETCH /x", "names the method FETCH, which HTTP does not have"),
        ("BATCH /x", r"write \* for any method"),
        ("POST /x/<id>", "path segment '<id>' is not understood: write text, {name}"),
        ("POST /x/{id}>", "path segment"),
        ("POST| /x", "names no method"),
        ("POST /a?b=1", "without a query"),
        ("POST /a%20b", "decoded"),
        ("POST /a//b", "path segment ''"),
        ("POST /{}", "not understood"),
        ("POST /{a}{b}", "not understood"),
        ("POST /{a", "not understood"),
        ("POST /a}", "not understood"),
        ("POST /{1a}", "not understood"),
        ("POST /a/*", r"write \{name\}, or \{name:path\}"),
        ("POST /a/**/b", "is not a wildcard"),
        ("POST /x{rest:path}", "stands alone"),
        ("POST /{rest:path}/x", "put it last"),
        ("POST /{id}/x/{id}", "twice"),
    ],
)
def test_match_that_cannot_be_meant_is_refused(text, hint):
    with pytest.raises(ConfigurationError, match=hint):
        Pattern(text)


@pytest.mark.parametrize(
    ("path", "expected", "params"),
    [
        ("/a/b", "POST /a/b", {}),
        ("/a/b/", "POST /a/b", {}),
        ("/a/b//", "POST /a/b", {}),
        ("/a/c", "POST /a/{x}", {"x": "c"}),
        ("/a/c.json", "POST /a/{name}.json", {"name": "c"}),
        ("/a/.json", "POST /a/{x}", {"x": ".json"}),
        ("/a/long-c.json", "POST /a/long-{name}.json", {"name": "c"}),
        ("/a/b/d", "POST /a/{x}/d", {"x": "b"}),
        ("/a", "POST /a/{rest:path}", {"rest": ""}),
        ("/a/b/c/d", "POST /a/{rest:path}", {"rest": "b/c/d"}),
        ("/a//d", "POST /a/{rest:path}", {"rest": "/d"}),
        ("/", "POST /", {}),
        ("", "POST /", {}),
        ("/A/b", None, {}),
        ("/b", None, {}),
        ("//a/b", None, {}),
    ],
)
def test_most_specific_path_wins(path, expected, params):
    mixed = ("POST /a/{name}.json", "POST /a/long-{name}.json")
    matcher = matcher_of("POST /a/{rest:path}", "POST /a/{x}", "POST /a/{x}/d", *mixed, "POST /a/b", "POST /")
    found = matcher.find("POST", path)
    assert (found.value if found else None) == expected
    assert (found.params if found else {}) == params


def test_patterns_are_ordered_by_how_specific_they_are():
    texts = [
        "POST /a",
        "POST /a/b",
        "POST /a/x-{p}",
        "POST /a/{p}-",
        "POST /a/{p}",
        "POST /a/{p}/b",
        "POST /a/{r:path}",
        "POST *",
    ]
    assert all(Pattern(one).rank < Pattern(other).rank for one, other in pairwise(texts))


def test_path_for_other_method_does_not_hide_less_specific_one():
    matcher = matcher_of("POST /a/b", "PATCH /a/{x}")
    assert matcher.find("PATCH", "/a/b").value == "PATCH /a/{x}"
    assert matcher.find("DELETE", "/a/b") is None


def test_named_method_beats_any_method_on_the_same_path():
    matcher = matcher_of("* /a", "POST /a", "* /b", "POST /{x}")
    assert matcher.find("POST", "/a").value == "POST /a"
    assert matcher.find("PUT", "/a").value == "* /a"
    assert matcher.find("POST", "/b").value == "* /b", "the path counts first"


def test_methods_of_one_path_may_name_its_parameter_differently():
    matcher = matcher_of("POST /a/{x}", "PATCH /a/{y}")
    assert matcher.find("POST", "/a/1").params == {"x": "1"}
    assert matcher.find("PATCH", "/a/1").params == {"y": "1"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("POST /a", "POST /a/"),
        ("POST /a/{x}", "POST /a/{y}"),
        ("POST|PUT /a", "PUT|PATCH /a"),
        ("POST /{x}-z", "POST /{y}-z"),
        ("POST /{a:path}", "POST *"),
    ],
)
def test_two_patterns_for_the_same_requests_are_found_out(one, other):
    matcher = matcher_of(one)
    assert matcher.add(Pattern(other), "other") == one
    assert matcher.find("PATCH", "/a") is None or "PATCH" in Pattern(one).methods, "a refused pattern adds nothing"


def test_path_with_very_many_segments_is_answered():
    """Neither deep recursion nor more work than the contract is large."""
    matcher = matcher_of("POST /{a}/{b}/{c}", "POST /a/{rest:path}")
    assert matcher.find("POST", "/a" * 100_000).params["rest"].count("/") == 99_998


# ── Against a model ───────────────────────────────────────────────────────────────────────────────────────────────────

SEGMENTS = st.sampled_from(["a", "b", "{p}", "a{p}", "{p}b", "a{p}b"])
PATHS = st.builds(
    lambda segments, rest: "/" + "/".join([*segments, *rest]),
    st.lists(SEGMENTS, max_size=3),
    st.sampled_from([[], ["{r:path}"]]),
)
METHODS = st.sampled_from(["POST", "PATCH", "POST|PATCH", "*"])
TEXTS = st.sampled_from(["a", "b", "ab", "aab", "c", ""])


def pattern_of(methods: str, path: str) -> Pattern:
    """Each parameter with a name of its own."""
    numbers = iter(range(9))
    return Pattern(f"{methods} " + re.sub(r"\{p\}", lambda _: f"{{p{next(numbers)}}}", path))


def brute_force(patterns: list[Pattern], method: str, path: str) -> Pattern | None:
    """The best of all patterns that match, each tried by a regular expression."""
    path = path.rstrip("/") or "/"
    fitting = [pattern for pattern in patterns if pattern.allows(method) and as_regex(pattern).fullmatch(path)]
    return min(fitting, key=lambda pattern: (pattern.rank, method not in pattern.methods), default=None)


def as_regex(pattern: Pattern) -> re.Pattern[str]:
    text = ""
    for segment in pattern.segments:
        if segment.rest:
            text += "(?:/.*)?"
        else:
            text += "/" + re.escape(segment.prefix) + ("[^/]+" if segment.param else "") + re.escape(segment.suffix)
    return re.compile(text or "/")


@settings(max_examples=300)
@given(
    st.lists(st.builds(pattern_of, METHODS, PATHS), min_size=1, max_size=20),
    st.lists(
        st.tuples(st.sampled_from(["POST", "PATCH", "PUT"]), st.lists(TEXTS, max_size=4)), min_size=1, max_size=20
    ),
    st.randoms(use_true_random=False),
)
def test_matching_agrees_with_trying_every_pattern_in_any_order(patterns, requests, random):
    matcher: Matcher[Pattern] = Matcher()
    accepted = [pattern for pattern in patterns if matcher.add(pattern, pattern) is None]
    shuffled: Matcher[Pattern] = Matcher()
    for pattern in random.sample(accepted, len(accepted)):
        assert shuffled.add(pattern, pattern) is None
    for method, segments in requests:
        path = "/" + "/".join(segments)
        expected = brute_force(accepted, method, path)
        event(f"fits: {expected is not None}")
        for each in (matcher, shuffled):
            found = each.find(method, path)
            assert (found.value if found else None) == expected
            assert found is None or rebuilt(found.value, found.params) == (path.rstrip("/") or "/")


def rebuilt(pattern: Pattern, params: dict[str, str]) -> str:
    """The path that the pattern makes with the parameters that were found."""
    parts = [segment.prefix + params.get(segment.param, "") + segment.suffix for segment in pattern.segments]
    return ("/" + "/".join(parts)).rstrip("/") or "/"
