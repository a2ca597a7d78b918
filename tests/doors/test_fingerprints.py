"""A middleware remembers the fingerprints of the latest requests, up to a limit."""

from __future__ import annotations

import pytest

from oncemore import Contract
from oncemore._contract.rule import Rule
from oncemore._fingerprint.fingerprint import Fingerprinter
from oncemore.web.request import MOST_FINGERPRINTS, Fingerprints, Parts


@pytest.fixture
def rule() -> Rule:
    match = Contract().match("POST", "/refunds")
    assert match is not None
    return match.rule


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that were parsed."""
    bodies: list[bytes] = []
    make = Fingerprinter.fingerprint

    def counted(self: Fingerprinter, *parts: object) -> str:
        bodies.append(parts[-1])  # type: ignore[arg-type]
        return make(self, *parts)  # type: ignore[arg-type]

    monkeypatch.setattr(Fingerprinter, "fingerprint", counted)
    return bodies


def parts(body: bytes, path: str = "/refunds") -> Parts:
    return ("POST", path, "", "application/json", body)


def test_repeated_request_is_parsed_once(rule: Rule, made: list[bytes]) -> None:
    fingerprints, asked = Fingerprints(()), parts(b'{"note": "x"}')
    assert len({fingerprints.of(rule, asked) for _ in range(5)}) == 1
    assert len(made) == 1


def test_remembered_request_is_kept_as_a_digest(rule: Rule) -> None:
    """A card number in a request must not stay in memory."""
    fingerprints = Fingerprints(())
    fingerprints.of(rule, parts(b'{"card": 4242}'))
    assert [len(digest) for digest in fingerprints._latest] == [32]


def test_other_path_or_body_is_another_request(rule: Rule) -> None:
    fingerprints = Fingerprints(())
    asked = [parts(b"{}"), parts(b"{}", "/payments"), parts(b"[]")]
    assert len({fingerprints.of(rule, each) for each in asked * 3}) == 3


def test_oldest_fingerprints_are_forgotten_above_the_limit(rule: Rule, made: list[bytes]) -> None:
    fingerprints = Fingerprints(())
    for n in range(MOST_FINGERPRINTS + 10):
        fingerprints.of(rule, parts(b"%d" % n))
    made.clear()
    fingerprints.of(rule, parts(b"%d" % (MOST_FINGERPRINTS + 9)))
    assert made == []
    assert len(fingerprints._latest) <= MOST_FINGERPRINTS
    fingerprints.of(rule, parts(b"0"))
    assert made == [b"0"]
