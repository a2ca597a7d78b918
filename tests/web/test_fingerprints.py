"""The fingerprints that a door remembers: those of requests that come again, and no more than it has room for."""

from __future__ import annotations

import pytest

from oncemore import Contract
from oncemore._contract.rule import Rule
from oncemore._fingerprint.fingerprint import Fingerprinter
from oncemore.web.fingerprints import MOST_REMEMBERED, SMALL, Fingerprints, Parts


@pytest.fixture
def rule() -> Rule:
    match = Contract().match("POST", "/refunds")
    assert match is not None
    return match.rule


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The bodies that had to be read."""
    bodies: list[bytes] = []
    make = Fingerprinter.fingerprint

    def counted(self: Fingerprinter, *parts: object) -> str:
        bodies.append(parts[-1])  # type: ignore[arg-type]
        return make(self, *parts)  # type: ignore[arg-type]

    monkeypatch.setattr(Fingerprinter, "fingerprint", counted)
    return bodies


def parts(body: bytes, path: str = "/refunds") -> Parts:
    return ("POST", path, "", "application/json", body)


@pytest.mark.parametrize("size", [10, SMALL * 2], ids=["small", "large"])
def test_a_request_that_comes_again_and_again_is_read_twice_and_then_remembered(
    rule: Rule, made: list[bytes], size: int
) -> None:
    fingerprints, asked = Fingerprints(()), parts(b'{"note": "%s"}' % (b"x" * size))
    assert len({fingerprints.of(rule, asked) for _ in range(5)}) == 1
    assert len(made) == 2


def test_a_request_that_came_once_is_not_kept(rule: Rule) -> None:
    """What someone once asked is nobody's business later, and would fill the memory for nothing."""
    fingerprints = Fingerprints(())
    for n in range(100):
        fingerprints.of(rule, parts(b'{"card": %d}' % n))
    assert not fingerprints._latest


def test_another_path_or_body_is_another_request(rule: Rule) -> None:
    fingerprints = Fingerprints(())
    asked = [parts(b"{}"), parts(b"{}", "/payments"), parts(b"[]")]
    assert len({fingerprints.of(rule, each) for each in asked * 3}) == 3


def test_the_oldest_are_forgotten_when_there_are_too_many(rule: Rule, made: list[bytes]) -> None:
    fingerprints = Fingerprints(())
    for n in range(MOST_REMEMBERED + 10):
        for _ in range(2):
            fingerprints.of(rule, parts(b"%d" % n))
    made.clear()
    fingerprints.of(rule, parts(b"%d" % (MOST_REMEMBERED + 9)))
    assert made == []
    assert len(fingerprints._latest) <= MOST_REMEMBERED
    fingerprints.of(rule, parts(b"0"))
    assert made == [b"0"]
