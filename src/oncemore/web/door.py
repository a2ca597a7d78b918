"""The part that all HTTP middlewares share: it makes an operation from a request, and a response from an answer."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC
from email.utils import formatdate, parsedate_to_datetime
from functools import lru_cache, partial, wraps
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar
from urllib.parse import parse_qs, quote

import msgspec

from .._contract.contract import Contract, Match
from .._contract.keys import join, uuid7_time
from .._contract.policy import Policy, duration
from .._contract.rule import Rule
from .._contract.templates import Field
from .._ledger.attempt import LeaseAttempt, is_final
from .._ledger.connect import hide_password
from .._ledger.context import CURRENT, Op
from .._ledger.decisions import Answer
from .._ledger.guard import ATTEMPTS, Guard, check_guard
from .._ledger.model import Operation, Outcome, decode_outcome, encode_outcome
from .._ledger.transaction_attempt import NO_LENDER, TransactionAttempt
from .._runtime.plan import Plan
from ..errors import (
    ConfigurationError,
    CorruptRecord,
    InvalidKey,
    MissingKey,
    OncemoreError,
    PreconditionRequired,
    StoreError,
    Undeclared,
)
from .etag import Etag, check_if_match
from .problem import ProblemBody, Response, problem_response, stripe_problem, value_response
from .rates import Admission, Rates, default_rates
from .redrive import REDRIVEN, check_passed, check_resumable, find_redriven, kept_request
from .request import (
    GUARDED,
    Fields,
    Fingerprints,
    Headers,
    Principal,
    Request,
    StripeAccount,
    is_async,
    is_sent,
    kept_headers,
    lines,
    native_mapping,
    principal_of,
    value_of,
    warn_again,
)

log = logging.getLogger("oncemore.web")

App = TypeVar("App")
SomeDoor = TypeVar("SomeDoor", bound="Door[Any]")
Options = ParamSpec("Options")
Caller = tuple[str, str]  # the names of the principal and of its tenant

MOST_SCOPES = 4096
LONGEST_REMEMBERED = 1024  # longer names are not remembered, because they would fill the memory
# The client sends the same request, with the same key, to another address: the app that redirects has performed nothing.
REPEATING_REDIRECTS = (307, 308)
LONGEST_TIMEOUT = 32  # a longer text is not a duration, and would take long to parse


def reports_faults(
    init: Callable[Concatenate[SomeDoor, Options], None],
) -> Callable[Concatenate[SomeDoor, Options], None]:
    """Pass a fault in the options to `Door.report_fault`, which raises it or makes the app's start fail."""

    @wraps(init)
    def checked(self: SomeDoor, /, *args: Options.args, **options: Options.kwargs) -> None:
        try:
            init(self, *args, **options)
        except (ConfigurationError, TypeError) as error:
            self.report_fault(error)

    return checked


