"""The settings of a rule: the names that may be written, and the values that some of them become."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

Across = Literal["separate", "conflict"]
Streams = Literal["refuse", "store", "release"]
StoreDown = Literal["refuse", "run"]
Function = Callable[..., Any]


class Settings(TypedDict, total=False):
    """What a rule, `[defaults]` or a decorator may say.  Durations are seconds or text; functions also `"module:name"`."""

    name: str
    reverses: str
    idempotent: bool
    key: str | Mapping[str, Any]
    scope: str | Function
    across_routes: Across
    fingerprint: str | Mapping[str, Any]
    ttl: float | str
    ttl_from: str
    expired: str
    lease: float | str
    in_flight: str
    wait: float | str
    retry_after: float | str
    on_duplicate: str
    on_mismatch: int
    keep: str | Function
    effect: str
    on_unknown: str
    reruns: int
    resolver: str | Function
    unique_by: str
    on_unique: str
    suspect: str | Mapping[str, Any]
    late: str
    first_sent: str
    if_match: bool
    rate: str
    retry: str
    status_header: str | Mapping[str, str]
    replay_status: str | int
    streams: Streams
    store_down: StoreDown
    max_request: int | str
    max_response: int | str


@dataclass(frozen=True, slots=True)
class FingerprintSettings:
    """What counts as the same request: how bodies are compared, and by which fields."""

    mode: str = "canonical"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StatusHeader:
    """The response header that tells how the answer came; an empty value, or name, is not sent."""

    name: str = ""
    stored: str = ""
    replayed: str = ""
    unstored: str = ""
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many new keys a principal may use in a window of so many seconds."""

    count: int
    window: float
