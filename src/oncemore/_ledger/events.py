"""Events for observers: one frozen object per transition.  Without observers, no event is made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from .model import Operation, Tier

EventKind = Literal[
    "claimed",  # a caller got the lease and performs
    "settled",  # the outcome is durable
    "released",  # the attempt failed; the next claim performs again
    "replayed",  # a duplicate got the stored outcome
    "refused",  # a caller got an error instead of an outcome; `code` says why
    "waiting",  # a duplicate waits for the running one
    "renewed",  # the heartbeat extended a lease
    "lapsed",  # an earlier attempt crashed, and this claim took its operation over
    "held",  # the outcome is unknown, and waits for a decision
    "resolved",  # a resolver decided; `detail` is its verdict
    "fenced",  # a late owner's write was refused
    "suspected",  # the same request came under another key a moment ago
    "unstored",  # performed, but the outcome could not be stored
    "failed",  # the store failed
    "published",  # a message of the outbox is stored by its broker
    "unpublished",  # a message could not be sent, and will be tried again
    "dead",  # a message has failed too often, and waits for a requeue
    "received",  # a delivery of a message or event was answered; `detail` says how
    "delivery",  # an attempt at a webhook ended; `to_state` is its state now, `status` the response's, `duration` its age
    "slot",  # an attempt at a job's slot ended; `detail` says how, `duration` how late it began
    "missed",  # a scheduled time passed without its slot; `detail` says why
    "shadowed",  # in shadow mode: `detail` is what would have been done (replayed, refused, waited, held), `code` why
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One transition of one operation.  *duration* is in seconds; *tier* says where a replayed outcome was found."""

    kind: EventKind
    operation: Operation
    token: int = 0
    attempt: int = 0
    from_state: str = ""
    to_state: str = ""
    status: int = 0
    code: str = ""
    detail: str = ""
    duration: float = 0.0
    tier: Tier | Literal[""] = ""


Observer = Callable[[Event], None]

log = logging.getLogger("oncemore")


def tell_all(observers: Sequence[Observer], event: Event) -> None:
    """Call each observer with *event*.  If one raises, log it: an observer never disturbs the operation."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            log.exception("An observer failed on %s", event.kind)
