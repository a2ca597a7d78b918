"""Find the contract's pattern for a request, the most specific one first.

Paths are compared decoded, as a framework's router sees them, and never decoded again.  A trailing slash makes no
difference; letter case does.  Segment by segment from the left, plain text beats text around a parameter (as in
`{id}:cancel`), which beats a whole parameter, which beats `{rest:path}` (none or more segments); then a named method
beats `*`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from ..errors import ConfigurationError
from .problems import did_you_mean

T = TypeVar("T")

# Never guarded, even with a key: a repeated one has no effect of its own.
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})
UNSAFE_METHODS = ("POST", "PUT", "PATCH", "DELETE")
# The other methods in IANA's registry, and PURGE, as caches know it.  Any other name counts as a mistake.
# fmt: off
OTHER_METHODS = frozenset({
    "ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "COPY", "LABEL", "LINK", "LOCK", "MERGE",
    "MKACTIVITY", "MKCALENDAR", "MKCOL", "MKREDIRECTREF", "MKWORKSPACE", "MOVE", "ORDERPATCH", "PROPFIND",
    "PROPPATCH", "PURGE", "REBIND", "REPORT", "SEARCH", "UNBIND", "UNCHECKOUT", "UNLINK", "UNLOCK", "UPDATE",
    "UPDATEREDIRECTREF", "VERSION-CONTROL",
})
# fmt: on
ANY = "*"
EVERYWHERE = "/{rest:path}"

METHOD = re.compile(r"[A-Z][A-Z0-9_-]*", re.ASCII)
SEGMENT = re.compile(
    r"(?P<prefix>[^{}<>]*)(?:\{(?P<param>[A-Za-z_]\w*)(?::(?P<kind>[A-Za-z_]\w*))?\}(?P<suffix>[^{}<>]*))?"
)
ENCODED = re.compile(r"%[0-9A-Fa-f]{2}|[?#]")


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a path between slashes: text, text around a parameter, a parameter, or (*rest*) everything after it."""

    prefix: str
    param: str = ""
    suffix: str = ""
    rest: bool = False

    @property
    def rank(self) -> tuple[int, int, str, str]:
        """The order of segments, the most specific first.  Segments of equal rank match the same texts."""
        if not self.param:
            return (0, 0, self.prefix, "")
        around = len(self.prefix) + len(self.suffix)
        return (3 if self.rest else 1 if around else 2, -around, self.prefix, self.suffix)

    @property
    def regex(self) -> str:
        """The pattern of the segment and the slash before it.  Its only group is the parameter, if there is one."""
        if self.rest:
            return "(?:/(.*))?"
        return f"/{re.escape(self.prefix)}{'([^/]+)' if self.param else ''}{re.escape(self.suffix)}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """The methods and the path of a rule: `POST /refunds`, `POST|PATCH /users/{id}`, `* /files/{rest:path}`, `POST *`, `*`."""

    text: str
    methods: tuple[str, ...] = field(init=False)
    segments: tuple[Segment, ...] = field(init=False)
    params: tuple[str, ...] = field(init=False)
    regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        methods, path = split_match(self.text)
        segments = tuple(map(parse_segment, path[1:].split("/"))) if path != "/" else ()
        object.__setattr__(self, "text", f"{'|'.join(methods)} {ANY if path == EVERYWHERE else path}")
        object.__setattr__(self, "methods", methods)
        object.__setattr__(self, "segments", segments)
        object.__setattr__(self, "params", tuple(segment.param for segment in segments if segment.param))
        object.__setattr__(self, "regex", re.compile("".join(segment.regex for segment in segments), re.DOTALL))
        if any(segment.rest for segment in segments[:-1]):
            raise ConfigurationError(
                f"match {self.text!r} continues after {{name:path}}, which matches the rest of the path: put it last"
            )
        if len(set(self.params)) < len(self.params):
            raise ConfigurationError(f"match {self.text!r} names a parameter twice: give each its own name")

    @property
    def rank(self) -> tuple[tuple[int, int, str, str], ...]:
        """The order of patterns, the most specific first.  Patterns of equal rank match the same paths."""
        return tuple(segment.rank for segment in self.segments)

    def allows(self, method: str) -> bool:
        return method in self.methods or ANY in self.methods

    def find(self, method: str, path: str) -> dict[str, str] | None:
        """Return the values of the parameters, or None if the pattern does not match."""
        path = path.rstrip("/")
        path = (
            path if path[:1] in ("", "/") else f"/{path}"
        )  # some servers pass on a target that does not begin with a slash
        found = self.regex.fullmatch(path) if self.allows(method) else None
        return dict(zip(self.params, found.groups(""), strict=True)) if found else None


def split_match(text: str) -> tuple[tuple[str, ...], str]:
    """Return the methods and the path of a match, each checked."""
    if not isinstance(text, str):
        raise ConfigurationError(f"match {text!r} is not a text: write a method and a path, as in 'POST /refunds'")
    methods, _, path = text.strip().rpartition(" ")
    path = EVERYWHERE if path == ANY else path
    if not path.startswith("/"):
        raise ConfigurationError(f"match {text!r} has no path: write a method and a path, as in 'POST /refunds'")
    if ENCODED.search(path):
        raise ConfigurationError(f"match {text!r} is not a plain path: write it decoded, without a query or fragment")
    names = tuple(dict.fromkeys(name.strip().upper() for name in (methods or ANY).split("|")))
    for name in names:
        check_method(text, name)
    return names, path.rstrip("/") or "/"


def check_method(text: str, name: str) -> None:
    if name in SAFE_METHODS:
        raise ConfigurationError(
            f"match {text!r} names {name}, which is never guarded: name POST, PUT, PATCH or DELETE"
        )
    if name != ANY and not METHOD.fullmatch(name):
        raise ConfigurationError(
            f"match {text!r} names no method: write a method and a path, as in 'POST|PATCH /refunds'"
        )
    if name not in (ANY, *UNSAFE_METHODS, *OTHER_METHODS):
        hint = did_you_mean(name, UNSAFE_METHODS)
        raise ConfigurationError(
            f"match {text!r} names the method {name}, which HTTP does not have{hint}: name POST, PUT, PATCH or DELETE, or "
            "write * for any method"
        )


def parse_segment(text: str) -> Segment:
    found = SEGMENT.fullmatch(text)
    if found is None or not text:
        raise ConfigurationError(f"path segment {text!r} is not understood: write text, {{name}} or {{name:path}}")
    if text in (ANY, "**"):  # taken literally, it would never match
        raise ConfigurationError(
            f"path segment {text!r} is not a wildcard: write {{name}}, or {{name:path}} for the rest"
        )
    prefix, param, suffix = found["prefix"], found["param"] or "", found["suffix"] or ""
    # Other converters, such as 'int', only narrow the text of one segment.  To match more here does no harm.
    rest = found["kind"] == "path"
    if rest and (prefix or suffix):
        raise ConfigurationError(f"path segment {text!r} is not understood: {{{param}:path}} stands alone")
    return Segment(prefix, param, suffix, rest)


class Found(NamedTuple, Generic[T]):
    """The value of a pattern, and the values of its parameters."""

    value: T
    params: dict[str, str]


class Matcher(Generic[T]):
    """Finds the value of the most specific pattern by trying them in their order, as the routers of frameworks do."""

    def __init__(self) -> None:
        self._values: dict[tuple[object, str], T] = {}  # by rank and method: patterns equal in both match the same
        self._patterns: list[tuple[Pattern, T]] = []

    def add(self, pattern: Pattern, value: T) -> T | None:
        """Add a pattern.  If a known one matches the very same requests, add nothing, and return its value."""
        requests = [(pattern.rank, method) for method in pattern.methods]
        for rival in (self._values[each] for each in requests if each in self._values):
            return rival
        self._values |= dict.fromkeys(requests, value)
        self._patterns.append((pattern, value))
        self._patterns.sort(key=lambda entry: (entry[0].rank, ANY in entry[0].methods))
        return None

    def find(self, method: str, path: str) -> Found[T] | None:
        """Return the value for a request, by its method (in upper case) and its decoded path."""
        for pattern, value in self._patterns:
            params = pattern.find(method, path)
            if params is not None:
                return Found(value, params)
        return None
