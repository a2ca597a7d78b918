"""The fingerprints of requests.  The latest are remembered, because a repeated request need not be parsed again."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from typing import Any

from .._contract.rule import Rule
from .._fingerprint.fingerprint import Fingerprinter

Parts = tuple[str, str, str, str, bytes]  # method, path, query, media type, body

MOST_REMEMBERED = 4096


class Fingerprints:
    """One fingerprinter for each rule, and the fingerprints of the latest requests by the digest of their bytes."""

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        Fingerprinter(secrets=secrets)  # raises the error of a bad secret now, not at the first request
        self._secrets = secrets
        self._rules: dict[int, tuple[Rule, Fingerprinter]] = {}
        self._latest: OrderedDict[bytes, str] = OrderedDict()  # a plain dict takes long to find its oldest entry

    def of(self, rule: Rule, parts: Parts) -> str:
        """Return the fingerprint of a request under *rule*."""
        digest = digest_of(rule, parts)
        found = self._latest.get(digest)
        if found is None:
            found = self._latest[digest] = self.fingerprinter(rule).fingerprint(*parts)
            if len(self._latest) > MOST_REMEMBERED:
                self._latest.popitem(last=False)
        return found

    def matches(self, rule: Rule, parts: Parts, stored: str) -> bool:
        """Whether a *stored* fingerprint is of the same request."""
        return self.fingerprinter(rule).matches(stored, *parts)

    def fingerprinter(self, rule: Rule) -> Fingerprinter:
        """Return the fingerprinter of *rule*; kept by identity, because hashing a rule takes longer than all the rest."""
        found = self._rules.get(id(rule))
        if found is None:
            settings: Any = rule.fingerprint
            made = Fingerprinter(
                mode=settings.mode, include=settings.include, exclude=settings.exclude, secrets=self._secrets
            )
            found = self._rules[id(rule)] = (rule, made)  # with the rule, so that its identity is not used again
        return found[1]


def digest_of(rule: Rule, parts: Parts) -> bytes:
    method, path, query, media_type, body = parts
    head = f"{id(rule)} {len(method)} {len(path)} {len(query)} {len(media_type)} {method}{path}{query}{media_type}"
    return sha256(head.encode("utf-8", "surrogatepass") + body).digest()
