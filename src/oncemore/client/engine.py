"""The engine of all transports: it gives a request its key, stores both, sends with retries, and records the result."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from msgspec.structs import replace

from .._runtime.plan import Call, Effect, Plan, arun, run
from ..errors import ConfigurationError, InvalidKey, OncemoreError
from .attempts import Environment, send_with_retries
from .errors import AttemptTimeout, CredentialsMissing, OutcomeUnknown, RetriesExhausted
from .keyring import KeyringPlace, open_keyring
from .keyring.entry import (
    CREDENTIALS,
    FINGERPRINTS,
    Entry,
    FinishDespiteCancel,
    Keyring,
    Resumed,
    fingerprinted_parts,
    is_sendable,
    scope_of,
    without_credentials,
)
from .keys import new_key
from .retry import Retry, check_policy
from .story import RetryObserver, Story, log
from .verdict import IDEMPOTENT_METHODS, Fault, HttpReply, Verdict, judge_fault, judge_reply

UNSAFE_METHODS = frozenset({"POST", "PATCH", "PUT", "DELETE"})

# Headers that are stored with the body.  None is a credential: the client that resumes a request adds those.
STORED_HEADERS = ("Content-Type", "Content-Encoding", "Accept")

NEVER = float("inf")

ANOTHER_HOST = (
    "this client is for another host, and would send its credentials there, so nothing was sent: resume the operation "
    "through the client that sent it, and give each client a keyring of its own"
)

# The entry that is being resumed in this context.
_resuming: ContextVar[Entry | None] = ContextVar("oncemore_resuming", default=None)


class LibraryErrors(NamedTuple):
    """Errors that are ours and also the library's, so that code that catches the library's errors catches them too."""

    exhausted: type[RetriesExhausted]
    timed_out: type[RetriesExhausted]
    unknown: type[OutcomeUnknown]


class RetryableRequest:
    """A request of an HTTP library, in the form that the retry loop needs.  Each library has a subclass.

    *name* is the host.  *headers* are the request's own: the key and the timeout are written into them.
    """

    method: str
    url: str
    name: str
    headers: MutableMapping[str, str]
    errors: LibraryErrors

    # Set by `Engine.prepare`.
    key: str | None = None
    policy: Retry
    lasts: float = NEVER
    timeout_header: str | None = None
    story: Story | None = None

    def body(self) -> Plan[bytes | None]:
        """Return the body as bytes if it is in memory, or small; otherwise None."""
        raise NotImplementedError

    def resendable(self) -> bool:
        """Whether the body can be sent (again) from its beginning."""
        raise NotImplementedError

    def send(self, timeout: float) -> Effect[HttpReply]:
        """Return the effect of one attempt, which takes *timeout* seconds at most, and may raise the library's error."""
        raise NotImplementedError

    def close(self, reply: HttpReply) -> Effect[None]:
        """Return the effect that closes the response before the next attempt."""
        raise NotImplementedError

    def fault(self, error: Exception) -> Fault:
        """Return the meaning of the library's error."""
        raise NotImplementedError

    def attempt(self, number: int, timeout: float) -> Effect[HttpReply]:
        # Only a keyed request can make the server wait: its operation may be in flight.
        if self.key is not None and self.timeout_header:
            self.headers[self.timeout_header] = f"{timeout:.3f}"
        return self.send(timeout)

    def judge(self, reply: HttpReply, error: Exception | None) -> Verdict:
        keyed = self.key is not None
        repeatable = keyed or self.method in IDEMPOTENT_METHODS
        if error is not None:
            return judge_fault(self.fault(error), repeatable=repeatable)
        statuses = self.policy.statuses
        return judge_reply(reply, repeatable=repeatable, keyed=keyed, statuses=statuses, now=time.time())

    def failure(self, story: Story, error: Exception | None) -> Exception | None:
        errors = self.errors
        if story.reason == "key_lifetime":
            return errors.unknown(str(story), story=story)
        if error is None:
            return None  # the caller judges the last answer
        late = isinstance(error, AttemptTimeout) or story.attempts[-1].verdict.name == "timeout"
        return (errors.timed_out if late else errors.exhausted)(str(story), story=story)

    def too_old(self, entry: Entry) -> OutcomeUnknown:
        """Return the error for a key that the server may have forgotten."""
        story = Story(self.name, self.key, reason="key_lifetime", continued=True)
        outcome = f"it ended with {entry.status}" if entry.state == "settled" else "its outcome is not known"
        return self.errors.unknown(
            f"{entry.scope}: key {entry.key} is older than the server remembers, or of unknown age; {outcome}. "
            "Nothing was sent: look up the result, and make a new key only for a new operation",
            story=story,
        )