class Door(Generic[App]):
    """Base class of the HTTP middlewares: enforces one contract with one guard.

    A subclass reads the requests of its framework, calls the app, and sends the responses.
    """

    default_principal: Principal | None = None
    needs_app = False
    can_await = False  # whether the framework can await an async principal function

    @reports_faults
    def __init__(
        self,
        app: App = None,  # type: ignore[assignment]  # None only for `Idempotency`, which wraps no app
        *,
        guard: Guard,
        contract: Contract | None = None,
        profile: str | None = None,
        principal: Principal | None = None,
        tenant: Principal | None = None,
        secrets: Sequence[bytes] = (),
        keep_headers: Sequence[str] | None = None,
        redact: Callable[[Outcome], Outcome] | None = None,
        status_path: str | None = "/idempotency",
        problem_base: str = "urn:oncemore:error:",
        problem: ProblemBody | None = None,
        rates: Rates | None = None,
        enforce: bool = True,
    ) -> None:
        """Guard the requests of *app* that the contract names; all others pass untouched.

        Args:
            app: The application, or the next middleware.
            guard: The ledger in which operations and their outcomes are kept.
            contract: The rules; without one, every POST and PATCH with an Idempotency-Key is guarded.
            profile: The defaults of the contract, if there is no contract to name them: `"stripe"`, `"ietf"`, and others.
            principal: Takes the framework's request and returns the name of the caller that owns the key.  ASGI and Django
                also accept an async function; `oncemore.web.jwt` makes a function that verifies tokens.  Without it, the
                owner is the authenticated user, else the credentials in the headers.
            tenant: Takes the framework's request and returns the name of the tenant, if keys belong to tenants.
            secrets: Keys for fingerprints, the newest first; without secrets, fingerprints are plain digests.
            keep_headers: The names of the only response headers that a replay repeats.  Default: all that may be repeated.
            redact: Takes an outcome and returns the outcome to be stored, for instance without card numbers.
            status_path: The path at which callers look an operation up by its key; None switches it off.
            problem_base: The text before an error's code in the `type` of a problem document.
            problem: Takes the members of a problem document (`error_code`, `status`, `detail`, ...) and returns the JSON body
                to be sent instead.  The profile `stripe` brings such a function.
            rates: Counts new keys for rules with a `rate`, as in `NewKeys("redis://...")`.
            enforce: False is shadow mode: every request passes untouched, and the ledger notes what would have been done.
        """
        check_guard(guard)
        if self.needs_app and app is None:
            raise ConfigurationError("The middleware got no app: write IdempotencyMiddleware(app, guard=guard)")
        if not isinstance(contract, Contract | None):
            raise ConfigurationError(
                f"contract is a {type(contract).__name__}: make a Contract, as in Contract.load('oncemore.toml')"
            )
        if contract is not None and profile is not None:
            raise ConfigurationError("Name the profile in the contract, or give a profile and no contract")
        if isinstance(keep_headers, str):
            raise ConfigurationError(f"keep_headers is a text, not a list of names: write [{keep_headers!r}]")
        if status_path is not None and not status_path.startswith("/"):
            raise ConfigurationError(f"status_path = {status_path!r} is not a path: write '/{status_path}'")
        functions = {"principal": principal, "tenant": tenant, "redact": redact, "problem": problem}
        for name, function in functions.items():
            if function is not None and not callable(function):
                raise ConfigurationError(f"{name} is a {type(function).__name__}: give a function")
            if is_async(function) and (name in ("redact", "problem") or not self.can_await):
                raise ConfigurationError(f"{name} is async, and this middleware cannot await it: give a sync function")
        self.app = app
        self.guard = guard
        self.contract = contract or Contract(profile=profile or "default")
        self.principal = principal or self.default_principal
        self.tenant = tenant
        self.redact = redact
        self.rates = rates or default_rates(self.contract)
        self.status_path = status_path if enforce else None
        self.enforce = enforce
        self.unobserved_until = 0.0  # the time until which shadow mode does not ask the ledger, because it was down
        self.problem_base = problem_base
        self.problem = problem
        if self.contract.profile in ("stripe", "stripe-v2"):
            self.tenant = self.tenant or StripeAccount()
            self.problem = problem or stripe_problem
        self._fingerprints = Fingerprints(tuple(secrets))
        self._scopes: dict[tuple[int, str, str, str], tuple[str, Rule]] = {}  # the scopes of the latest callers
        self._keep = None if keep_headers is None else frozenset(name.lower() for name in keep_headers)
        self._warned: frozenset[str] = frozenset()
        self._warn(stacklevel=4)
        warn_again()
        self.check_effects()
        self.prepare()

    def report_fault(self, error: ConfigurationError | TypeError) -> None:
        """Raise *error*, a fault in the options; a subclass may delay it until the app starts."""
        raise error

    def prepare(self) -> None:
        """Check the app and find its rules; a subclass implements this if that is possible before the first request."""

    # From a request to an operation

    def match(
        self, method: str, path: str, headers: Headers, native: Any, inner: str = "", found: Match | None = None
    ) -> Match | None:
        """Return the rule that guards this request, or None if it passes untouched.  Raise if the contract refuses it.

        *inner* is the path without the prefix that the app is mounted at: a rule may name either path.  *found* is the rule
        if the framework has already found it.
        """
        match = found or self.contract.match(method, path)
        if inner and inner != path and not (match and match.declared):
            within = self.contract.match(method, inner)
            match = within if within is not None and within.declared else match
        if match is None or not match.rule.idempotent:
            check_passed(native)
            return None
        key = match.rule.key
        keyed = key.source != "header" or key.required or is_sent(headers, key.name.lower())
        undeclared = "" if match.declared else self.contract.undeclared
        if undeclared == "refuse" and self.enforces(match.rule):
            self.check(match, method, path, headers)
        elif undeclared == "warn":
            log.warning(
                "No rule of the contract matches %s %s: add a rule for it", method, quote(path, errors="replace")
            )
        if key.source == "none" or not (keyed or match.rule.if_match):
            check_passed(native)
            return None
        if match.rule.if_match and self.enforces(match.rule):
            self.check(match, method, path, headers)
        return match

    def enforces(self, rule: Rule) -> bool:
        """Whether requests under *rule* are guarded, rather than only observed."""
        return self.enforce and rule.enforce

    def check(self, match: Match, method: str, path: str, headers: Headers) -> None:
        """Raise if the contract refuses the request whatever its key: no rule matches it, or If-Match is missing."""
        if not match.declared and self.contract.undeclared == "refuse":
            raise Undeclared(
                f"No rule of the contract matches {method} {path}, and others are not accepted: add a rule for it"
            )
        if match.rule.if_match and not value_of(headers, "if-match"):
            raise PreconditionRequired("Send the resource's ETag in an If-Match header")

    def operation(self, match: Match, request: Request) -> Plan[tuple[Operation | None, Caller]]:
        """Return the operation that the request names, and its caller.

        The operation is None if the key is optional and was not sent.
        """
        rule, headers = match.rule, request.headers
        if type(request.native) is not dict or REDRIVEN in request.native:
            unfinished = find_redriven(request.native)
            if unfinished is not None:
                return check_resumable(unfinished, rule), ("", "")
        principal, tenant = caller = yield from self.caller(request)
        named = lines(headers, rule.key.name.lower())
        unique: str | None = None
        if rule.key.source == "header" and rule.unique_by is None:  # the common case needs no other part of the request
            key = rule.key.read(named)
        else:
            context = self._context(match, request, principal, tenant)
            key = rule.key.read(named, **context)
            unique = rule.unique_by.render(**context) if rule.unique_by is not None and key is not None else None
        if key is None and rule.if_match:
            place = f"{rule.key.name} header" if rule.key.source == "header" else "key in the body"
            raise MissingKey(f"Send a unique {place}: conditional updates take turns by their keys")
        if key is None:
            return None, caller
        path = request.path.rstrip("/") or "/"  # as rules match: an app may redirect from one to the other
        parts = (request.method, path, request.query, value_of(headers, "content-type"), request.body)
        fingerprint = self._fingerprints.of(rule, parts)
        scope = yield from self.scope(rule, match.route, request, caller)
        operation = Operation(
            scope,
            key,
            fingerprint,
            rule.name,
            partial(self._fingerprints.matches, rule, parts),
            issued_at(rule, headers, key) if rule.policy.late == "refuse" else None,
            path if rule.if_match else unique,
            partial(kept_request, request) if rule.policy.effect == "steps" else None,
        )
        return operation, caller

    def caller(self, request: Request) -> Plan[Caller]:
        """Return the names of the caller and of its tenant, which is empty if keys do not belong to tenants."""
        tenant = (yield from principal_of(self.tenant, request)) if self.tenant is not None else ""
        return (yield from principal_of(self.principal, request)), tenant

    def scope(self, rule: Rule, route: str, request: Request, caller: Caller) -> Plan[str]:
        """Return the scope of the key: its owner, as the rule's `scope` says."""
        principal, tenant = caller
        if callable(rule.scope):
            custom = yield from principal_of(rule.scope, request)
            return rule.scope_of(tenant=tenant, custom=custom, route=route)
        asked = (id(rule), route, principal, tenant)
        found = self._scopes.get(asked)
        if found is not None:
            return found[0]
        scope = rule.scope_of(principal=principal, tenant=tenant, route=route)
        if len(route) + len(principal) + len(tenant) <= LONGEST_REMEMBERED:
            if len(self._scopes) >= MOST_SCOPES:
                self._scopes.clear()
            self._scopes[asked] = (scope, rule)  # holds the rule, so that its id is not reused
        return scope

    def _context(self, match: Match, request: Request, principal: str, tenant: str) -> dict[str, Any]:
        """Return the values that templates may name.  The body is parsed only if a template names it: it may not be JSON."""
        headers: dict[str, list[str]] = {}
        for name, value in request.headers:
            headers.setdefault(name, []).append(value)
        return {
            "principal": principal,
            "tenant": tenant,
            "path": match.params,
            "query": parse_qs(request.query, keep_blank_values=True),
            "headers": headers,
            "body": request.json() if request.body and reads_body(match.rule) else None,
            "now": self.guard.clock.time() + self.guard.store.shift,  # `shift` is set if a test moves the store's clock
        }

    def policy(self, rule: Rule) -> Policy:
        """Return the rule's policy; with if_match, updates of one resource run one after the other."""
        return take_turns(rule.policy) if rule.if_match else rule.policy

    def check_effects(self) -> None:
        """Raise ConfigurationError if a rule needs transactions and the store has none, or their driver is missing."""
        for rule in self.contract.rules:
            if rule.idempotent and self.enforces(rule) and rule.policy.effect == "transaction":
                lender = self.guard.store.lender
                if lender is None:
                    problem = NO_LENDER.format(url=hide_password(self.guard.store.url))
                    raise ConfigurationError(f"The rule {rule.name!r} cannot be applied: {problem}")
                check_driver = getattr(lender, "check_driver", None)
                if self.can_await and check_driver is not None:
                    check_driver()

    def rules_declared(self) -> None:
        """Check the requirements of all rules, when the rules on endpoints are known as well."""
        self.check_effects()
        self.rates = self.rates or default_rates(self.contract)
        self._warn(stacklevel=3)

    def _warn(self, stacklevel: int) -> None:
        """Warn, once for each rule without a principal, that all callers share its keys."""
        unscoped = frozenset(self.contract.unscoped)
        for name in sorted(unscoped - self._warned):
            text = f"The rule {name!r} has no principal: all callers that know a key see its outcome"
            warnings.warn(text, stacklevel=stacklevel)
        self._warned = unscoped

    # Around the app

    def begin(
        self,
        match: Match,
        request: Request,
        current_etag: Plan[Etag] | None,
        *,
        mount: str = "",
        policy: Policy | None = None,
        longest_wait: float | None = None,
    ) -> Plan[Response | Exchange | None]:
        """Claim the operation.  Return an exchange if the app must be called now, or a response to send instead.

        Return None if the app must be called unguarded: the key is optional and was not sent, an outer middleware guards
        this operation, or the store is down and the rule says `store_down = "run"`.

        Args:
            match: The rule of the request.
            request: The whole request.
            current_etag: Finds the resource's ETag, for a rule with `if_match`.
            mount: The prefix that the app is mounted at.
            policy: Used instead of the rule's policy.
            longest_wait: The most seconds to wait for a running attempt, even if the caller would wait longer.
        """
        try:
            operation, caller = yield from self.operation(match, request)
        except OncemoreError as error:
            return self.refusal(error, match)
        if operation is None or self.is_guarded(operation, request.native):
            return None
        policy, wait = policy or self.policy(match.rule), wait_of(request.headers, longest_wait)
        attempt = ATTEMPTS[policy.effect](self.guard, operation, policy)
        try:
            answer = yield from attempt.begin(wait)
        except OncemoreError as error:
            is_down = isinstance(error, StoreError) and not isinstance(error, CorruptRecord)
            if not is_down or match.rule.store_down != "run":
                return self.refusal(error, match, operation, mount)
            log.error("The store is down, and %s runs unguarded: %s", match.rule.name, error)
            return None
        if answer is not None:
            return self.replay(answer, match.rule, operation)
        if match.rule.rate is None and not match.rule.if_match:
            return Exchange(self, match, attempt, match.rule)
        try:
            yield from self.admit(match.rule, attempt.op, request, caller, current_etag)
        except GeneratorExit:  # the event loop has ended, and the ledger cannot be asked any more
            attempt.drop()
            raise
        except BaseException as error:
            yield from attempt.withdraw(error)
            if isinstance(error, OncemoreError):
                return self.refusal(error, match, operation)
            raise
        return Exchange(self, match, attempt, match.rule)

    def is_guarded(self, operation: Operation, native: Any) -> bool:
        """Whether an outer middleware has claimed this operation for this request: a second claim would wait for it."""
        outer = CURRENT.get()
        return outer is not None and outer.operation.id == operation.id and native_mapping(native).get(GUARDED) is outer

    def admit(
        self, rule: Rule, op: Op, request: Request, caller: Caller, current_etag: Plan[Etag] | None
    ) -> Plan[None]:
        """Raise if the rule refuses the claimed operation: the caller sends too many new keys, or If-Match does not hold."""
        if rule.rate is not None and op.attempt == 1:
            if self.rates is None:
                self.rules_declared()  # the rule was added after the counter was chosen
            principal, tenant = caller
            assert self.rates is not None, "a rule with a rate has a counter"
            yield Admission(self.rates, rule, join(rule.name, tenant, principal))
        if rule.if_match:
            assert current_etag is not None, "a middleware can look the ETag up"
            yield from check_if_match(request.headers, current_etag)

    # From an answer to a response

    def outcome(self, rule: Rule, status: int, headers: Headers, body: bytes) -> Outcome:
        """Return the outcome of a response, redacted if it is kept.

        It is a tombstone if the response is too large, or if `redact` has failed.
        """
        if len(body) > rule.max_response:
            return Outcome("tombstone", status, body=b"size")
        outcome = Outcome("response", status, kept_headers(headers, self._keep), body)
        # With unique_by, the unique record may keep an outcome that the rule itself does not keep.
        if self.redact is None or not (rule.unique_by is not None or is_final(outcome, rule.policy)):
            return outcome
        try:
            redacted = self.redact(outcome)
            if not isinstance(redacted, Outcome):
                raise TypeError(f"The redact function returned a {type(redacted).__name__}: return an Outcome")
            return decode_outcome(encode_outcome(redacted))  # checked now: `settle` cannot store a text as body
        except Exception:  # the effect has happened, so a retry must not perform again
            log.exception("The redact function failed; %s stores a tombstone without the response", rule.name)
            return Outcome("tombstone", status)

    def headers(self, rule: Rule, answer: Answer) -> list[tuple[str, str]]:
        """Return the headers that say whether the response is stored, replayed or unstored (and why), and when it expires."""
        status, is_tombstone = rule.status_header, answer.outcome.kind == "tombstone"
        how = "unstored" if is_tombstone or answer.how in ("released", "unknown") else answer.how
        value = getattr(status, how)
        found = [(status.name.lower(), value)] if status.name and value else []
        if how == "unstored":
            reason = answer.outcome.body.decode() if is_tombstone else "store" if answer.how == "unstored" else ""
            if found and reason:  # without a reason, the rule itself does not keep such responses
                found.append(("idempotency-reason", reason))
        elif answer.expires_at is not None and status.expires:
            found.append((status.expires.lower(), http_date(int(answer.expires_at))))
        return found

    def replay(self, answer: Answer, rule: Rule, operation: Operation | None = None) -> Response:
        """Return the stored response as it was.  If it cannot be shown, tell the observers of *operation*, and refuse."""
        outcome = answer.outcome
        if outcome.kind != "response":
            try:
                outcome = value_response(outcome)
            except OncemoreError as error:
                if operation is not None:
                    self.guard.refused(operation, error)
                return self.refusal(error)
        is_same = rule.replay_status == "same" or not 200 <= outcome.status < 300
        status = outcome.status if is_same else int(rule.replay_status)
        return Response(status, [*outcome.headers, *self.headers(rule, answer)], outcome.body)

    def refusal(
        self, error: OncemoreError, match: Match | None = None, operation: Operation | None = None, mount: str = ""
    ) -> Response:
        """Return the problem document for an error; *mount* is the prefix that the app is mounted at."""
        return problem_response(
            error, match, operation, self.problem_base, self.status_path, mount=mount, body=self.problem
        )


