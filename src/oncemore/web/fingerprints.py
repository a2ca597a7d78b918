"""The fingerprints of requests; those that come again and again are remembered, for the same bytes need not be read anew."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import sha256
from typing import Any

from .._contract.rule import Rule
from .._fingerprint.fingerprint import Fingerprinter

Parts = tuple[str, str, str, str, bytes]  # method, path, query, media type, body

MOST_REMEMBERED = 2048
# A request up to this size is remembered as it is, which is faster than its digest; the rest would take too much room.
SMALL = 1024
# A request is remembered when it comes a second time: most never do, and to keep those would cost more than it saves.
# Until then its hash is all there is, in one of so many places.
PLACES = 4096


class Fingerprints:
    """One fingerprinter for each rule, and the fingerprints of the latest requests."""

    def __init__(self, secrets: tuple[bytes, ...]) -> None:
        Fingerprinter(secrets=secrets)  # so that a bad one is told of now, not with the first request
        self._secrets = secrets
        self._rules: dict[int, tuple[Rule, Fingerprinter]] = {}
        self._latest: OrderedDict[object, str] = OrderedDict()  # a plain dict takes long to find its oldest entry
        self._seen = array("q", bytes(8 * PLACES))

    def of(self, rule: Rule, parts: Parts) -> str:
        """The fingerprint of a request under *rule*."""
        small = len(parts[1]) + len(parts[2]) + len(parts[3]) + len(parts[4]) <= SMALL
        request = (id(rule), parts) if small else digest(rule, parts)
        found = self._latest.get(request)
        if found is None:
            found = self.fingerprinter(rule).fingerprint(*parts)
            self._note(request, found)
        return found

    def _note(self, request: object, fingerprint: str) -> None:
        """Remember the fingerprint, if the request was seen before."""
        hashed = hash(request)
        if self._seen[hashed % PLACES] != hashed:
            self._seen[hashed % PLACES] = hashed
            return
        self._latest[request] = fingerprint
        if len(self._latest) > MOST_REMEMBERED:
            self._latest.popitem(last=False)

    def matches(self, rule: Rule, parts: Parts, stored: str) -> bool:
        """Whether a *stored* fingerprint is of the same request."""
        return self.fingerprinter(rule).matches(stored, *parts)

    def fingerprinter(self, rule: Rule) -> Fingerprinter:
        """The rule's own; kept by identity, since to hash a rule takes longer than all the rest."""
        found = self._rules.get(id(rule))
        if found is None:
            settings: Any = rule.fingerprint
            made = Fingerprinter(
                mode=settings.mode, include=settings.include, exclude=settings.exclude, secrets=self._secrets
            )
            found = self._rules[id(rule)] = (rule, made)  # with the rule, so that its identity is not used again
        return found[1]


def digest(rule: Rule, parts: Parts) -> bytes:
    method, path, query, media_type, body = parts
    head = f"{id(rule)} {len(method)} {len(path)} {len(query)} {len(media_type)} {method}{path}{query}{media_type}"
    return sha256(head.encode("utf-8", "surrogatepass") + body).digest()