class Engine:
    """The policy, the keyring and the treatment of keys, for one transport.

    Args:
        retry: the policy; `Retry()` by default.
        keyring: stores keys and requests before the first byte is sent.  With None, nothing is stored.
        header: carries the key.
        quoted: write the key as a quoted string, as the IETF draft asks for.
        make_key: makes a key if the caller sent none.  With None, only the caller's own keys are used.
        remember: further headers that a resumed request needs.
        timeout_header: tells the server how long the caller waits for a keyed request.  With None, it is not sent.
        observers: are called with each `RetryEvent`.
    """

    def __init__(
        self,
        retry: Retry | None = None,
        keyring: KeyringPlace | None = None,
        *,
        header: str = "Idempotency-Key",
        quoted: bool = False,
        make_key: Callable[[], str] | None = new_key,
        remember: Sequence[str] = (),
        timeout_header: str | None = "X-Request-Timeout",
        observers: Sequence[RetryObserver] = (),
    ) -> None:
        self.policy = check_policy(retry)
        self.keyring = None if keyring is None else open_keyring(keyring)
        self.header = header
        self.quoted = quoted
        self.make_key = make_key
        self.stored_headers = (*STORED_HEADERS, *remember, header)
        self.timeout_header = timeout_header
        self.environment = Environment(observers=tuple(observers))

    def prepare(self, request: RetryableRequest, policy: Retry | None = None) -> None:
        """Give *request* its policy and, in its headers, its key."""
        request.key = self.put_key(request.method, request.headers)
        request.policy = self.policy if policy is None else check_policy(policy)
        request.lasts = NEVER if request.key is None else request.policy.sendable
        request.timeout_header = self.timeout_header

    def put_key(self, method: str, headers: MutableMapping[str, str]) -> str | None:
        """Return the key of an unsafe request: the caller's own, or a new one, which is added to *headers*."""
        if method not in UNSAFE_METHODS:
            return None
        if self.header in headers:
            key = headers[self.header]
            if not key.strip('" \t'):
                raise InvalidKey(f"{self.header} is empty: leave it out, or give the operation a name")
            return key
        if self.make_key is None:
            return None
        made = self.make_key()
        headers[self.header] = key = f'"{made}"' if self.quoted else made
        return key

    def send(self, request: RetryableRequest) -> Plan[HttpReply]:
        """Send a prepared request, and return its final answer, or the last one.  Its story then has the attempts."""
        body = yield from request.body()
        if request.key is not None and self.keyring is not None:
            return (yield from self._send_stored(request, self.keyring, body))
        reply: HttpReply = yield from send_with_retries(request, request.policy, self.environment)
        return reply

    def _send_stored(self, request: RetryableRequest, keyring: Keyring, body: bytes | None) -> Plan[HttpReply]:
        """Store the key and the request durably, send, and record the result.  An interrupted entry stays pending."""
        started, policy = self.environment.now(), request.policy
        entry = self._entry(request, body)
        oldest = entry.created_at - policy.sendable
        held: Entry | None = None
        try:
            known = yield from keyring.claim(entry, oldest=oldest)
            if not is_sendable(known, entry, oldest):
                raise request.too_old(known)
            held = known
            request.lasts = held.created_at - oldest
            if held.state != "settled" and not is_new(held, entry):
                request.story = Story(request.name, request.key, continued=True)
            reply: HttpReply = yield from send_with_retries(request, policy, self.environment, started)
        except GeneratorExit:
            raise
        except Exception:
            if held is not None:
                yield from self._record_result(request, keyring, held, new=is_new(held, entry))
            raise
        except BaseException:  # interrupted while the entry was stored, or in an attempt that the story does not have
            yield from _despite_all(keyring.leave(entry))
            raise
        yield from self._record_result(request, keyring, held, new=is_new(held, entry), status=reply.status)
        return reply

    def _record_result(
        self, request: RetryableRequest, keyring: Keyring, entry: Entry, *, new: bool, status: int = 0
    ) -> Plan[None]:
        """Settle the entry after a final answer, forget it if nothing was sent, and leave it open otherwise."""
        story = request.story
        if status and story is not None and not story.reason and story.known in ("performed", "refused"):
            yield from _despite_all(keyring.settle(entry, status))  # a reply with a reason is only the last one
        elif new and story is not None and story.known == "not_performed":
            yield from _despite_all(keyring.forget(entry))
        else:
            yield from _despite_all(keyring.leave(entry))

    def _entry(self, request: RetryableRequest, body: bytes | None) -> Entry:
        content_type = request.headers.get("Content-Type") or ""
        parts = fingerprinted_parts(request.method, request.url, content_type, body or b"")
        stored = [(name, request.headers.get(name)) for name in self.stored_headers]
        names = {name.lower() for name, value in stored if value is not None}
        stored += [(name, "") for name in CREDENTIALS if name in request.headers and name.lower() not in names]
        entry = Entry(
            scope=scope_of(request.method, request.url),
            key=request.key or "",
            fingerprint="" if body is None else FINGERPRINTS.fingerprint(*parts),
            method=request.method,
            url=without_credentials(request.url),
            headers=tuple((name, value) for name, value in stored if value is not None),
            body=body,
            created_at=time.time(),
            token=secrets.randbits(62),
        )
        resumed = _resuming.get()
        if resumed is None or (resumed.scope, resumed.key) != (entry.scope, entry.key):
            return entry
        sent = {name.lower() for name, _ in entry.headers}
        if missing := [name for name in resumed.credentials if name.lower() not in sent]:
            raise CredentialsMissing(
                f"{entry.scope}: key {entry.key} was sent with {' and '.join(missing)}, which is not stored, and without it a "
                "server may take the request for another caller's; nothing was sent: resume it through a client that has it"
            )
        return replace(entry, token=resumed.token)

    def resume(
        self, send: Callable[[Entry], Any], *, opened: bool = False, serves: Callable[[str], bool] | None = None
    ) -> Plan[list[Resumed]]:
        """Send each interrupted operation again through *send*, under its own key, and return the results.

        *serves* tells whether the client may send to a URL, because another host must not get its credentials.
        """
        keyring = self.require_keyring()
        resumed = []
        for entry in (yield from keyring.pending()):
            if entry.state == "sending" or opened:
                if serves is not None and not serves(entry.url):
                    resumed.append(Resumed(entry, error=CredentialsMissing(f"{entry.scope}: {ANOTHER_HOST}")))
                    continue
                done = yield from self._resume(keyring, send, entry)
                if done is not None:
                    resumed.append(done)
        return resumed

    def _resume(self, keyring: Keyring, send: Callable[[Entry], Any], entry: Entry) -> Plan[Resumed | None]:
        """Send one operation again, and return the result, or None if another process was quicker."""
        try:
            adopted = yield from keyring.adopt(entry)
        except OncemoreError as error:
            return Resumed(entry, error=error)
        if adopted is None:
            return None
        try:
            done = yield from self._send_adopted(send, adopted)
        except GeneratorExit:
            raise
        except BaseException:
            yield from _despite_all(keyring.release(adopted))
            raise
        # An operation that can no longer be resumed is left open, so that `resume` reports it once.
        unknown = isinstance(done.error, OutcomeUnknown)
        yield from _despite_all(keyring.leave(adopted) if unknown else keyring.release(adopted))
        return done

    def _send_adopted(self, send: Callable[[Entry], Any], entry: Entry) -> Plan[Resumed]:
        _resuming.set(entry)
        try:
            if entry.body is None:
                raise OutcomeUnknown(
                    f"{entry.scope}: the body under key {entry.key} is not stored (it was too long, or a stream), so it cannot "
                    "be sent again: look up the result at the server, and then forget() the operation"
                )
            return Resumed(entry, response=(yield Call(send, entry)))
        except Exception as error:
            return Resumed(entry, error=error)
        finally:
            _resuming.set(None)  # not by a token, because a dropped plan may be ended in another context

    def require_keyring(self) -> Keyring:
        """Return the keyring, or raise ConfigurationError if there is none."""
        if self.keyring is None:
            raise ConfigurationError("This client has no keyring: give it one, such as keyring='sqlite:///keys.db'")
        return self.keyring

    def close(self) -> None:
        """Close the keyring's files and connections."""
        if self.keyring is not None:
            self.keyring.close()

    async def aclose(self) -> None:
        """Close the keyring, including its connections on the running event loop."""
        if self.keyring is not None:
            await self.keyring.aclose()