class Exchange(msgspec.Struct, frozen=True, eq=False):
    """A guarded request that is performed now.  The middleware calls the app, and records the end with one verb.

    A verb returns when the ledger has recorded the end.  `record` and `record_stream` return headers to add to the app's
    response, or a `Response` to send instead: a successor's outcome if this attempt was too slow, or a refusal.
    """

    door: Door[Any]
    match: Match
    attempt: LeaseAttempt
    rule: Rule

    def record(
        self, status: int, headers: Headers, body: bytes, cause: BaseException | None = None
    ) -> Plan[Response | list[tuple[str, str]]]:
        """Record a complete response.  Return the headers that say how it was stored, or a Response to send instead."""
        return self._finish(self.settle(status, headers, body, cause))

    def record_stream(self, status: int, *, has_length: bool) -> Plan[Response | list[tuple[str, str]]]:
        """Record that the operation happened, before the first byte of a response that is not held back.

        If the rule keeps no such response, the attempt goes on until the response has ended, and the caller then releases
        it; but a transaction is rolled back immediately.
        """
        return self._finish(self.settle_stream(status, has_length=has_length))

    def fail(self, error: BaseException) -> Plan[Response | None]:
        """Record that the app raised *error*.  Return a Response to send instead of the error, or None to raise it."""
        try:
            yield from self.attempt.fail(error)
        except StoreError as refused:  # the database refused the transaction: the client's retry is safe
            return self.refusal(refused)
        return None

    def _finish(self, settling: Plan[Answer]) -> Plan[Response | list[tuple[str, str]]]:
        try:
            answer = yield from settling
        except OncemoreError as error:
            return self.refusal(error)
        return self.replay(answer) if answer.how == "replayed" else self.headers(answer)

    def settle(self, status: int, headers: Headers, body: bytes, cause: BaseException | None = None) -> Plan[Answer]:
        """Record a complete response, as `record` does; return the answer, or raise the refusal.

        *cause* is the exception behind an error page, if the framework gives it: the rule's `doubt` may name it, or the
        database may have refused the transaction with it.
        """
        attempt = self.attempt
        if cause is not None and isinstance(attempt, TransactionAttempt) and attempt.is_retryable(cause):
            return attempt.fail(cause)  # type: ignore[return-value]  # raises the refusal for the client
        outcome = self.door.outcome(self.rule, status, headers, body)
        return self._withdraw(outcome) if status in REPEATING_REDIRECTS else attempt.settle(outcome, cause)

    def _withdraw(self, outcome: Outcome) -> Plan[Answer]:
        yield from self.attempt.withdraw()
        return Answer(outcome, "released")

    def settle_stream(self, status: int, *, has_length: bool) -> Plan[Answer]:
        """Record a stream, as `record_stream` does; return the answer, or raise the refusal."""
        attempt, tombstone = self.attempt, stream_tombstone(self.rule, status, has_length=has_length)
        is_kept = (has_length or self.rule.streams != "release") and attempt.keeps(tombstone)
        if is_kept or attempt.doubts(tombstone):
            return (yield from attempt.settle(tombstone))
        if attempt.policy.effect == "transaction":
            yield from attempt.release()
        return Answer(tombstone, "unstored")

    def headers(self, answer: Answer) -> list[tuple[str, str]]:
        return self.door.headers(self.rule, answer)

    def replay(self, answer: Answer) -> Response:
        return self.door.replay(answer, self.rule, self.attempt.operation)

    def refusal(self, error: OncemoreError) -> Response:
        return self.door.refusal(error, self.match, self.attempt.operation)


