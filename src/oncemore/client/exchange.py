"""One HTTP request as work for the plan, whatever library sends it."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import NamedTuple, Protocol

from .._runtime.plan import Effect, Plan
from .errors import AttemptTimeout, OutcomeUnknown, RetriesExhausted
from .keyring.entry import Entry
from .retry import Retry
from .story import Story
from .verdict import IDEMPOTENT_METHODS, Fault, Reply, Verdict, accepted, judge_fault, judge_reply

NEVER = float("inf")


class Errors(NamedTuple):
    """Our errors that are also the library's, so that whoever catches those also catches these."""

    exhausted: type[RetriesExhausted]
    timed_out: type[RetriesExhausted]
    unknown: type[OutcomeUnknown]


class Wire(Protocol):
    """One library's way of sending one request."""

    method: str
    host: str
    errors: Errors

    @property
    def ready(self) -> bool:
        """Whether the body can be sent as it is, and again: there is no need to ask for it first."""
        ...

    @property
    def url(self) -> str:
        """Where it goes, in full."""
        ...

    @property
    def headers(self) -> MutableMapping[str, str]:
        """The request's own, in which the key and the limit are written."""
        ...

    def body(self) -> Plan[bytes | None]:
        """The bytes of the body, where they can be had and sent again; otherwise None."""
        ...

    def resendable(self) -> bool:
        """Whether the body can be sent (once more) from its beginning."""
        ...

    def send(self, limit: float, keyed: bool) -> Effect[Reply]:
        """A Reply, within *limit* seconds, or the library's error."""
        ...

    def drop(self, reply: Reply) -> Effect[None]:
        """Close the answer, which another attempt will replace."""
        ...

    def fault(self, error: Exception) -> Fault:
        """What the library's error means."""
        ...


class Exchange:
    """A request with its key, if it has one."""

    telling = True

    __slots__ = (
        "key",
        "lasts",
        "name",
        "retry",
        "story",
        "timeout_header",
        "wire",
    )

    def __init__(self, wire: Wire, retry: Retry, key: str | None, timeout_header: str | None) -> None:
        self.wire = wire
        self.retry = retry
        self.key = key
        self.name = wire.host
        self.lasts = NEVER if key is None else retry.sendable
        self.story: Story | None = None
        self.timeout_header = timeout_header

    @property
    def repeatable(self) -> bool:
        """Whether sending it again is harmless."""
        return self.key is not None or self.wire.method in IDEMPOTENT_METHODS

    def attempt(self, number: int, limit: float) -> Effect[Reply]:
        # Only a keyed operation can make the server wait, for a twin that is in flight.
        if self.key is not None and self.timeout_header:
            self.wire.headers[self.timeout_header] = f"{limit:.3f}"
        return self.wire.send(limit, self.key is not None)

    def judge(self, reply: Reply) -> Verdict:
        if reply.status < 400:
            return accepted(reply.status)
        keyed = self.key is not None
        return judge_reply(
            reply, repeatable=self.repeatable, keyed=keyed, statuses=self.retry.statuses, now=time.time()
        )

    def judge_error(self, error: Exception) -> Verdict:
        return judge_fault(self.wire.fault(error), repeatable=self.repeatable)

    def resendable(self) -> bool:
        return self.wire.resendable()

    def discard(self, reply: Reply) -> Effect[None]:
        return self.wire.drop(reply)

    @property
    def settled(self) -> bool:
        """Whether the answer was the last word on the operation, rather than where the attempts ended."""
        story = self.story
        return story is not None and not story.reason and story.known in ("performed", "refused")

    def forgotten(self, entry: Entry) -> OutcomeUnknown:
        """The error for a key that the server may no longer know."""
        story = Story(self.name, self.key, reason="key_lifetime")
        was = f"it ended with {entry.status}" if entry.state == "settled" else "what came of it is not known"
        return self.wire.errors.unknown(
            f"{entry.scope}: key {entry.key} is older than the server remembers, or of unknown age; {was}. "
            "Nothing was sent: look up the result, and make a new key only for a new operation",
            story=story,
        )

    def exhausted(self, story: Story, error: Exception | None) -> Exception | None:
        errors = self.wire.errors
        if story.reason == "key_lifetime":
            return errors.unknown(str(story), story=story)
        if error is None:
            return None  # the last answer is the caller's to judge
        late = isinstance(error, AttemptTimeout) or story.attempts[-1].verdict.name == "timeout"
        ended = errors.timed_out if late else errors.exhausted
        return ended(str(story), story=story)