def is_new(held: Entry, entry: Entry) -> bool:
    """Whether the claim of *entry*, which returned *held*, was the first one of its key."""
    return held.created_at == entry.created_at


def _despite_all(plan: Plan[None]) -> Plan[None]:
    """Run *plan* even if the caller is cancelled.  If the keyring fails, log it: the caller still gets its answer."""
    yield FinishDespiteCancel(_log_failure(plan))


def _log_failure(plan: Plan[None]) -> Plan[None]:
    try:
        yield from plan
    except Exception:
        log.exception("The keyring could not store the result, so the operation stays pending: resume it later")


class PendingOperations:
    """The operations in the keyring of a blocking transport."""

    engine: Engine

    def pending(self) -> list[Entry]:
        """Return the operations without a final answer that no living process is working on, oldest first."""
        return run(self.engine.require_keyring().pending())

    def forget(self, entry: Entry) -> None:
        """Remove a pending operation, because its outcome is known now, or no longer matters."""
        run(self.engine.require_keyring().forget(entry))

    def _resume(
        self, send: Callable[[Entry], Any], opened: bool, serves: Callable[[str], bool] | None = None
    ) -> list[Resumed]:
        return run(self.engine.resume(send, opened=opened, serves=serves))


class AsyncPendingOperations:
    """The operations in the keyring of an async transport."""

    engine: Engine

    async def pending(self) -> list[Entry]:
        """Return the operations without a final answer that no living process is working on, oldest first."""
        return await arun(self.engine.require_keyring().pending())

    async def forget(self, entry: Entry) -> None:
        """Remove a pending operation, because its outcome is known now, or no longer matters."""
        await arun(self.engine.require_keyring().forget(entry))

    async def _resume(
        self, send: Callable[[Entry], Awaitable[Any]], opened: bool, serves: Callable[[str], bool]
    ) -> list[Resumed]:
        return await arun(self.engine.resume(send, opened=opened, serves=serves))