def stream_tombstone(rule: Rule, status: int, *, has_length: bool) -> Outcome:
    """Return the tombstone of a response that is not held back; its body is the reason: "size" or "streaming"."""
    return Outcome("tombstone", status, body=b"size" if has_length or rule.streams == "store" else b"streaming")


def issued_at(rule: Rule, headers: Headers, key: str) -> float | None:
    """Return the time when the key was made, from a header or from the key itself (UUIDv7); None if it is not known."""
    if not rule.first_sent:
        return uuid7_time(key, rule.key.format)
    text = value_of(headers, rule.first_sent.lower())
    try:
        sent = parsedate_to_datetime(text) if text else None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidKey(
            f"{rule.first_sent} is not an HTTP date: send one such as Tue, 15 Nov 1994 08:12:31 GMT"
        ) from error
    if sent is None:
        return None
    return (sent if sent.tzinfo else sent.replace(tzinfo=UTC)).timestamp()  # one of HTTP's three date forms has no zone


def wait_of(headers: Headers, most: float | None = None) -> float | None:
    """Return how long the caller waits (X-Request-Timeout: seconds, or `500ms`), but not more than *most*.

    Return *most* if the header is missing or not a duration.
    """
    if isinstance(headers, Fields) and "x-request-timeout" not in headers.first:
        return most
    text = value_of(headers, "x-request-timeout")
    if not text or len(text) > LONGEST_TIMEOUT:
        return most
    try:
        asked = duration(float(text) if text.replace(".", "", 1).isdigit() else text)
    except (ConfigurationError, ValueError):
        return most
    return asked if most is None else min(asked, most)


def reads_body(rule: Rule) -> bool:
    """Whether the rule makes its key, or its unique_by, from the body."""
    templates = [template for template in (rule.key.template, rule.unique_by) if template is not None]
    fields = [part for template in templates for part in template.parts if isinstance(part, Field)]
    return rule.key.source == "body" or any(field.text.startswith("body") for field in fields)


@lru_cache(maxsize=256)
def take_turns(policy: Policy) -> Policy:
    return dataclasses.replace(policy, on_unique="serialize")


@lru_cache(maxsize=4096)
def http_date(seconds: int) -> str:
    return formatdate(seconds, usegmt=True)
