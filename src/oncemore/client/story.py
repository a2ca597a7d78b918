"""The story of an operation: all its attempts, as errors, logs, observers and the CSV show them."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from .verdict import Known, Verdict

Reason = Literal["", "attempts", "deadline", "budget", "breaker", "body", "key_lifetime"]

EventKind = Literal["retrying", "recovered", "exhausted"]

REASONS: dict[Reason, str] = {
    "attempts": "no attempts are left",
    "deadline": "no time is left",
    "budget": "the host's retry budget is spent",
    "breaker": "the host's circuit is open",
    "body": "the body cannot be sent twice",
    "key_lifetime": "the server may have forgotten the key by then",
}


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: the *delay* before it and its duration (*took*), both in seconds, and the verdict on its result."""

    number: int
    delay: float
    took: float
    verdict: Verdict


class Story(msgspec.Struct):
    """All attempts of one call under *key*.  *reason* says why there was no further attempt.

    *continued*: an earlier call, whose attempts are not in this story, may have performed the operation.
    """

    name: str
    key: str | None = None
    attempts: list[Attempt] = []
    reason: Reason = ""
    continued: bool = False

    @property
    def known(self) -> Known:
        """The knowledge of the outcome.  It stays unknown after a doubtful attempt until a success or a replay."""
        if not self.attempts:
            return "unknown" if self.continued else "not_performed"
        last = self.attempts[-1].verdict
        if last.known == "performed" or last.stored:
            return last.known
        doubtful = self.continued or any(attempt.verdict.known == "unknown" for attempt in self.attempts)
        return "unknown" if doubtful else last.known

    def csv(self) -> str:
        """Return the retry log as CSV: attempt, delay_ms, status, code, notes."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(("attempt", "delay_ms", "status", "code", "notes"))
        for attempt in self.attempts:
            verdict = attempt.verdict
            table.writerow((attempt.number, round(attempt.delay * 1000), verdict.name, verdict.code, verdict.note))
        return text.getvalue()

    def __str__(self) -> str:
        tries = "; ".join(f"{a.number}. after {a.delay:.3f} s: {a.verdict.note}" for a in self.attempts)
        known = self.known.replace("_", " ")
        because = f" Stopped: {REASONS[self.reason]}." if self.reason else ""
        return f"{self.name}: {tries or 'nothing was sent'}.{because} The operation is {known}."


class RetryEvent(msgspec.Struct, frozen=True):
    """An event for observers: `retrying` before each pause, `recovered` when a retry succeeded, `exhausted` at the end.

    `retrying` feeds `retry_attempts_total` and the histogram of delays, `exhausted` feeds `retry_exhausted_total`.
    """

    kind: EventKind
    story: Story
    delay: float = 0.0

    @property
    def attempt(self) -> int:
        return len(self.story.attempts)


RetryObserver = Callable[[RetryEvent], None]

log = logging.getLogger("oncemore.client")


def notify(observers: Sequence[RetryObserver], event: RetryEvent) -> None:
    """Call each observer with *event*.  If an observer raises, log its error, and go on with the request."""
    for observer in observers:
        try:
            observer(event)
        except Exception:
            log.exception("An observer failed on %s", event.kind)
